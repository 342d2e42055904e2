"""``cupy-gdelta info``: versions, devices, what each can do, and the kernel cache."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, arrays, devices

# The user's own case, for which the plan of each dtype is shown: B, T, H, K = V.
B, T, H, D = 32, 2048, 4, 24


def show() -> int:
    table(list(rows()))
    return 0


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = (), title: str = "") -> None:
    """Print aligned columns; where rich is installed framed, and a cell that ends in ! in red."""
    if not importlib.util.find_spec("rich"):
        cells = [[cell.split("\n") for cell in row] for row in (header, *rows) if row]
        lines = [line for row in cells for line in itertools.zip_longest(*row, fillvalue="")]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(title, end="\n" if title else "")
        for line in lines:
            padded = (f"{text:{width}}" for text, width in zip(line, widths, strict=True))
            print("  ".join(padded).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    framed = Table(title=title or None, title_justify="left", show_header=bool(header))
    framed.add_column(*header[:1], style="bold", no_wrap=True)
    for name in header[1:] or rows[0][1:]:
        framed.add_column(name, overflow="fold", justify="right" if header else "left")
    for row in rows:
        framed.add_row(*(Text(c, style="bold red" if c.endswith("!") else "") for c in row))
    Console().print(framed)


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
            yield "", _plans(i)
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


def _plans(i: int) -> str:
    """Which kernel each rule and dtype would run at the user's size."""
    from . import gpu

    try:
        count, shared, hopper = gpu.limits(i)
    except RuntimeError as error:  # a GPU that is too old
        return devices.first_line(error)
    lines = [f"at B, T, H, K = V = {B}, {T}, {H}, {D}:"]
    for rule in ("linear", "delta"):
        for dtype in _dtypes():
            sizes = (rule, dtype, T, B * H, D, D, count)
            chosen = gpu.plan.choose(*sizes, shared_limit=shared, copied=hopper)
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
