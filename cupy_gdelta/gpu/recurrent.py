"""Launches cuda/recurrent.cu: either rule token by token, the state in registers."""

from __future__ import annotations

import functools
from typing import Any

from ..arrays import View
from ..problem import Problem
from . import call, loader
from .plan import Plan, Tile

TYPES = {
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
}
RULES = {"linear": "kLinear", "delta": "kDelta"}


@functools.lru_cache(maxsize=4096)
def expression(
    rule: str, dtype: str, sums: str, normalise: bool, K: int, V: int, tile: Tile
) -> str:
    """The template instantiation for a tile, as NVRTC is asked for it."""
    types = f"{TYPES[dtype]}, {TYPES[sums]}, {RULES[rule]}, {str(normalise).lower()}"
    return (
        f"recurrent<{types}, {K}, {V}, "
        f"{tile.rows}, {tile.cols}, {tile.warps}, {tile.threads}, {tile.tokens}, {tile.wide}>"
    )


def launch(p: Problem, plan: Plan, y: View, state: View | None, offsets: View | None) -> None:
    """Run on the current stream of the current device, which must be the arrays' own."""
    tile = plan.tile
    assert isinstance(tile, Tile)
    name = expression(p.rule, p.dtype, plan.sums, p.qk_l2norm, p.K, p.V, tile)
    kernel: Any = loader.kernel("recurrent", name, p.v.device, tile.shared_bytes)
    blocks = p.N * p.H * -(-p.V // tile.block_cols)
    kernel(
        (min(blocks, call.MAX_GRID),),
        (tile.threads,),
        (call.arguments(p, y, state, offsets),),
        shared_mem=tile.shared_bytes,
    )
