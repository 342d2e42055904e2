"""Launches cuda/linear32.cu: the linear rule in chunks on tensor cores, for float32 and float16."""

from __future__ import annotations

import functools
import struct

import cupy
import numpy as np

from .. import arrays
from ..arrays import View
from ..problem import Problem
from . import call, loader, tensormap
from .chunks32 import CHUNK, Tile32
from .loader import Launch
from .plan import Plan

PIECES = struct.Struct("=2Q q 2i")  # PieceArgs of cuda/linear32.cu
SCAN_THREADS = 256
ELEMENTS = {"float32": "float", "float16": "half_t"}


@functools.lru_cache(maxsize=4096)
def expression(tile: Tile32, output: bool) -> str:
    """The template instantiation for a tile, as NVRTC is asked for it."""
    sizes = (tile.K, tile.V, tile.cols, tile.turns, tile.stages, tile.slots)
    split = (tile.out_rows, tile.out_cols, tile.state_rows, tile.state_cols)
    helpers = (tile.copy_warps, tile.decay_warps)
    kind = (tile.products, tile.wide, str(output).lower())
    return (
        f"linear32<{', '.join(map(str, (ELEMENTS[tile.dtype], *sizes, *split, *helpers, *kind)))}>"
    )


def pieces(tile: Tile32, states: int, decays: int) -> np.ndarray:
    """The kernels' second argument, laid out as PieceArgs."""
    packed = PIECES.pack(states, decays, tile.piece_size, tile.pieces, 0)
    return np.frombuffer(packed, np.dtype((np.void, PIECES.size)))


NO_MAP = np.frombuffer(bytes(tensormap.BYTES), np.dtype((np.void, tensormap.BYTES)))


def maps(p: Problem, tile: Tile32) -> tuple[np.ndarray, ...]:
    """The kernel's other arguments: how the copy engine finds q, k and v, where it copies them."""
    if not tile.boxes:
        return (NO_MAP,) * 3
    return tuple(tensormap.make(x, CHUNK) for x in (p.q, p.k, p.v))


@functools.cache
def _has_copy_engine(device: int) -> bool:
    return int(cupy.cuda.Device(device).compute_capability) in (90, 100, 103)


def workspace(tile: Tile32, size: int, heads: int) -> tuple[int, int]:
    """Bytes for the states and decays of pieces, and where the decays begin."""
    decays = -(-4 * tile.pieces * size // 8) * 8
    return decays + 8 * tile.pieces * heads, decays


def launch(
    p: Problem, plan: Plan, y: View, state: View | None, offsets: View | None
) -> View | None:
    """Run on the current stream of the current device, which must be the arrays' own.

    Returns the workspace, where sequences are cut into pieces: their states and decays.
    """
    tile, device, space = plan.tile, p.v.device, None
    assert isinstance(tile, Tile32)
    if _has_copy_engine(device) and all(tensormap.fits(x) for x in (p.q, p.k, p.v)):
        tile = tile.by_copy_engine()
    args = call.arguments(p, y, state, offsets)
    items = p.N * p.H * tile.col_blocks
    cut, tensors = pieces(tile, 0, 0), maps(p, tile)
    found = []
    if tile.pieces > 1:
        size = p.N * p.H * p.K * p.V
        total, decays = workspace(tile, size, p.N * p.H)
        space = arrays.empty(p.v, (total // 4,), "float32")
        cut = pieces(tile, space.ptr, space.ptr + decays)
        name, blocks = expression(tile, False), items * (tile.pieces - 1)
        threads, shared = tile.state_threads, tile.state_bytes
        found.append(Launch(name, blocks, threads, shared, (args, cut, *tensors)))
        given = (args, cut, np.int64(p.K), np.int64(p.V))
        found.append(Launch("scan_pieces", -(-size // SCAN_THREADS), SCAN_THREADS, 0, given))
    name, blocks = expression(tile, True), items * tile.pieces
    found.append(Launch(name, blocks, tile.threads, tile.shared_bytes, (args, cut, *tensors)))
    loader.run("linear32", found, device)
    return space
