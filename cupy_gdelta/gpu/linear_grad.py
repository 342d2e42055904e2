"""Launches cuda/linear_grad.cu: gradients of the linear rule in chunks on tensor cores."""

from __future__ import annotations

import functools
import math

from .. import arrays
from ..arrays import View
from ..problem import Problem
from . import call, loader, recurrent_grad
from .chunks_grad import CHUNK, ChunkGradTile
from .plan import Plan
from .recurrent import TYPES
from .recurrent_grad import FINISH_BLOCKS, FINISH_THREADS


@functools.lru_cache(maxsize=4096)
def expressions(tile: ChunkGradTile, shared: bool) -> tuple[str, ...]:
    """The template instantiations for a tile; ``shared`` says that heads share q and k."""
    dtype = TYPES[tile.dtype]
    wide, apart, partial = (str(x).lower() for x in (tile.wide, tile.apart, shared))
    sizes = f"{dtype}, {tile.K}, {tile.V}"
    together = min(tile.together, 2) if shared else tile.together  # for registers
    found = (
        f"chunk_states<{sizes}, {tile.cols}, {wide}>",
        f"chunk_grads<{sizes}, {tile.parts}, {tile.roles}, {apart}, {wide}, {partial}, {together}>",
    )
    return (*found, f"finish_grad<{dtype}, float, false, {tile.K}, 1>") if shared else found


def count_chunks(p: Problem) -> int:
    """Chunks that states are kept for."""
    whole = p.cu_seqlens is None
    return p.N * -(-p.T // CHUNK) if whole else p.T // CHUNK + p.N


def sizes(p: Problem, tile: ChunkGradTile) -> dict[str, int]:
    """Bytes of each workspace, by its name in GradArgs."""
    tokens = p.B * p.T * p.H if p.Hq < p.H else 0
    states = 2 * count_chunks(p) * p.H * p.K * p.V
    return {
        "states": -(-states * tile.state_size // 16) * 16,
        "misses": 0,
        "partial_dq": 4 * -(-tokens * p.K // 4) * 4,
        "partial_dk": 4 * -(-tokens * p.K // 4) * 4,
        "partial_scalars": 4 * tokens * 2,
    }


def launches(p: Problem, tile: ChunkGradTile) -> list[tuple[str, int, int, int]]:
    """Kernels in order: expression, blocks, threads, bytes of shared memory."""
    names = expressions(tile, p.Hq < p.H)
    chunks = count_chunks(p) + (p.cu_seqlens is not None)
    found = [
        (names[0], p.N * p.H * 2 * tile.col_blocks, tile.state_threads, tile.state_bytes),
        (names[1], chunks * p.H, tile.threads, tile.shared_bytes),
    ]
    if p.Hq < p.H:
        rows = min(math.ceil(p.B * p.T * p.Hq * 32 / FINISH_THREADS), FINISH_BLOCKS)
        found.append((names[2], rows, FINISH_THREADS, 0))
    return found


def launch(p: Problem, plan: Plan, grads: dict[str, View], offsets: View | None) -> list[View]:
    """Run on the current stream of the current device, which must be the arrays' own.

    Returns the workspace: for every 64 tokens of a head the state and its gradient, K V numbers
    each, bfloat16 for bfloat16 and float32 otherwise, and where heads share q and k 2 K + 2
    float32 numbers a token of a head.
    """
    tile = plan.tile
    assert isinstance(tile, ChunkGradTile)
    needed = sizes(p, tile)
    space = arrays.empty(p.v, (sum(needed.values()) // 4,), "float32")
    args = (
        call.arguments(p, grads["v"], grads.get("initial_state"), offsets),
        recurrent_grad.arguments(p, grads, addresses(space.ptr, needed)),
    )
    found = [loader.Launch(*launch, args) for launch in launches(p, tile)]
    loader.run("linear_grad", found, p.v.device)
    return [space]


def addresses(start: int, needed: dict[str, int]) -> list[int]:
    """Where each workspace begins, 0 for those of no bytes."""
    found = []
    for size in needed.values():
        found.append(start if size else 0)
        start += size
    return found
