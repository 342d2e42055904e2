"""Launches cuda/recurrent.cu: either rule token by token, the state in registers."""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np

from ..arrays import View
from ..problem import Problem
from . import loader
from .plan import Plan, Tile

# RecurrentArgs: nine addresses, six times three strides, four of the state, then sizes and kinds.
ARGS = struct.Struct("=9Q 18q 4q q 4q d 4i")
_NONE = (0, 0, 0)
TYPES = {
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
}
RULES = {"linear": "kLinear", "delta": "kDelta"}
MAX_GRID = 2**31 - 1


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


def arguments(p: Problem, y: View, state: View | None, offsets: View | None) -> np.ndarray:
    """The kernel's one argument, laid out as RecurrentArgs."""
    pointers = (p.q, p.k, p.v, p.gate, p.beta, p.initial_state, offsets, y, state)
    strides = (p.q, p.k, p.v, p.gate, p.beta, y)
    kinds = [
        0 if x is None else (1 if x.dtype == p.dtype else 2) + (2 if log else 0)
        for x, log in ((p.gate, p.log_gate), (p.beta, False))
    ]
    packed = ARGS.pack(
        *(0 if x is None else x.ptr for x in pointers),
        *(n for x in strides for n in (_NONE if x is None else x.strides[:3])),
        *((*_NONE, 0) if p.initial_state is None else p.initial_state.strides),
        0 if offsets is None else offsets.strides[0],
        *(p.T, p.H, p.H // p.Hq, p.N),
        p.scale,
        *kinds,
        8 if offsets is None or offsets.dtype == "int64" else 4,
        0,
    )
    return np.frombuffer(packed, np.dtype((np.void, ARGS.size)))


def launch(p: Problem, plan: Plan, y: View, state: View | None, offsets: View | None) -> None:
    """Run on the current stream of the current device, which must be the arrays' own."""
    tile = plan.tile
    name = expression(p.rule, p.dtype, plan.sums, p.qk_l2norm, p.K, p.V, tile)
    kernel: Any = loader.kernel("recurrent", name, p.v.device, tile.shared_bytes)
    blocks = p.N * p.H * -(-p.V // tile.block_cols)
    kernel(
        (min(blocks, MAX_GRID),),
        (tile.threads,),
        (arguments(p, y, state, offsets),),
        shared_mem=tile.shared_bytes,
    )
