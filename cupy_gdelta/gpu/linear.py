"""Launches cuda/linear.cu: the linear rule in chunks on tensor cores, for bfloat16."""

from __future__ import annotations

import functools
import struct

import numpy as np

from .. import arrays
from ..arrays import View
from ..problem import Problem
from . import call, loader
from .chunks import ChunkTile
from .loader import Launch
from .plan import Plan

PIECES = struct.Struct("=2Q q 2i")  # PieceArgs of cuda/linear.cu
SCAN_THREADS = 256


@functools.lru_cache(maxsize=4096)
def expression(K: int, V: int, tile: ChunkTile, output: bool) -> str:
    """The template instantiation for a tile, as NVRTC is asked for it."""
    flags = f"{str(tile.wide).lower()}, {str(output).lower()}"
    return f"linear<{K}, {V}, {tile.block_cols}, {tile.stages}, {flags}>"


def pieces(tile: ChunkTile, states: int, decays: int) -> np.ndarray:
    """The kernels' second argument, laid out as PieceArgs."""
    packed = PIECES.pack(states, decays, tile.piece_size, tile.pieces, 0)
    return np.frombuffer(packed, np.dtype((np.void, PIECES.size)))


def launch(
    p: Problem, plan: Plan, y: View, state: View | None, offsets: View | None
) -> View | None:
    """Run on the current stream of the current device, which must be the arrays' own.

    Returns the workspace, where sequences are cut into pieces: their states and decays.
    """
    tile, device, space = plan.tile, p.v.device, None
    assert isinstance(tile, ChunkTile)
    args = call.arguments(p, y, state, offsets)
    items = p.N * p.H * -(-p.V // tile.block_cols)
    cut = pieces(tile, 0, 0)
    found = []
    if tile.pieces > 1:
        size = p.N * p.H * p.K * p.V
        space = arrays.empty(p.v, (tile.pieces * (size + p.N * p.H),), "float32")
        cut = pieces(tile, space.ptr, space.ptr + 4 * tile.pieces * size)
        name, blocks = expression(p.K, p.V, tile, False), items * (tile.pieces - 1)
        blocks = min(blocks, call.MAX_GRID)
        found.append(Launch(name, blocks, tile.state_threads, tile.state_bytes, (args, cut)))
        blocks = min(-(-size // SCAN_THREADS), call.MAX_GRID)
        given = (args, cut, np.int64(p.K), np.int64(p.V))
        found.append(Launch("scan_pieces", blocks, SCAN_THREADS, 0, given))
    name, blocks = expression(p.K, p.V, tile, True), min(items * tile.pieces, call.MAX_GRID)
    found.append(Launch(name, blocks, tile.threads, tile.shared_bytes, (args, cut)))
    loader.run("linear", found, device)
    return space
