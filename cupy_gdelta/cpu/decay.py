"""Products of gates, formed by multiplication alone: a gate may be 0, negative or above 1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .pieces import Scratch


class Decay(NamedTuple):
    """What the gates of a chunk do, in the state dtype."""

    between: np.ndarray  # [M, L, R, C, C]  weight_j prod(gate_{j+1} .. gate_i) for j <= i, else 0
    start: np.ndarray  # [M, L, R, C, 1]  prod(gate_1 .. gate_i): what is left of the state before
    end: np.ndarray  # [M, L, R, C, 1]  weight_j prod(gate_{j+1} .. gate_C)
    total: np.ndarray  # [M, L, R]  prod(gate_1 .. gate_C), in the wide dtype


def products(gate: np.ndarray, weight: np.ndarray | None, scratch: Scratch) -> Decay:
    """Decays in every chunk of gate [M, L, R, C] (a dtype wider than the state's; overwritten).

    Blocks of 1, 2, 4 ... tokens are joined in pairs: between a token of the later block and one of
    the earlier lie the product up to the one, inside its block, and the product from the other, in
    its own. The running products are wider than the state because their rounding errors would not
    average out: a constant gate makes the same error in every token.
    """
    *lead, C = gate.shape
    n = gate.size // C
    between = scratch.zeroed("between", n, C, C)
    item = between.itemsize
    up = gate.reshape(n, C)  # product from the start of the block up to i
    down = scratch("down", n, C, dtype=gate.dtype)  # weighted product from j + 1 to the block's end
    down[...] = 1 if weight is None else weight.reshape(n, C)
    np.ndarray((n, C), between.dtype, between, 0, (C * C * item, (C + 1) * item))[...] = down
    size = 1
    while size < C:
        ups, downs = (x.reshape(n, -1, 2, size) for x in (up, down))
        later, earlier = (x.astype(between.dtype) for x in (ups[:, :, 1], downs[:, :, 0]))
        np.multiply(later[..., None], earlier[:, :, None], out=below_diagonal(between, size))
        downs[:, :, 0] *= ups[:, :, 1, -1:]
        ups[:, :, 1] *= ups[:, :, 0, -1:]
        size *= 2
    start, end = (x.astype(between.dtype).reshape(*lead, C, 1) for x in (up, down))
    return Decay(between.reshape(*lead, C, C), start, end, up[:, -1].reshape(lead))


def diagonal_blocks(x: np.ndarray, size: int) -> np.ndarray:
    """View [n, C / size, size, size] of the blocks on the diagonal of x [n, C, C], contiguous."""
    return _blocks(x, size, size, 0)


def below_diagonal(x: np.ndarray, size: int) -> np.ndarray:
    """View [n, C / 2 size, size, size] of the lower left quarter of each block of 2 size."""
    return _blocks(x, size, 2 * size, size * x.shape[-1])


def _blocks(x: np.ndarray, size: int, step: int, offset: int) -> np.ndarray:
    n, C, _ = x.shape
    strides = tuple(x.itemsize * s for s in (C * C, step * (C + 1), C, 1))
    return np.ndarray((n, C // step, size, size), x.dtype, x, x.itemsize * offset, strides)


def rounded(total: np.ndarray, drift: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """total [M, L, R] as factors [M, L, R, 1, 1] of the state whose errors do not add up.

    A factor goes up or down by a unit in the last place where the errors so far, drift [L, R] in
    such units and left for the next segment, come to half of one. Chunks by the thousand with the
    same gates would all err the same way otherwise. 0 stays 0, and 1 stays 1.
    """
    near = total.astype(dtype)
    unit = np.where(np.isfinite(near), np.spacing(near), 0)
    lost = (total - near) / unit
    lost[~np.isfinite(lost)] = 0
    lost[0] += drift
    np.add.accumulate(lost, axis=0, out=lost)
    steps = np.rint(lost)
    np.subtract(lost[-1], steps[-1], out=drift)
    steps[1:] -= steps[:-1].copy()
    near += (steps * unit).astype(dtype)
    return near[..., None, None]
