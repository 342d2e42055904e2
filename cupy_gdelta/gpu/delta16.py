"""Launches cuda/delta16.cu: the delta rule of small heads in chunks on tensor cores."""

from __future__ import annotations

import functools
from typing import Any

from ..arrays import View
from ..problem import Problem
from . import call, loader
from .delta_chunks16 import DeltaTile16
from .plan import Plan

TYPES = {"float32": "float", "float16": "half_t"}


@functools.lru_cache(maxsize=4096)
def expression(tile: DeltaTile16, normalise: bool) -> str:
    """The template instantiation for a tile, as NVRTC is asked for it."""
    sizes = (tile.K, tile.V, tile.teams, tile.decay_warps, tile.stages, tile.slots)
    kind = (tile.products, tile.wide, str(normalise).lower())
    return f"delta16<{', '.join(map(str, (TYPES[tile.dtype], *sizes, *kind)))}>"


def launch(p: Problem, plan: Plan, y: View, state: View | None, offsets: View | None) -> None:
    """Run on the current stream of the current device, which must be the arrays' own."""
    tile = plan.tile
    assert isinstance(tile, DeltaTile16)
    name, shared = expression(tile, p.qk_l2norm), tile.shared_bytes
    kernel: Any = loader.kernel("delta16", name, p.v.device, shared)
    kernel((p.N * p.H,), (tile.threads,), call.arguments(p, y, state, offsets), shared_mem=shared)
