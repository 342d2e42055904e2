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
        sums = _sums(_logs(p, space, at, stop), space)  # [B, blocks, H]
        with np.errstate(invalid="ignore"):  # a gate of 0 and one of infinity
            total = total[:, None] + np.cumsum(sums, axis=1)
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
        if p.rule == "delta":
            beta = 1 if p.beta is None else space.widened(p.beta, start, stop)
            gain = xp.abs(1 - beta * _squares(p, space, start, stop))
            logs = logs + xp.log2(xp.clip(gain, 1, None))
    return logs


def _squares(p: Problem, space: Space, start: int, stop: int) -> Any:
    """k . k for each token and head of v, [B, t, H]."""
    k = space.widened(p.k, start, stop)
    found = space.xp.einsum("bthk,bthk->bth", k, k)
    if p.qk_l2norm:
        found = found / (found + 1e-6)
    repeated = found[..., None] + space.zeros((1, 1, 1, p.H // p.Hq), "float32").array
    return repeated.reshape(p.B, stop - start, p.H)


def _sums(logs: Any, space: Space) -> np.ndarray:
    """Sums over blocks of tokens, [B, blocks, H] in float64 on the host."""
    B, t, H = logs.shape
    full = t // BLOCK * BLOCK
    sums = [space.host(logs[:, :full].reshape(B, full // BLOCK, BLOCK, H).sum(2))]
    if full < t:
        sums.append(space.host(logs[:, full:].sum(1)[:, None]))
    return np.concatenate(sums, axis=1).astype(np.float64)


def decay(p: Problem, space: Space, tokens: int) -> Any:
    """The product of the first gates, float64 [B, H]; a gate of 0 makes it 0."""
    if p.gate is None:
        return space.zeros((p.B, p.H), "float64").array + 1
    gate = space.widened(p.gate, 0, tokens)
    with np.errstate(all="ignore"):
        if p.log_gate:
            return finite(space, space.xp.exp(space.wide(gate).sum(1)))
        return finite(space, space.product(gate))


def finite(space: Space, x: Any) -> Any:
    """``x`` with infinities as the largest numbers: a state of zero stays zero under them."""
    largest = float(np.finfo(np.float64).max)
    return space.xp.clip(x, -largest, largest)
