"""Launches cuda/linear_sm90.cu: the linear rule in chunks on Hopper's warpgroup products."""

from __future__ import annotations

import functools
import struct
from typing import Any

import cupy
import numpy as np

from .. import arrays
from ..arrays import View
from ..problem import Problem
from . import call, loader, tensormap
from .plan import Plan
from .warpgroups import THREADS, WarpgroupTile

PIECES = struct.Struct("=3Q q 3i I")  # PieceArgs of cuda/linear_sm90.cu


@functools.lru_cache(maxsize=4096)
def expression(tile: WarpgroupTile) -> str:
    """The template instantiation for a tile, as NVRTC is asked for it."""
    return f"linear<{tile.dim}, {tile.dim}, {tile.stages}, {tile.dealing}>"


def pieces(p: Problem, tile: WarpgroupTile, states: int, decays: int, arrivals: int) -> np.ndarray:
    """The kernel's second argument, laid out as PieceArgs."""
    packed = PIECES.pack(states, decays, arrivals, tile.piece_size, tile.pieces, p.K, p.V, 0)
    return np.frombuffer(packed, np.dtype((np.void, PIECES.size)))


def launch(
    p: Problem, plan: Plan, y: View, state: View | None, offsets: View | None
) -> View | None:
    """Run on the current stream of the current device, which must be the arrays' own.

    Returns the workspace: where sequences are cut into pieces, their states, decays and arrivals;
    where they are dealt out, how many have been.
    """
    tile, space = plan.tile, None
    assert isinstance(tile, WarpgroupTile)
    items = p.N * p.H
    multiprocessors = cupy.cuda.Device(p.v.device).attributes["MultiProcessorCount"]
    blocks = items * tile.pieces if tile.pieces > 1 else min(items, multiprocessors)
    cut = pieces(p, tile, 0, 0, 0)
    if tile.pieces > 1:
        states = tile.pieces * items * tile.dim**2
        decays = tile.pieces * items
        space = arrays.empty(p.v, (states + decays + 4 * items,), "float32")
        ends = space.ptr + 4 * states, space.ptr + 4 * (states + decays)
        cut = pieces(p, tile, space.ptr, *ends)
        clear(ends[1], 4 * items)
    elif tile.queued and blocks < items:
        space = arrays.empty(p.v, (1,), "float32")
        cut = pieces(p, tile, 0, 0, space.ptr)
        clear(space.ptr, 1)
    maps = [tensormap.make(x) for x in (p.q, p.k, p.v, y)]
    kernel: Any = loader.kernel(
        "linear_sm90", expression(tile), p.v.device, tile.shared_bytes, together=tile.pieces > 1
    )
    args = (call.arguments(p, y, state, offsets), cut, *maps)
    kernel((blocks,), (THREADS,), args, shared_mem=tile.shared_bytes)
    return space


def clear(address: int, words: int) -> None:
    stream = cupy.cuda.get_current_stream().ptr
    cupy.cuda.runtime.memsetAsync(address, 0, 4 * words, stream)
