"""How the transition of a piece is formed for the delta rule, whatever its gates are.

Its columns are states that start at the unit vectors. Gates below 1 may take all of them below
every number of their dtype, while later gates or those of another rank are large; gates above 1 may
take some beyond the largest, in directions that no key has. So the gates below 1 are multiplied by
powers of two, exactly, which are counted instead, and the tokens run in parts in which what grows
cannot overflow, after each of which every column is scaled to numbers about 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import arrays
from ..problem import Problem
from .reach import BLOCK, gains, sums
from .spaces import Space

GROWTH = {"float32": 100.0, "float64": 900.0}  # of a column in one part, in powers of two
GRID = {"float32": 2.0**24, "float64": 2.0**50}  # sums of log gates are multiples of one over this


def parts(p: Problem, space: Space, stop: int, longest: int) -> Iterator[slice]:
    """The first tokens in parts of ``longest`` at most, in which no state grows beyond GROWTH.

    Where a token alone may do that, it is a part.
    """
    for at in range(0, stop, longest):
        end = min(at + longest, stop)
        growth = _growth(p, space, at, end)
        start, total = at, 0.0
        for first, most in _steps(growth, space, at, end, GROWTH[p.state_dtype]):
            if total + most > GROWTH[p.state_dtype] and first > start:
                yield slice(start, first)
                start, total = first, 0.0
            total += most
        yield slice(start, end)


def _growth(p: Problem, space: Space, start: int, stop: int) -> Any:
    """Base-2 logarithms of what a token may multiply a state by where it is above 1, [B, t, H]."""
    logs, xp = space.wide(gains(p, space, start, stop)), space.xp
    if p.gate is not None:
        gate = space.wide(space.widened(p.gate, start, stop))
        with np.errstate(all="ignore"):
            own = gate * math.log2(math.e) if p.log_gate else xp.log2(xp.abs(gate))
        logs = logs + xp.clip(own, 0, None)
    return xp.where(xp.isfinite(logs), logs, 0.0)


def _steps(
    growth: Any, space: Space, at: int, end: int, limit: float
) -> Iterator[tuple[int, float]]:
    """Blocks of tokens, or tokens where a block grows by too much: the first one, the growth."""
    for i, most in enumerate(sums(growth, space).max((0, 2))):
        first = i * BLOCK
        if most <= limit:
            yield at + first, float(most)
            continue
        tokens = space.host(space.xp.amax(growth[:, first : first + BLOCK], (0, 2)))
        yield from ((at + first + j, float(x)) for j, x in enumerate(tokens))


def lifted(p: Problem, space: Space, some: slice) -> tuple[dict[str, Any], Any]:
    """The gates of some tokens, those below 1 times powers of two; the exponents of these, [B, H].

    The product of what the former leave of such gates stays within .5 and 2.
    """
    if p.gate is None:
        return {}, space.zeros((p.B, p.H), "float64").array
    xp = space.xp
    gate = space.wide(space.widened(p.gate, some.start, some.stop))
    with np.errstate(all="ignore"):
        logs = gate if p.log_gate else xp.log(xp.abs(gate))
        below = xp.isfinite(logs) & (logs < 0)
        total = xp.cumsum(xp.where(below, logs, 0.0), 1)
        e = xp.floor(total * math.log2(math.e))
        if p.log_gate:  # the differences are exact, so that nothing adds up
            grid = GRID[p.state_dtype]
            left = _differences(xp.round((total - e * math.log(2)) * grid) / grid, xp)
            gate = xp.where(below, left, gate)
        else:
            gate = space.scaled(gate, -_differences(e, xp))
    found = arrays.empty(p.v, tuple(gate.shape), p.state_dtype)
    found.array[...] = gate
    return {"log_gate" if p.log_gate else "gate": found.owner}, e[:, -1]


def _differences(x: Any, xp: Any) -> Any:
    """Of neighbours along axis 1, of the first to 0."""
    return xp.concatenate([x[:, :1], x[:, 1:] - x[:, :-1]], 1)


def bounded(space: Space, x: Any) -> Any:
    """``x`` with the largest number for what is none: a state of zero stays zero under it.

    A NaN in the inputs is in the state after the same tokens too.
    """
    largest, xp = float(np.finfo(np.float64).max), space.xp
    return xp.where(xp.isfinite(x), x, largest)
