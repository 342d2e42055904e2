"""The GPU path: plans a checked problem and launches its kernel, on the caller's stream."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator

import numpy as np

from .. import arrays
from ..arrays import View
from ..problem import Problem

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

from . import plan, recurrent

__all__ = ["forward", "plan", "recurrent"]


def forward(p: Problem, y: View, state: View | None) -> None:
    """Write y and, where given, the final state; asynchronous, one launch."""
    with _on(p.v):
        if p.N == 0:
            if 0 not in y.shape:
                arrays.fill(y, 0.0)
            return
        if p.H == 0 or (p.T == 0 and state is None):
            return
        offsets, longest = p.cu_seqlens, p.T
        if isinstance(offsets, np.ndarray):
            longest = int(np.diff(offsets).max())
            offsets = _upload(offsets.tobytes(), p.v.device)
        p = _readable(p)
        chosen = plan.choose(
            p.rule,
            p.dtype,
            longest,
            p.N * p.H,
            p.K,
            p.V,
            _multiprocessors(p.v.device),
            plan.alignment(p.q, p.k, p.v),
        )
        target = y if y.strides[-1] == 1 or p.V == 1 else arrays.empty(p.v, y.shape, p.dtype)
        recurrent.launch(p, chosen, target, state, offsets)
        if target is not y:
            arrays.fill(y, target)


@contextlib.contextmanager
def _on(x: View) -> Iterator[None]:
    """Make the array's device current, and the stream that its library would launch on."""
    with cupy.cuda.Device(x.device):
        if x.family != "torch":
            yield
            return
        with _stream(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream, x.device):
            yield


@functools.lru_cache(maxsize=256)
def _stream(handle: int, device: int) -> cupy.cuda.Stream:
    """Another library's stream, for CuPy."""

    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, handle

    return cupy.cuda.Stream.from_external(Foreign())


def _readable(p: Problem) -> Problem:
    """The problem with q, k, v copied where their last axis is not contiguous."""
    q, k, v = (arrays.with_rows(x) for x in (p.q, p.k, p.v))
    if q is p.q and k is p.k and v is p.v:
        return p
    return dataclasses.replace(p, q=q, k=k, v=v)


@functools.cache
def _multiprocessors(device: int) -> int:
    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


_offsets: dict[tuple[bytes, int], View] = {}
_MOST_OFFSETS = 1024  # arrays kept


def _upload(offsets: bytes, device: int) -> View:
    """Offsets given on the host, on the device; kept, so that a repeated call uploads nothing."""
    found = _offsets.get((offsets, device))
    capturing = cupy.cuda.get_current_stream().is_capturing()
    if found is None:
        if capturing:
            raise RuntimeError(
                "cu_seqlens on the host cannot be uploaded while a graph is captured; "
                "call once with the same offsets before capturing, or pass them on the device"
            )
        if len(_offsets) >= _MOST_OFFSETS:
            cupy.cuda.Device().synchronize()  # some stream may still be reading one of them
            _offsets.clear()
        with _upload_stream(device) as stream:  # waits for the copy and for nothing else
            found = arrays.take(cupy.asarray(np.frombuffer(offsets, np.int64)))
            stream.synchronize()
        _offsets[offsets, device] = found
    if capturing:
        _captured.append(found)  # a graph may be replayed at any time
    return found


_captured: list[View] = []


@functools.cache
def _upload_stream(device: int) -> cupy.cuda.Stream:
    return cupy.cuda.Stream(non_blocking=True)
