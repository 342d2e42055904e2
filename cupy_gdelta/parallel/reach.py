"""How far into a piece the state before it matters, and what its gates leave of that state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..problem import Problem
from .spaces import Space

# Times a factor of 2 to this power, every finite number of the state's dtype is less than half of
# its smallest one: the smallest is 2^-149 (2^-1074), the largest 2^128 (2^1024), and a product with
# a transition adds up to 256 of them.
VANISHES = {"float32": -288.0, "float64": -2108.0}
BLOCK = 64  # tokens between which no one asks
FIRST = 4096  # tokens that are read at first; then twice as many, and so on
LN2 = (
    0.693147180369123816490,
    1.90821492927058770002e-10,
)  # a sum: the first has 20 zeros at its end
SPAN = 512  # numbers from .5 to 1 whose product float64 holds
NUMBERS = 1 << 24  # gates whose product is formed at a time


def reach(p: Problem, space: Space, entering: int) -> tuple[int, bool]:
    """How many of the first tokens see the state before them, and whether nothing of it is left.

    The norm of what takes the state from token to token is bounded by its gate, for the delta rule
    times ``max(1, |1 - beta k.k|)``. Where the bound comes to VANISHES a state in its own dtype is
    gone for good, in every sequence and head. Logarithms serve for this question alone: no number
    that is computed with comes from them.
    """
    limit = VANISHES[p.state_dtype]
    if not p.B * p.H:
        return 0, True
    low = np.zeros((p.B, p.H))
    total, at, step = low, 0, FIRST
    while at < entering:
        stop = min(at + step, entering)
        found = sums(_logs(p, space, at, stop), space)  # [B, blocks, H]
        with np.errstate(invalid="ignore"):  # a gate of 0 and one of infinity
            total = total[:, None] + np.cumsum(found, axis=1)
        low = np.minimum.accumulate(np.concatenate([low[:, None], total], axis=1), axis=1)
        gone = np.flatnonzero(low.max((0, 2)) < limit)
        if gone.size:
            return min(at + int(gone[0]) * BLOCK, entering), True
        total, low = total[:, -1], low[:, -1]
        at, step = stop, 2 * step
    return entering, False


def _logs(p: Problem, space: Space, start: int, stop: int) -> Any:
    """Base-2 logarithms of the bound for each token, [B, t, H]."""
    xp = space.xp
    with np.errstate(all="ignore"):
        if p.gate is None:
            logs = space.zeros((p.B, stop - start, p.H), "float32").array
        elif p.log_gate:
            logs = space.widened(p.gate, start, stop) * math.log2(math.e)
        else:
            logs = xp.log2(xp.abs(space.widened(p.gate, start, stop)))
    return logs + gains(p, space, start, stop) if p.rule == "delta" else logs


def gains(p: Problem, space: Space, start: int, stop: int) -> Any:
    """Base-2 logarithms of max(1, |1 - beta k.k|), [B, t, H]."""
    xp = space.xp
    with np.errstate(all="ignore"):
        beta = 1 if p.beta is None else space.widened(p.beta, start, stop)
        gain = xp.abs(1 - beta * _squares(p, space, start, stop))
        return xp.log2(xp.clip(gain, 1, None))


def _squares(p: Problem, space: Space, start: int, stop: int) -> Any:
    """k . k for each token and head of v, [B, t, H]."""
    k = space.widened(p.k, start, stop)
    found = space.xp.einsum("bthk,bthk->bth", k, k)
    if p.qk_l2norm:
        found = found / (found + 1e-6)
    repeated = found[..., None] + space.zeros((1, 1, 1, p.H // p.Hq), "float32").array
    return repeated.reshape(p.B, stop - start, p.H)


def sums(logs: Any, space: Space) -> np.ndarray:
    """Sums over blocks of tokens, [B, blocks, H] in float64 on the host."""
    B, t, H = logs.shape
    full = t // BLOCK * BLOCK
    found = [space.host(logs[:, :full].reshape(B, full // BLOCK, BLOCK, H).sum(2))]
    if full < t:
        found.append(space.host(logs[:, full:].sum(1)[:, None]))
    return np.concatenate(found, axis=1).astype(np.float64)


def decay(p: Problem, space: Space, tokens: int) -> tuple[Any, Any]:
    """The product of the first gates as m * 2^e with m from .5 to 1, both float64 [B, H].

    A gate of 0 makes m 0, and no finite gates make it overflow or underflow.
    """
    e = space.zeros((p.B, p.H), "float64").array
    if p.gate is None:
        return e + 0.5, e + 1
    step = max(SPAN, NUMBERS // max(1, p.B * p.H))
    parts = (space.widened(p.gate, at, min(at + step, tokens)) for at in range(0, tokens, step))
    with np.errstate(all="ignore"):
        if p.log_gate:
            return _exponential(space, e + sum(space.longer(x).sum(1) for x in parts))
        m = space.longer(e + 1)
        for gate in parts:
            some, exponents = _product(space, gate)
            m, more = space.xp.frexp(m * some)
            e = e + exponents + space.wide(more)
    return space.wide(m), e


def _exponential(space: Space, logs: Any) -> tuple[Any, Any]:
    """Of these, as decay has it."""
    xp = space.xp
    e = xp.floor(xp.where(xp.isfinite(logs), logs, 0.0) * math.log2(math.e)) + 1
    return space.wide(xp.exp(logs - e * LN2[0] - e * LN2[1])), space.wide(e)


def _product(space: Space, gate: Any) -> tuple[Any, Any]:
    """Of gates [B, t, H] over t, as decay has it."""
    m, e = space.xp.frexp(gate)
    m, e = space.longer(m), space.wide(e).sum(1)
    while m.shape[1] > 1:
        B, t, H = m.shape
        full = t // SPAN * SPAN
        parts = [m[:, :full].reshape(B, full // SPAN, SPAN, H).prod(2)] if full else []
        if full < t:
            parts.append(m[:, full:].prod(1)[:, None])
        m, more = space.xp.frexp(space.xp.concatenate(parts, 1))
        e = e + space.wide(more).sum(1)
    return m[:, 0], e
