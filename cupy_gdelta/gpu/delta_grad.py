"""Launches cuda/delta_grad.cu and cuda/delta_grad32.cu: gradients of the delta rule in chunks.

The workspace has, for each chunk of a head (and one more chunk for each packed sequence), the state
before it and the gradient of the one after it, tables, and what was written, V numbers a token. For
bfloat16 a chunk is 64 tokens, with 26 KB of tables and numbers in bfloat16; for float32 it is 32
tokens, with 9 KB and float32. Where heads share q and k, or rows are made of unit length, there are
also dq and dk of every head in float32, and q and k of unit length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct

import numpy as np

from .. import arrays
from ..arrays import ITEMSIZE, View
from ..problem import Problem
from . import call, loader, recurrent_grad
from .delta_grad_tile import DeltaGradTile, DeltaGradTile32
from .loader import Launch
from .plan import Plan

SPACE = struct.Struct("=4Q q")  # SpaceArgs of cuda/delta_grad_space.cuh
ALIGNED = 256
UNIT_THREADS = 256
LOOKED = 8  # kLooked of cuda/delta_grad32.cu
BLOCKS = 1 << 16


@functools.lru_cache(maxsize=4096)
def expressions(tile: DeltaGradTile, direct: bool) -> tuple[str, ...]:
    """The template instantiations for a tile, as NVRTC is asked for them, in order."""
    K, V, wide = tile.K, tile.V, str(tile.wide).lower()
    flags = f"{wide}, {str(direct).lower()}"
    kinds = ("tokens", "strained") if isinstance(tile, DeltaGradTile32) else ("tokens",)
    return (
        f"{tile.stem}_prepare<{K}, {wide}>",
        f"{tile.stem}_walk<{K}, {V}, {tile.block_cols}, {tile.stages}, {flags}>",
        *(f"{tile.stem}_{kind}<{K}, {V}, {flags}>" for kind in kinds),
    )


def is_direct(p: Problem) -> bool:
    """Whether gradients of q, k, gate and beta need no sum over heads and no way through a root."""
    return p.Hq == p.H and not p.qk_l2norm


def slots(p: Problem, chunk: int) -> int:
    """Chunks that sequences may have; an upper bound for packed ones."""
    return p.N * -(-p.T // chunk) if p.cu_seqlens is None else p.T // chunk + p.N


def sizes(p: Problem, tile: DeltaGradTile) -> dict[str, int]:
    """Bytes of each part of the workspace, in the order of its use."""
    entries, tokens = slots(p, tile.chunk) * p.H, p.B * p.T
    direct = is_direct(p)
    units = ITEMSIZE[p.dtype] * tokens * p.Hq * p.K if p.qk_l2norm else 0
    partial = 0 if direct else 4 * tokens * p.H * p.K
    return {
        "prepared": entries * tile.prepared_bytes,
        "misses": entries * tile.miss_bytes,
        "states": entries * tile.state_bytes,
        "late": entries * tile.state_bytes,
        "q": units,
        "k": units,
        "partial_dq": partial,
        "partial_dk": partial,
        "partial_scalars": 0 if direct else 8 * tokens * p.H,
    }


def space(p: Problem, tile: DeltaGradTile, spaces: dict[str, int]) -> np.ndarray:
    """The kernels' last argument, laid out as SpaceArgs; ``spaces`` are addresses."""
    places = (spaces[name] for name in ("prepared", "misses", "states", "late"))
    return np.frombuffer(SPACE.pack(*places, slots(p, tile.chunk)), np.dtype((np.void, SPACE.size)))


def gradients(p: Problem, grads: dict[str, View], spaces: dict[str, int]) -> np.ndarray:
    """GradArgs, with the addresses of the partial sums."""
    partial = [spaces[name] for name in ("partial_dq", "partial_dk", "partial_scalars")]
    return recurrent_grad.arguments(p, grads, [0, 0, *partial])


def of_unit_length(p: Problem, spaces: dict[str, int]) -> Problem:
    """The problem that has q and k of the workspace in place of its own."""
    if not p.qk_l2norm:
        return p
    strides = (p.T * p.Hq * p.K, p.Hq * p.K, p.K, 1)
    q, k = (
        dataclasses.replace(x, ptr=spaces[name], strides=strides)
        for name, x in (("q", p.q), ("k", p.k))
    )
    return dataclasses.replace(p, q=q, k=k)


def places(start: int, needed: dict[str, int]) -> dict[str, int]:
    """Addresses of the parts of a workspace; 0 for those of no size."""
    found = {}
    for name, size in needed.items():
        found[name] = start if size else 0
        start += -(-size // ALIGNED) * ALIGNED
    return found


def launch(p: Problem, plan: Plan, grads: dict[str, View], offsets: View | None) -> list[View]:
    """Run on the current stream of the current device, which must be the arrays' own.

    Returns the workspace.
    """
    tile = plan.tile
    assert isinstance(tile, DeltaGradTile)
    needed = sizes(p, tile)
    room = sum(-(-size // ALIGNED) * ALIGNED for size in needed.values())
    view = arrays.empty(p.v, (room // 4,), "float32")
    spaces = places(view.ptr, needed)
    loader.run(tile.stem, launches(p, tile, grads, offsets, spaces), p.v.device)
    return [view]


def launches(
    p: Problem,
    tile: DeltaGradTile,
    grads: dict[str, View],
    offsets: View | None,
    spaces: dict[str, int],
) -> list[Launch]:
    """Kernels in order."""
    given = call.arguments(p, grads["v"], grads.get("initial_state"), offsets)
    own = gradients(p, grads, spaces)
    unit = of_unit_length(p, spaces)
    args = call.arguments(unit, grads["v"], grads.get("initial_state"), offsets)
    last = space(p, tile, spaces)
    first = (args, own, last) if isinstance(tile, DeltaGradTile32) else (args, last)
    direct = is_direct(p)
    prepare, walk, tokens, *strained = expressions(tile, direct)
    items = min(slots(p, tile.chunk) * p.H, call.MAX_GRID)
    walks = 2 * p.N * p.H * tile.column_blocks
    rows = math.ceil(p.B * p.T * p.Hq * 32 / UNIT_THREADS)
    found = []
    if p.qk_l2norm:
        outputs = np.uint64(spaces["q"]), np.uint64(spaces["k"])
        name = f"{tile.stem}_units<{p.K}>"
        blocks = min(2 * rows, BLOCKS)
        found.append(Launch(name, blocks, UNIT_THREADS, 0, (given, own, *outputs)))
    found += [
        Launch(prepare, items, tile.prepare_threads, tile.prepare_bytes, first),
        Launch(walk, walks, tile.walk_threads, tile.walk_bytes, (args, own, last)),
        Launch(tokens, items, tile.token_threads, tile.token_bytes, (args, own, last)),
    ]
    found += [
        Launch(name, -(-items // LOOKED), tile.token_threads, tile.token_bytes, (args, own, last))
        for name in strained
    ]
    if not direct:
        name = recurrent_grad.finish_expression(p.dtype, "float32", p.qk_l2norm, p.K, 1)
        blocks = min(rows, BLOCKS)
        found.append(Launch(name, blocks, recurrent_grad.FINISH_THREADS, 0, (given, own)))
    return found
