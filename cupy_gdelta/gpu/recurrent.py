"""Launches cuda/recurrent.cu: either rule token by token, the state in registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import View
from ..problem import Problem
from . import loader
from .plan import Plan, Tile

_i64, _u64 = np.int64, np.uint64
ARGS = np.dtype(
    [
        *[(x, _u64) for x in ("q", "k", "v", "gate", "beta", "initial_state", "cu_seqlens")],
        ("y", _u64),
        ("state", _u64),
        *[(f"{x}_stride", _i64, 3) for x in ("q", "k", "v", "gate", "beta", "y")],
        ("state_stride", _i64, 4),
        ("offset_stride", _i64),
        *[(x, _i64) for x in ("T", "H", "group", "N")],
        ("scale", np.float64),
        ("gate_kind", np.int32),
        ("beta_kind", np.int32),
        ("offset_bytes", np.int32),
        ("padding", np.int32),
    ],
    align=True,
)
TYPES = {
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
}
RULES = {"linear": "kLinear", "delta": "kDelta"}
MAX_GRID = 2**31 - 1


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
    a = np.zeros((), ARGS)
    for label, x in (("q", p.q), ("k", p.k), ("v", p.v), ("y", y)):
        a[label], a[f"{label}_stride"] = x.ptr, x.strides[:3]
    for label, x, log in (("gate", p.gate, p.log_gate), ("beta", p.beta, False)):
        if x is not None:
            a[label], a[f"{label}_stride"] = x.ptr, x.strides
            a[f"{label}_kind"] = (1 if x.dtype == p.dtype else 2) + (2 if log else 0)
    if p.initial_state is not None:
        a["initial_state"], a["state_stride"] = p.initial_state.ptr, p.initial_state.strides
    if offsets is not None:
        a["cu_seqlens"], a["offset_stride"] = offsets.ptr, offsets.strides[0]
        a["offset_bytes"] = 4 if offsets.dtype == "int32" else 8
    if state is not None:
        a["state"] = state.ptr
    a["T"], a["H"], a["group"], a["N"] = p.T, p.H, p.H // p.Hq, p.N
    a["scale"] = p.scale
    return a


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
