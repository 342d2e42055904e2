"""Launches cuda/delta32.cu: the delta rule in chunks of 32 on tensor cores."""

from __future__ import annotations

import functools
from typing import Any

from ..arrays import View
from ..problem import Problem
from . import call, loader
from .delta16 import TYPES
from .delta_chunks32 import DeltaTile32
from .plan import Plan


@functools.lru_cache(maxsize=4096)
def expression(tile: DeltaTile32, normalise: bool) -> str:
    """The template instantiation for a tile, as NVRTC is asked for it."""
    sizes = (tile.K, tile.V, tile.cols, tile.teams, tile.turns, tile.stages, tile.slots)
    split = (tile.out_cols, tile.state_rows, tile.copy_warps)
    kind = (tile.products, tile.wide, str(normalise).lower())
    return f"delta32<{', '.join(map(str, (TYPES[tile.dtype], *sizes, *split, *kind)))}>"


def launch(p: Problem, plan: Plan, y: View, state: View | None, offsets: View | None) -> None:
    """Run on the current stream of the current device, which must be the arrays' own."""
    tile = plan.tile
    assert isinstance(tile, DeltaTile32)
    name, shared = expression(tile, p.qk_l2norm), tile.shared_bytes
    kernel: Any = loader.kernel("delta32", name, p.v.device, shared)
    blocks = p.N * p.H * tile.col_blocks
    kernel((blocks,), (tile.threads,), call.arguments(p, y, state, offsets), shared_mem=shared)
