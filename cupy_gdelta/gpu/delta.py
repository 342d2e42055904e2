"""Launches cuda/delta.cu: the delta rule in chunks on tensor cores, for bfloat16."""

from __future__ import annotations

import functools
from typing import Any

from ..arrays import View
from ..problem import Problem
from . import call, loader
from .delta_tile import DeltaTile
from .plan import Plan


@functools.lru_cache(maxsize=4096)
def expression(K: int, V: int, tile: DeltaTile, normalise: bool) -> str:
    """The template instantiation for a tile, as NVRTC is asked for it."""
    flags = f"{str(tile.wide).lower()}, {str(normalise).lower()}"
    return f"delta<{K}, {V}, {tile.block_cols}, {tile.stages}, {flags}>"


def launch(p: Problem, plan: Plan, y: View, state: View | None, offsets: View | None) -> None:
    """Run on the current stream of the current device, which must be the arrays' own."""
    tile = plan.tile
    assert isinstance(tile, DeltaTile)
    name = expression(p.K, p.V, tile, p.qk_l2norm)
    kernel: Any = loader.kernel("delta", name, p.v.device, tile.shared_bytes)
    blocks = p.N * p.H * -(-p.V // tile.block_cols)
    kernel(
        (min(blocks, call.MAX_GRID),),
        (tile.threads,),
        (call.arguments(p, y, state, offsets),),
        shared_mem=tile.shared_bytes,
    )
