"""Launches cuda/recurrent_grad.cu: gradients of either rule token by token."""

from __future__ import annotations

import functools
import math
import struct

import numpy as np

from .. import arrays
from ..arrays import ITEMSIZE, View
from ..problem import Problem
from . import call, loader
from .grad_tiles import GROUP, GradTile
from .loader import Launch
from .plan import Plan
from .recurrent import RULES, TYPES

# GradArgs of cuda/grad.cuh: two addresses, strides of dy and dstate, nine addresses, B.
ARGS = struct.Struct("=2Q 3q 4q 9Q q")
FINISH_THREADS = 256
FINISH_BLOCKS = 1 << 16


@functools.lru_cache(maxsize=4096)
def expression(
    rule: str, dtype: str, sums: str, normalise: bool, K: int, V: int, tile: GradTile
) -> str:
    """The template instantiation for a tile, as NVRTC is asked for it."""
    types = f"{TYPES[dtype]}, {TYPES[sums]}, {RULES[rule]}, {str(normalise).lower()}"
    return (
        f"recurrent_grad<{types}, {K}, {V}, {tile.rows}, {tile.cols}, {tile.warps}, "
        f"{tile.tokens}, {GROUP}, {tile.wide}>"
    )


@functools.lru_cache(maxsize=4096)
def finish_expression(dtype: str, sums: str, normalise: bool, K: int, blocks: int) -> str:
    types = f"{TYPES[dtype]}, {TYPES[sums]}, {str(normalise).lower()}"
    return f"finish_grad<{types}, {K}, {blocks}>"


def sizes(p: Problem, tile: GradTile) -> dict[str, int]:
    """Numbers in each workspace, by its name in GradArgs."""
    blocks = -(-p.V // tile.block_cols)
    tokens = p.B * p.T * p.H
    whole = p.cu_seqlens is None
    rows = p.N * -(-p.T // tile.tokens) if whole else p.T // tile.tokens + p.N
    return {
        "states": rows * p.H * blocks * tile.saved(p.K),
        "misses": tokens * p.V if p.rule == "delta" else 0,
        "partial_dq": blocks * tokens * p.K,
        "partial_dk": blocks * tokens * p.K,
        "partial_scalars": blocks * tokens * 2,
    }


def arguments(p: Problem, grads: dict[str, View], spaces: list[int]) -> np.ndarray:
    """The kernels' second argument, laid out as GradArgs; ``spaces`` are addresses."""
    packed = ARGS.pack(
        0 if p.dy is None else p.dy.ptr,
        0 if p.dstate is None else p.dstate.ptr,
        *((0,) * 3 if p.dy is None else p.dy.strides[:3]),
        *((0,) * 4 if p.dstate is None else p.dstate.strides),
        *(grads[name].ptr if name in grads else 0 for name in ("q", "k", "gate", "beta")),
        *spaces,
        p.B,
    )
    return np.frombuffer(packed, np.dtype((np.void, ARGS.size)))


def launch(p: Problem, plan: Plan, grads: dict[str, View], offsets: View | None) -> list[View]:
    """Run on the current stream of the current device, which must be the arrays' own.

    Returns the workspace.
    """
    tile = plan.tile
    assert isinstance(tile, GradTile)
    needed = sizes(p, tile)
    space = arrays.empty(p.v, (sum(needed.values()),), plan.sums)
    ends = np.cumsum([0, *needed.values()])[:-1]
    spaces = [
        space.ptr + ITEMSIZE[plan.sums] * int(at) if size else 0
        for at, size in zip(ends, needed.values(), strict=True)
    ]
    args = (
        call.arguments(p, grads["v"], grads.get("initial_state"), offsets),
        arguments(p, grads, spaces),
    )
    cols = -(-p.V // tile.block_cols)
    name = expression(p.rule, p.dtype, plan.sums, p.qk_l2norm, p.K, p.V, tile)
    blocks = min(p.N * p.H * cols, call.MAX_GRID)
    found = [Launch(name, blocks, tile.threads, tile.shared_bytes, args)]
    name = finish_expression(p.dtype, plan.sums, p.qk_l2norm, p.K, cols)
    blocks = min(math.ceil(p.B * p.T * p.Hq * 32 / FINISH_THREADS), FINISH_BLOCKS)
    found.append(Launch(name, blocks, FINISH_THREADS, 0, args))
    loader.run("recurrent_grad", found, p.v.device)
    return [space]
