"""The GPU path: plans a checked problem and launches its kernel, on the caller's stream."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator

import numpy as np

from .. import arrays
from ..arrays import View
from ..problem import Problem
from ..step_problem import StepProblem

try:
    import cupy
except ImportError as error:
    raise ImportError(
        "cupy_gdelta runs its kernels through CuPy, which cannot be imported here; "
        'pip install "cupy_gdelta[cuda12]" (or [cuda13])'
    ) from error
except OSError as error:  # CuPy makes the folder of its kernel cache when it is imported
    raise ImportError(
        f"cupy_gdelta runs its kernels through CuPy, which cannot make its kernel cache: {error}; "
        f"set CUPY_CACHE_DIR to a folder that can be written"
    ) from error

from . import (
    delta,
    delta16,
    delta32,
    delta_grad,
    delta_sm90,
    linear,
    linear32,
    linear_grad,
    linear_sm90,
    plan,
    recurrent,
    recurrent_grad,
    repeat,
    step,
    tensormap,
)

__all__ = [
    "advance",
    "backward",
    "delta",
    "delta16",
    "delta32",
    "delta_grad",
    "delta_sm90",
    "forward",
    "linear",
    "linear32",
    "linear_grad",
    "linear_sm90",
    "plan",
    "recurrent",
    "recurrent_grad",
    "repeat",
    "step",
]


def forward(p: Problem, y: View, state: View | None) -> None:
    """Write y and, where given, the final state; asynchronous."""
    with _on(p.v):
        if p.N == 0:
            if 0 not in y.shape:
                arrays.fill(y, 0.0)
            return
        if p.H == 0 or (p.T == 0 and state is None):
            return
        offsets, longest = _offsets(p)
        q, k, v = (arrays.with_rows(x) for x in (p.q, p.k, p.v))
        target = y if _like_new(y) else arrays.empty(p.v, y.shape, p.dtype)
        multiprocessors, shared_limit, hopper = limits(p.v.device)
        chosen = plan.choose(
            p.rule,
            p.dtype,
            longest,
            p.N * p.H,
            p.K,
            p.V,
            multiprocessors,
            plan.alignment(q, k, v, target),
            p.log_gate,
            shared_limit,
            hopper and all(tensormap.fits(x) for x in (q, k, v, target)),
            p.precision,
            offsets is not None,
        )
        given = p.initial_state
        if given is not None and chosen.kernel == "linear_sm90":
            given = arrays.contiguous(given)
        rows = p
        if q is not p.q or k is not p.k or v is not p.v or given is not p.initial_state:
            rows = dataclasses.replace(p, q=q, k=k, v=v, initial_state=given)
        space = _LAUNCH[chosen.kernel](rows, chosen, target, state, offsets)
        if target is not y:
            arrays.fill(y, target)
        if p.v.family != "torch" and cupy.cuda.get_current_stream().is_capturing():
            _keep(p, y, q, k, v, given, target, space)


def _like_new(y: View) -> bool:
    """Whether kernels write y as they write a new array: results do not depend on where they go."""
    columns = y.shape[-1]
    row = columns * arrays.ITEMSIZE[y.dtype] | 16
    new = row & -row
    return 0 in y.shape or (
        (y.strides[-1] == 1 or columns == 1)
        and plan.alignment(y) >= new
        and tensormap.fits(y) == (new >= 16)
    )


def backward(p: Problem, grads: dict[str, View]) -> None:
    """Write the gradient of each argument named in grads; asynchronous."""
    with _on(p.v):
        if p.N == 0 or p.H == 0 or p.T == 0:
            _without_tokens(p, grads)
            return
        offsets, longest = _offsets(p)
        q, k, v = (arrays.with_rows(x) for x in (p.q, p.k, p.v))
        dy = None if p.dy is None else arrays.with_rows(p.dy)
        multiprocessors, shared_limit, _ = limits(p.v.device)
        chosen = plan.choose_grad(
            p.rule,
            p.dtype,
            longest,
            p.N * p.H,
            p.K,
            p.V,
            multiprocessors,
            plan.alignment(q, k, v, *([] if dy is None else [dy])),
            p.log_gate,
            shared_limit,
        )
        rows = dataclasses.replace(p, q=q, k=k, v=v, dy=dy)
        spaces = _LAUNCH_GRAD[chosen.kernel](rows, chosen, grads, offsets)
        if p.v.family != "torch" and cupy.cuda.get_current_stream().is_capturing():
            _keep(p, q, k, v, dy, *grads.values(), *spaces)


def _without_tokens(p: Problem, grads: dict[str, View]) -> None:
    """Gradients where there is no token, head or sequence: that of the state goes through."""
    for name, x in grads.items():
        if 0 not in x.shape:
            through = p.dstate if name == "initial_state" else None
            arrays.fill(x, 0.0 if through is None else through)


def advance(p: StepProblem, y: View) -> Callable | None:
    """Write y and update the states; asynchronous. Returns who answers a call of the same form."""
    with _on(p.v):
        multiprocessors, *_ = limits(p.v.device)
        indices = p.state_indices
        if isinstance(indices, np.ndarray):
            indices = _upload(indices.tobytes(), p.v.device)
        launch = step.prepare(p, y, indices, multiprocessors)
        stream = cupy.cuda.get_current_stream()
        launch(step.pointers(p, y, indices), stream.ptr)
        capturing = p.v.family != "torch" and stream.is_capturing()
    if capturing and y is not p.out:
        _captured.append(y)
    return repeat.remember(p, launch) if y is p.out or p.out is None else None


def _offsets(p: Problem) -> tuple[View | None, int]:
    """Offsets on the device, and the length of the longest sequence as far as it is known."""
    if isinstance(p.cu_seqlens, np.ndarray):
        longest = int(np.diff(p.cu_seqlens).max())
        return _upload(p.cu_seqlens.tobytes(), p.v.device), longest
    return p.cu_seqlens, p.T


_LAUNCH = {
    "recurrent": recurrent.launch,
    "delta16": delta16.launch,
    "delta32": delta32.launch,
    "linear": linear.launch,
    "linear32": linear32.launch,
    "linear_sm90": linear_sm90.launch,
    "delta": delta.launch,
    "delta_sm90": delta_sm90.launch,
}
_LAUNCH_GRAD = {
    "linear_grad": linear_grad.launch,
    "delta_grad": delta_grad.launch,
    "recurrent_grad": recurrent_grad.launch,
}


def _keep(p: Problem, *views: View | None) -> None:
    """Hold on to what a captured graph reads and writes and the caller does not know of.

    CuPy would give the memory to other arrays after the call, torch has a pool for each graph.
    """
    known = [x.owner for x in (*p.inputs, p.out) if x is not None]
    _captured.extend(x for x in views if x and not any(x.owner is y for y in known))


@contextlib.contextmanager
def _on(x: View) -> Iterator[None]:
    """Make the array's device current, and the stream that its library would launch on."""
    with cupy.cuda.Device(x.device):
        if x.family != "torch":
            yield
            return
        with stream_of(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream, x.device):
            yield


@functools.lru_cache(maxsize=256)
def stream_of(handle: int, device: int) -> cupy.cuda.Stream:
    """Another library's stream, for CuPy."""

    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, handle

    return cupy.cuda.Stream.from_external(Foreign())


@functools.cache
def limits(device: int) -> tuple[int, int, bool]:
    """Multiprocessors of a device, shared memory of a block in bytes, whether it is Hopper."""
    found = cupy.cuda.Device(device)
    major, minor = divmod(int(found.compute_capability), 10)
    if major < 8:
        raise RuntimeError(
            f"cupy_gdelta: its kernels need a GPU of compute capability 8.0 or newer; "
            f"CUDA device {device} has {major}.{minor}"
        )
    facts = found.attributes
    limit = facts["MaxSharedMemoryPerBlockOptin"]
    return facts["MultiProcessorCount"], limit, (major, minor) == (9, 0)


_captured: list[View] = []  # used by graphs, which may be replayed at any time
_uploaded: dict[tuple[bytes, int], View] = {}  # for graphs to come
_MOST_UPLOADED = 64


def _upload(offsets: bytes, device: int) -> View:
    """Integers given on the host, on the device, in the order of the current stream.

    A graph cannot upload. One that is captured takes what the same call uploaded before.
    """
    key = offsets, device
    if cupy.cuda.get_current_stream().is_capturing():
        found = _uploaded.get(key)
        if found is None:
            raise RuntimeError(
                "cupy_gdelta: integers on the host cannot be uploaded while a graph is captured; "
                "call once with the same cu_seqlens or state_indices before capturing, or pass "
                "them on the device"
            )
        _captured.append(found)
        return found
    while len(_uploaded) >= _MOST_UPLOADED:
        _uploaded.pop(next(iter(_uploaded)), None)
    view = _uploaded[key] = arrays.take(cupy.asarray(np.frombuffer(offsets, np.int64)))
    return view
