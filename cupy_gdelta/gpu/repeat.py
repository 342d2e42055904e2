"""Steps that repeat an earlier one but for where their arrays lie: nothing is checked twice.

The form of a call is all that its checks and its launch depend on: rule, options, and of every
array its library, device, shape, strides, dtype and alignment. What a checked call of a form has
prepared serves all later ones; their addresses, the stream and the current device are read at
every call. Whatever is not plain here goes the long way, which refuses it or copes with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime

from ..arrays import View, is_contiguous
from ..step_problem import StepProblem
from .step import RepeatedLaunch

MOST = 1024  # forms that are kept
_Y, _STATE, _STATES_OUT = 6, 7, 8  # in the order of StepArgs
_NUMBERS = frozenset((float, int, np.float64, np.float32))  # hashed by their value
_LEGACY_STREAM = 1  # up to here streams cannot be captured
_ndarray = cupy.ndarray
_empty = cupy.ndarray  # the shortest way to memory
_current_stream = cupy.cuda.get_current_stream

Key = tuple[Any, ...]
Arrays = tuple[Any, ...]  # the caller's own, in the order of StepArgs


class Form(NamedTuple):
    """What calls of one form share."""

    launch: RepeatedLaunch
    device: int
    y_shape: tuple[int, ...]
    dense: bool  # whether an array made like v is contiguous
    apart: list[tuple[int, int, int, int]]  # arrays i, j overlap if low < at[i] - at[j] < high


_known: dict[Key, Form] = {}


def on_cupy(rule: str, log_gate: bool, scale: Any, qk_l2norm: Any, arrays: Arrays) -> Any:
    """y of a step on CuPy arrays whose form is known; None where it is not."""
    key, at = _cupy_form(rule, log_gate, scale, qk_l2norm, arrays)
    form = _find(key, at)
    if form is None:
        return None
    if runtime.getDevice() != form.device:
        with cupy.cuda.Device(form.device):
            return _run_cupy(form, arrays, at)
    return _run_cupy(form, arrays, at)


def on_torch(rule: str, log_gate: bool, scale: Any, qk_l2norm: Any, arrays: Arrays) -> Any:
    """The same for torch CUDA tensors."""
    key, at = _torch_form(rule, log_gate, scale, qk_l2norm, arrays)
    form = _find(key, at)
    if form is None:
        return None
    y = arrays[_Y]
    if y is None:
        torch = sys.modules["torch"]  # where arrays are made by shape later than like another
        how = {} if form.dense else {"memory_format": torch.contiguous_format}
        y = torch.empty_like(arrays[2], **how)
        at[_Y] = y.data_ptr()
    stream = _torch_stream(form.device)
    if runtime.getDevice() != form.device:
        with cupy.cuda.Device(form.device):
            form.launch(at, stream)
    else:
        form.launch(at, stream)
    _written(arrays)
    return y


def remember(p: StepProblem, launch: RepeatedLaunch) -> Callable | None:
    """Keep what a checked call has prepared; returns who answers the next one of its form."""
    indices = p.state_indices if isinstance(p.state_indices, View) else None
    views = (p.q, p.k, p.v, p.gate, p.beta, indices, p.out, p.state, p.states_out)
    form, answer = _FAMILIES.get(p.v.family, (None, None))
    if form is None or indices is not p.state_indices:
        return None
    arrays = tuple(None if x is None else x.owner for x in views)
    key, _ = form(p.rule, p.log_gate, p.scale, p.qk_l2norm, arrays)
    if key is None:
        return None
    while len(_known) >= MOST:
        _known.pop(next(iter(_known)), None)
    _known[key] = Form(launch, p.v.device, p.y_shape, is_contiguous(p.v), _apart(views))
    return answer


def _find(key: Key | None, at: list[int]) -> Form | None:
    form = None if key is None else _known.get(key)
    if form is None:
        return None
    for i, j, low, high in form.apart:
        if low < at[i] - at[j] < high:
            return None
    return form


def _cupy_form(
    rule: str, log_gate: bool, scale: Any, qk_l2norm: Any, arrays: Arrays
) -> tuple[Key | None, list[int]]:
    """The key of a call, None where it is not plain, and the addresses of its arrays."""
    at: list[int] = []
    if scale.__class__ not in _NUMBERS or qk_l2norm.__class__ is not bool:
        return None, at
    key, bits = [rule, log_gate, scale, qk_l2norm], 0
    for x in arrays:
        if x is None:
            key.append(None)
            at.append(0)
            continue
        if x.__class__ is not _ndarray:
            return None, at
        memory = x.data
        address = memory.ptr
        bits |= address
        key += (x.shape, x.strides, x.dtype, memory.device_id)
        at.append(address)
    key += (bits & 7, at[_STATE] & 15, at[_STATES_OUT] & 15)
    return tuple(key), at


def _torch_form(
    rule: str, log_gate: bool, scale: Any, qk_l2norm: Any, arrays: Arrays
) -> tuple[Key | None, list[int]]:
    """The same for torch tensors."""
    torch = sys.modules["torch"]
    tensor, graded = torch.Tensor, torch.is_grad_enabled()
    at: list[int] = []
    if scale.__class__ not in _NUMBERS or qk_l2norm.__class__ is not bool:
        return None, at
    if torch.autograd.forward_ad._current_level >= 0:
        return None, at
    key, bits = [rule, log_gate, scale, qk_l2norm], 0
    try:
        for x in arrays:
            if x is None:
                key.append(None)
                at.append(0)
                continue
            if x.__class__ is not tensor or x.is_neg() or (graded and x.requires_grad):
                return None, at
            address = x.data_ptr()
            bits |= address
            key += (x.shape, x.stride(), x.dtype, x.get_device())
            at.append(address)
    except RuntimeError:  # no memory of its own, or no strides
        return None, at
    key += (bits & 7, at[_STATE] & 15, at[_STATES_OUT] & 15)
    return tuple(key), at


_FAMILIES: dict[str, tuple[Callable, Callable]] = {
    "cupy": (_cupy_form, on_cupy),
    "torch": (_torch_form, on_torch),
}


def _run_cupy(form: Form, arrays: Arrays, at: list[int]) -> Any:
    y, stream = arrays[_Y], _current_stream().ptr
    if y is None:
        if stream > _LEGACY_STREAM and runtime.streamIsCapturing(stream):
            return None  # y must outlive the graph: the long way keeps it
        y = _empty(form.y_shape, arrays[2].dtype)
        at[_Y] = y.data.ptr
    form.launch(at, stream)
    return y


def _torch_stream(device: int) -> int:
    torch = sys.modules["torch"]
    current = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # as Triton asks for it
    return current(device) if current else torch.cuda.current_stream(device).cuda_stream


def _written(arrays: Arrays) -> None:
    """Let torch know what was written."""
    increment = sys.modules["torch"].autograd.graph.increment_version
    for i in (_Y, _STATE, _STATES_OUT):
        x = arrays[i]
        if x is not None and not x.is_inference():
            increment(x)


def _apart(views: tuple[View | None, ...]) -> list[tuple[int, int, int, int]]:
    """For each array that is written and each other one, the distances at which they overlap."""
    reach = {}
    for i, x in enumerate(views):
        if x is not None:
            low, high = x.extent
            reach[i] = low - x.ptr, high - x.ptr
    return [
        (i, j, reach[j][0] - reach[i][1], reach[j][1] - reach[i][0])
        for i in (_Y, _STATE, _STATES_OUT)
        for j in reach
        if i in reach and (j < _Y or j > i)
    ]
