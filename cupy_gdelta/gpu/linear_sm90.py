"""Launches cuda/linear_sm90.cu: the linear rule in chunks on Hopper's warpgroup products."""

from __future__ import annotations

import functools
import itertools
import secrets
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

PIECES = struct.Struct("=4Q q 3i I Q")  # PieceArgs of cuda/feed_sm90.cuh
_calls = itertools.count(secrets.randbits(48))


@functools.lru_cache(maxsize=4096)
def expression(tile: WarpgroupTile) -> str:
    """The template instantiation for a tile, as NVRTC is asked for it."""
    return f"linear<{tile.dim}, {tile.dim}, {tile.stages}, {tile.dealing}>"


def pieces(p: Problem, tile: WarpgroupTile, space: int) -> np.ndarray:
    """The kernel's second argument, laid out as PieceArgs, with its parts of the workspace."""
    count, items = tile.pieces, p.N * p.H
    states = space + -(-told_bytes(p, tile) // 16) * 16
    decays = states + 4 * count * items * tile.dim**2
    sizes = tile.piece_size, count, p.K, p.V
    packed = PIECES.pack(states, decays, space, space, *sizes, 0, next(_calls) % 2**56)
    return np.frombuffer(packed, np.dtype((np.void, PIECES.size)))


def told_bytes(p: Problem, tile: WarpgroupTile) -> int:
    """Of what blocks tell each other, at the workspace's start."""
    return 4 if tile.queued else 8 * tile.pieces * p.N * p.H


def space_words(p: Problem, tile: WarpgroupTile, blocks: int) -> int:
    """4-byte words of workspace: what blocks tell each other, and states and decays of pieces."""
    items = p.N * p.H
    if tile.pieces > 1:
        return tile.pieces * (tile.dim**2 + 3) * items + 2
    return int(tile.queued and blocks < items)


def launch(
    p: Problem, plan: Plan, y: View, state: View | None, offsets: View | None
) -> View | None:
    """Run on the current stream of the current device, which must be the arrays' own.

    Returns the workspace, if there is one.
    """
    tile, space = plan.tile, None
    assert isinstance(tile, WarpgroupTile)
    items = p.N * p.H
    multiprocessors = cupy.cuda.Device(p.v.device).attributes["MultiProcessorCount"]
    blocks = items * tile.pieces if tile.pieces > 1 else min(items, multiprocessors)
    words = space_words(p, tile, blocks)
    if words > 0:
        space = arrays.empty(p.v, (words,), "float32")
        stream = cupy.cuda.get_current_stream()
        if tile.queued or stream.is_capturing():
            cupy.cuda.runtime.memsetAsync(space.ptr, 0, told_bytes(p, tile), stream.ptr)
    maps = [tensormap.make(x) for x in (p.q, p.k, p.v, y)]
    kernel: Any = loader.kernel(
        "linear_sm90", expression(tile), p.v.device, tile.shared_bytes, together=tile.pieces > 1
    )
    cut = pieces(p, tile, 0 if space is None else space.ptr)
    args = (call.arguments(p, y, state, offsets), cut, *maps)
    kernel((blocks,), (THREADS,), args, shared_mem=tile.shared_bytes)
    return space
