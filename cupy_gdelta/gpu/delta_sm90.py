"""Launches cuda/delta_sm90.cu: the delta rule in chunks on Hopper's warpgroup products."""

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
from .keepers import KeeperTile
from .plan import Plan

PIECES = struct.Struct("=2Q q 6i")  # DeltaPieceArgs of cuda/delta_feed_sm90.cuh


@functools.lru_cache(maxsize=4096)
def expression(tile: KeeperTile, normalise: bool) -> str:
    """The template instantiation for a tile, as NVRTC is asked for it."""
    return f"delta<{tile.K}, {tile.stages}, {tile.dealing}, {str(normalise).lower()}>"


def pieces(p: Problem, tile: KeeperTile, states: int, arrivals: int) -> np.ndarray:
    """The kernel's second argument, laid out as DeltaPieceArgs."""
    sizes = (tile.piece_size, tile.pieces, tile.column_blocks, p.K, p.V, 0, 0)
    packed = PIECES.pack(states, arrivals, *sizes)
    return np.frombuffer(packed, np.dtype((np.void, PIECES.size)))


def launch(
    p: Problem, plan: Plan, y: View, state: View | None, offsets: View | None
) -> View | None:
    """Run on the current stream of the current device, which must be the arrays' own.

    Returns the workspace, if there is one: states and arrivals of pieces, or what tells how many
    sequences were taken from a queue.
    """
    tile, space = plan.tile, None
    assert isinstance(tile, KeeperTile)
    items = p.N * p.H * tile.pieces * tile.column_blocks
    multiprocessors = cupy.cuda.Device(p.v.device).attributes["MultiProcessorCount"]
    blocks = items if tile.pieces > 1 else min(items, multiprocessors)
    states = counts = 0
    if tile.pieces > 1:
        states = p.N * p.H * tile.pieces * tile.states
        counts = items * tile.keepers
    elif tile.queued and blocks < items:
        counts = 1
    cut = pieces(p, tile, 0, 0)
    if counts > 0:
        space = arrays.empty(p.v, (states + counts,), "float32")
        arrivals = space.ptr + 4 * states
        cut = pieces(p, tile, space.ptr, arrivals)
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memsetAsync(arrivals, 0, 4 * counts, stream)
    maps = [tensormap.make(x) for x in (p.q, p.k, p.v, y)]
    name = expression(tile, p.qk_l2norm)
    kernel: Any = loader.kernel(
        "delta_sm90", name, p.v.device, tile.shared_bytes, together=tile.pieces > 1
    )
    args = (call.arguments(p, y, state, offsets), cut, *maps)
    kernel((blocks,), (tile.threads,), args, shared_mem=tile.shared_bytes)
    return space
