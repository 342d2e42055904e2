"""One rule at one shape: every contender's time, error, or the reason why it has none."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, accuracy, devices
from ..refusal import Refusal
from . import backward, decode, peers, shapes
from .peers import Contender
from .shapes import Inputs, Shape
from .timing import Timer

OURS = "cupy_gdelta"
FIELDS = ("us", "graph_us", "host_us", "times_floor", "gbps", "error", "note", "no_graph")
PACKAGES = (
    *("torch", "triton", "jax", "fla-core", "flash-qla", "tilelang"),
    *("jax-linear-attention", "mamba-ssm", "flashinfer-python"),
)
_DRIVER = Path("/proc/driver/nvidia/version")


def machine(with_peers: bool) -> dict[str, Any]:
    """The GPU and every version that the figures depend on."""
    import cupy

    runtime, device = cupy.cuda.runtime, cupy.cuda.Device()
    versions = {OURS: __version__, "Python": platform.python_version()}
    versions |= {"NumPy": np.__version__, "CuPy": cupy.__version__}
    for name in PACKAGES if with_peers else ():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    number = re.search(r"\b\d{3}\.[\d.]+", _DRIVER.read_text()) if _DRIVER.is_file() else None
    return {
        "gpu": runtime.getDeviceProperties(device.id)["name"].decode(),
        "driver": number.group() if number else "",
        "cuda_driver": _dotted(runtime.driverGetVersion()),
        "cuda_runtime": _dotted(runtime.runtimeGetVersion()),
        "versions": versions,
    }


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def measure(
    rule: str,
    shape: Shape,
    precision: str,
    with_peers: bool,
    timer: Timer,
    gradients: bool = False,
) -> dict[str, Any]:
    """Every contender at one rule and shape, beside a copy rate of the same minute."""
    rate = timer.copy_rate()
    inputs: Inputs | decode.StepInputs
    makers: dict[str, Callable[[Any], Contender]]
    if isinstance(shape, decode.StepShape):
        inputs, makers = decode.make(rule, shape), decode.contenders(rule, with_peers)
    else:
        kind = backward if gradients else peers
        inputs = shapes.make(rule, shape)
        makers = {OURS: partial(kind.ours, precision=precision)}
        if not shape.layout:  # others are given dense arrays alone
            makers |= {} if gradients else peers.LOCAL[rule]
            makers |= kind.PEERS[rule] if with_peers else {}
    moved = shape.moved_backward if gradients else shape.moved
    floor = 1e6 * moved / rate
    return {
        "rule": rule,
        "backward": gradients,
        "shape": asdict(shape),
        "precision": precision,
        "bytes": moved,
        "copy_rate": rate,
        "floor_us": floor,
        "flush_us": timer.flush_us,
        "contenders": [
            {"name": name, **_entry(name, maker, inputs, floor, timer)}
            for name, maker in makers.items()
        ],
    }


def _entry(
    name: str, maker: Callable[[Any], Contender], inputs: Any, floor: float, timer: Timer
) -> dict[str, Any]:
    """The figures of a contender; None for those it has not."""
    entry: dict[str, Any] = dict.fromkeys(FIELDS)
    try:
        contender = maker(inputs)
        entry["note"] = contender.note
        error = _compare(contender, inputs)
        if contender.wait:
            us = timer.back_to_back(contender.call, contender.wait)
        else:
            us, entry["host_us"] = timer.call(contender.call)
        moved = inputs.shape.moved_backward if contender.gradients else inputs.shape.moved
        entry |= {"us": us, "times_floor": us / floor, "gbps": moved / us / 1e3}
        entry["error"] = error if math.isfinite(error) else None
    except Exception as trouble:  # a peer may raise what it likes, and the others go on
        entry["note"] = reason(trouble)
        _still_works(name)
        return entry
    if contender.capture:
        try:
            entry["graph_us"] = _replay(contender.capture, error, inputs, timer)
        except Exception as trouble:
            entry["no_graph"] = reason(trouble)
            _still_works(name)
    return entry


def _compare(contender: Contender, inputs: Any) -> float:
    """The error of y; of contenders that call for gradients, the largest error of those."""
    if contender.gradients is None:
        return _error(contender.call(), inputs)
    pairs = zip(contender.gradients(), inputs.expected_gradients, strict=True)
    return max(accuracy.error(x, expected) for x, expected in pairs)


def _error(y: Any, inputs: Any) -> float:
    return accuracy.error(inputs.sample(y), inputs.expected)


def _replay(
    capture: Callable[[], tuple[Callable[[], Any], Any]],
    error: float,
    inputs: Any,
    timer: Timer,
) -> float:
    """Time of a graph's replay, once it has shown that it computes y."""
    replay, y = capture()
    y[...] = 0
    replay()
    if not _error(y, inputs) <= 1.1 * error:
        raise peers.Unavailable("a replay computes something else")
    return timer.call(replay)[0]


def reason(trouble: Exception) -> str:
    """One short line."""
    if isinstance(trouble, peers.Unavailable):
        return str(trouble)
    if isinstance(trouble, ModuleNotFoundError):
        return f"{trouble.name} is not installed"
    line = f"{type(trouble).__name__}: {devices.first_line(trouble)}"
    return line if len(line) <= 120 else line[:117] + "..."


def _still_works(name: str) -> None:
    import cupy

    try:
        cupy.cuda.Device().synchronize()
    except Exception as broken:
        text = f"{name} left the GPU unusable: {devices.first_line(broken)}"
        raise Refusal(text) from broken
