"""``cupy-gdelta info``: versions, devices, what each can do, and the kernel cache."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, arrays, devices

# The user's own case, for which the plan of each dtype is shown: B, T, H, K = V.
B, T, H, D = 32, 2048, 4, 24


def show() -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows():
        table.add_row(name, text)
    Console(markup=False, highlight=False).print(table)
    return 0


def rows() -> Iterator[tuple[str, str]]:
    yield "cupy_gdelta", __version__
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "NumPy", f"{np.__version__}, {_blas()}"
    for name in ("torch", "ml_dtypes", "safetensors", "rich", "matplotlib"):
        yield name, _version(name)
    yield "CPU", f"{_cpus()} cores; {', '.join(_dtypes())}; both rules"
    why = devices.why_no_gpu()
    try:
        import cupy
    except ImportError:
        yield "CuPy", why.removeprefix("CuPy is ")
        return
    yield "CuPy", f"{cupy.__version__}{f', but {why}' if why else ''}"
    yield "CUDA", _cuda(cupy)
    if not why:
        for i in range(cupy.cuda.runtime.getDeviceCount()):
            yield f"GPU {i}", _gpu(cupy, i)
            yield "", _plans(cupy, i)
    yield "kernel cache", _cache()
    yield "--array auto", "numpy" if why else "cupy"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _blas() -> str:
    try:
        config: Any = np.show_config(mode="dicts")
        blas = config["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas.get('version', '')}".strip()
    except (TypeError, KeyError):  # before NumPy 1.25
        return "BLAS unknown"


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _dtypes() -> list[str]:
    some = _version("ml_dtypes") != "not installed"
    return [d for d in arrays.FLOATS if some or d != "bfloat16"]


def _cuda(cupy: Any) -> str:
    def dotted(number: int) -> str:
        return f"{number // 1000}.{number % 1000 // 10}" if number else "none"

    runtime = cupy.cuda.runtime
    try:
        return (
            f"runtime {dotted(runtime.runtimeGetVersion())}, "
            f"driver {dotted(runtime.driverGetVersion())}"
        )
    except Exception as error:  # without a driver CuPy may raise
        return devices.first_line(error)


def _gpu(cupy: Any, i: int) -> str:
    found = cupy.cuda.runtime.getDeviceProperties(i)
    return (
        f"{found['name'].decode()}, compute capability {found['major']}.{found['minor']}, "
        f"{found['multiProcessorCount']} multiprocessors, "
        f"{found['totalGlobalMem'] / 2**30:.0f} GiB, {found['l2CacheSize'] / 2**20:.0f} MiB L2"
    )


def _plans(cupy: Any, i: int) -> str:
    """Which kernel each rule and dtype would run at the user's size."""
    from .gpu import plan

    count = cupy.cuda.Device(i).attributes["MultiProcessorCount"]
    lines = [f"at B, T, H, K = V = {B}, {T}, {H}, {D}:"]
    for rule in ("linear", "delta"):
        for dtype in _dtypes():
            chosen = plan.choose(rule, dtype, T, B * H, D, D, count)
            lines.append(f"{rule} {dtype}: {chosen.kernel}, {chosen.reason}")
    return "\n".join(lines)


def _cache() -> str:
    """CuPy's folder of compiled kernels, as CuPy finds it."""
    place = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    sizes = []
    if place.is_dir():
        for path in place.rglob("*"):
            try:
                if path.is_file():
                    sizes.append(path.stat().st_size)
            except OSError:  # another process clears the cache meanwhile
                continue
    return f"{place}: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"
