"""A few tokens of either rule on NumPy, the states of the caller updated where they lie.

Batch entries and heads are independent: they are taken in blocks whose states fit the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .. import arrays
from ..step_problem import StepProblem
from . import steps, walk
from .pieces import bfloat16_bits, widen

BLOCK = 1 << 18  # numbers of a state that are worked on together


def advance(p: StepProblem, y: np.ndarray) -> None:
    """Write y [B, T, H, V] and update the states; arrays of bfloat16 carry its bits in uint16."""
    live: Any = slice(0, p.B)
    if isinstance(p.state_indices, np.ndarray):
        live = np.flatnonzero(p.state_indices >= 0)
        y[p.state_indices < 0] = 0

    def work(block: tuple[Any, slice]) -> None:
        with np.errstate(all="ignore"):
            _block(p, y, *block)

    count = p.B if isinstance(live, slice) else len(live)
    threads = walk.threads(count * p.H * p.K * p.V)
    if threads < 2:
        for block in _blocks(p, live, count):
            work(block)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, _blocks(p, live, count)):
            pass


def _blocks(p: StepProblem, live: Any, count: int) -> Iterator[tuple[Any, slice]]:
    """Batch entries, as a slice or their numbers, and heads."""
    heads = max(1, min(p.H, BLOCK // (p.K * p.V)))
    entries = max(1, BLOCK // (heads * p.K * p.V)) if heads == p.H else 1
    for first in range(0, count, entries):
        last = min(first + entries, count)
        some = slice(first, last) if isinstance(live, slice) else live[first:last]
        for head in range(0, p.H, heads):
            yield some, slice(head, min(head + heads, p.H))


def _block(p: StepProblem, y: np.ndarray, entries: Any, heads: slice) -> None:
    rows = p.state_indices[entries] if isinstance(p.state_indices, np.ndarray) else entries
    lanes = p.state.array[rows, heads]  # a view where rows are a slice
    kind = arrays.state_dtype(p.dtype)
    wide = np.dtype(kind)
    shape = (lanes.shape[0] * lanes.shape[1], p.K, p.V)
    in_place = isinstance(rows, slice) and p.state.dtype == kind and lanes.flags.c_contiguous
    if in_place:
        s = lanes.reshape(shape)
    else:
        s = np.empty(shape, wide)
        widen(lanes, p.state.dtype, s.reshape(lanes.shape))
    q, k, v, gate, beta = _tokens(p, entries, heads, wide)
    if p.states_out is None:
        out = steps.loop(p.rule, q, k, v, gate, beta, s)
    else:
        out = np.empty((shape[0], p.T, p.V), wide)
        for t in range(p.T):
            at = np.s_[:, t : t + 1]
            out[at] = steps.loop(p.rule, q[at], k[at], v[at], gate[at], beta[at], s)
            states = s.reshape(lanes.shape)
            p.states_out.array[entries, t, heads] = _narrow(states, p.state.dtype)
    if not in_place:
        p.state.array[rows, heads] = _narrow(s.reshape(lanes.shape), p.state.dtype)
    if p.scale != 1:
        out *= wide.type(p.scale)
    out = out.reshape(*lanes.shape[:2], p.T, p.V).swapaxes(1, 2)
    y[entries, :, heads] = _narrow(out, p.dtype)


def _tokens(p: StepProblem, entries: Any, heads: slice, wide: np.dtype) -> list[np.ndarray]:
    """q, k [n, T, K], v [n, T, V], gate and beta [n, T] of n pairs of entry and head, widened."""
    group = max(1, p.H // max(p.Hq, 1))
    shared = np.arange(heads.start, heads.stop) // group if group > 1 else heads

    def by_head(x: arrays.View, heads: Any) -> np.ndarray:
        some = x.array[entries][:, :, heads].swapaxes(1, 2)
        out = np.empty(some.shape, wide if x.dtype != "float64" else np.float64)
        widen(some, x.dtype, out)
        return out.reshape(-1, *out.shape[2:])

    q, k, v = by_head(p.q, shared), by_head(p.k, shared), by_head(p.v, heads)
    if p.qk_l2norm:
        for x in (q, k):
            x /= np.sqrt(np.einsum("...i,...i->...", x, x) + wide.type(1e-6))[..., None]
    scalars = [
        np.ones(v.shape[:2], wide) if x is None else by_head(x, heads) for x in (p.gate, p.beta)
    ]
    if p.log_gate:
        scalars[0] = np.exp(scalars[0].astype(np.float64)).astype(wide)  # rounded once
    return [q, k, v, *scalars]


def _narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """What to store x as in an array of ``dtype``; may destroy a copy, never x."""
    return bfloat16_bits(np.array(x)) if dtype == "bfloat16" else x
