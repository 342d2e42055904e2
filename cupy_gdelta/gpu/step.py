"""Launches cuda/step.cu: a few tokens of either rule, the states updated where they lie."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from cupy.cuda import driver, runtime

from .. import arrays
from ..arrays import View
from ..step_problem import StepProblem
from . import call, loader, plan
from .recurrent import RULES, TYPES
from .step_tile import StepTile, best_tile, most_shared

# StepArgs of cuda/step.cu: nine addresses, then strides, sizes and kinds.
POINTERS = struct.Struct("=9Q")
SIZES = struct.Struct("=4q 4q 4q 3q 3q 4q 4q 5q q 5q d 4i")
BYTES = POINTERS.size + SIZES.size
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_launch = driver.launchKernel  # takes 3 us less than a call of a function of CuPy's
MAX_HIGH = 65535  # of a grid's second axis


class RepeatedLaunch:
    """A launch for calls of one form, whose arrays lie elsewhere at every call."""

    def __init__(
        self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, sizes: bytes
    ) -> None:
        self._function, self._sizes = function, sizes
        self._how = function.ptr, *grid, threads, 1, 1, shared
        self._spare: list[tuple[bytearray, np.ndarray, int]] = []  # that no thread is filling

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        """Run on the current device and a stream of it; addresses in the order of StepArgs."""
        try:
            spare = self._spare.pop()
        except IndexError:
            raw = bytearray(POINTERS.size) + self._sizes
            parameters = np.array([np.frombuffer(raw, np.uint8).ctypes.data], np.uintp)
            spare = raw, parameters, parameters.ctypes.data
        POINTERS.pack_into(spare[0], 0, *pointers)
        try:
            _launch(*self._how, stream, spare[2], 0)
        except driver.CUDADriverError as error:
            if error.status != _NO_CONTEXT:
                raise
            runtime.memGetInfo()  # gives a thread that has not used the device its context
            _launch(*self._how, stream, spare[2], 0)
        self._spare.append(spare)


def prepare(p: StepProblem, y: View, indices: View | None, multiprocessors: int) -> RepeatedLaunch:
    """The launch for a checked step and others of its form, on the current device."""
    tile, sums = chosen(p, multiprocessors), arrays.state_dtype(p.dtype)
    name = expression(p.rule, p.dtype, p.state.dtype, p.T, p.qk_l2norm, p.K, p.V, tile)
    kernel = loader.kernel("step", name, p.v.device, most_shared(tile, sums))
    deep = -(-p.B // MAX_HIGH)
    grid = p.H * -(-p.V // tile.block_cols), -(-p.B // deep), deep
    shared = tile.shared_bytes(p.T, sums)
    return RepeatedLaunch(kernel.kernel, grid, tile.threads, shared, sizes(p, y, indices))


def chosen(p: StepProblem, multiprocessors: int) -> StepTile:
    """The tile for the states as they lie."""
    states = [p.state] if p.states_out is None else [p.state, p.states_out]
    if all(x.strides[-1] == 1 for x in states):
        aligned = plan.alignment(*states)
    else:
        aligned = arrays.ITEMSIZE[p.state.dtype]
    return best_tile(p.K, p.V, p.state.dtype, p.T == 1, aligned, p.B * p.H, multiprocessors)


@functools.lru_cache(maxsize=4096)
def expression(
    rule: str, dtype: str, kept: str, T: int, normalise: bool, K: int, V: int, tile: StepTile
) -> str:
    """The template instantiation for states of dtype ``kept``, as NVRTC is asked for it."""
    sums = arrays.state_dtype(dtype)
    held = kept if T == 1 else sums
    types = ", ".join(TYPES[x] for x in (dtype, kept, held, sums))
    how = f"{RULES[rule]}, {str(normalise).lower()}"
    split = f"{tile.wide}, {tile.lanes}, {tile.warps}, {tile.resident}"
    return f"step<{types}, {how}, {K}, {V}, {split}>"


def pointers(p: StepProblem, y: View, indices: View | None) -> list[int]:
    """The addresses of StepArgs."""
    some = (p.q, p.k, p.v, p.gate, p.beta, indices, y, p.state, p.states_out)
    return [0 if x is None else x.ptr for x in some]


def sizes(p: StepProblem, y: View, indices: View | None) -> bytes:
    """StepArgs after its addresses."""

    def strides(x: View | None, n: int) -> tuple[int, ...]:
        return (0,) * n if x is None else x.strides

    return SIZES.pack(
        *(*p.q.strides, *p.k.strides, *p.v.strides),
        *(*strides(p.gate, 3), *strides(p.beta, 3), *y.strides),
        *(*p.state.strides, *strides(p.states_out, 5), *strides(indices, 1)),
        *(p.B, p.T, p.H, p.H // p.Hq, p.P),
        p.scale,
        *call.kinds(p),
        8 if indices is None or indices.dtype == "int64" else 4,
        0,
    )
