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
    keep: np.ndarray  # [M, L, R, 1, 1]  prod(gate_1 .. gate_C), rounded
    rest: np.ndarray  # [M, L, R, 1, 1]  what the rounding of keep has lost


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
    total = up[:, -1]
    keep = total.astype(between.dtype)
    rest = np.where(np.isfinite(keep), total - keep, 0).astype(between.dtype)
    start, end = (x.astype(between.dtype).reshape(*lead, C, 1) for x in (up, down))
    keep, rest = (x.reshape(*lead, 1, 1) for x in (keep, rest))
    return Decay(between.reshape(*lead, C, C), start, end, keep, rest)


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


def advance(
    state: np.ndarray,
    keep: np.ndarray,
    rest: np.ndarray,
    write: np.ndarray,
    out: np.ndarray,
    room: np.ndarray,
) -> None:
    """out = (keep + rest) state + write; overwrites room. All [L, R, K, V] or broadcast to it."""
    np.multiply(state, rest, out=room)
    np.add(room, write, out=room)
    np.multiply(state, keep, out=out)
    np.add(out, room, out=out)
