"""Compiles and keeps kernels. Knows where the .cu files lie, and no kernel.

A kernel is one instantiation of one template in one file. Its source goes to the compiler as one
text with every quoted include in place, so that CuPy's disk cache, which keys on that text, notices
a change in any file, and no path of this machine enters the key.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import cupy

OPTIONS = ("-std=c++17",)
SM90 = ("-arch=sm_90a",)  # what Hopper has, and no later GPU
RACECHECK = "CUPY_GDELTA_RACECHECK"  # in the environment: compile for that tool, see arrive.cuh
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)
_lock = threading.Lock()
_kernels: dict[tuple[str, str, int], Any] = {}


@functools.cache
def folder() -> Path:
    """The folder of the .cu files: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for found in (package / "cuda", package.parent / "cuda"):
        if any(found.glob("*.cu")):
            return found
    raise ImportError(
        f"cupy_gdelta: its CUDA sources are missing: no cuda/*.cu in or beside {package}"
    )


@functools.cache
def source(stem: str) -> str:
    """``cuda/<stem>.cu`` with its quoted includes in place, each once."""
    seen: set[str] = set()

    def inline(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (folder() / name).read_text(encoding="utf-8").replace("#pragma once\n", "\n")
        parts, line = [f'#line 1 "{name}"\n'], 1
        for i, part in enumerate(_INCLUDE.split(text)):
            if i % 2:
                line += 1
                parts.append(f'{inline(part)}#line {line} "{name}"\n')
            else:
                line += part.count("\n")
                parts.append(part)
        return "".join(parts)

    return inline(f"{stem}.cu")


class Launch(NamedTuple):
    """One kernel of a file, and how to run it."""

    expression: str
    blocks: int
    threads: int
    shared_bytes: int
    args: tuple


def run(stem: str, launches: Sequence[Launch], device: int) -> None:
    """Run kernels of ``cuda/<stem>.cu`` one after the other on the current stream."""
    wanted = {x.expression: x.shared_bytes for x in launches}
    found = kernels(stem, wanted, device)
    for x in launches:
        found[x.expression]((x.blocks,), (x.threads,), x.args, shared_mem=x.shared_bytes)


def kernel(
    stem: str, expression: str, device: int, shared_bytes: int, together: bool = False
) -> Any:
    """The compiled ``expression`` of ``cuda/<stem>.cu`` for a device, the current one.

    With ``together`` all blocks of a launch run at once, or none does.
    """
    found = _kernels.get((stem, expression, device))
    if found is None:
        found = kernels(stem, {expression: shared_bytes}, device, together)[expression]
    return found


def kernels(
    stem: str, wanted: Mapping[str, int], device: int, together: bool = False
) -> dict[str, Any]:
    """The same for several, by expression, with their bytes of shared memory.

    Those that are missing are compiled side by side.
    """
    found = {x: _kernels.get((stem, x, device)) for x in wanted}
    if None in found.values():
        _refuse_capture()
        with _lock:
            missing = [x for x in wanted if (stem, x, device) not in _kernels]
            for x, function in zip(missing, _compile(stem, missing, device, together), strict=True):
                if wanted[x] > 48 * 1024:
                    function.max_dynamic_shared_size_bytes = wanted[x]
                _kernels[stem, x, device] = function
        found = {x: _kernels[stem, x, device] for x in wanted}
    return found


def _refuse_capture() -> None:
    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            "cupy_gdelta: the kernel for this shape is not compiled yet, and compiling would break "
            "the running graph capture; call once with the same arguments before capturing"
        )


def _compile(stem: str, expressions: Sequence[str], device: int, together: bool) -> list[Any]:
    hopper = cupy.cuda.Device().compute_capability == "90"
    options = OPTIONS + (SM90 if hopper else ())
    if os.environ.get(RACECHECK):
        options += ("-DEVERY_LANE_ARRIVES", "-lineinfo")

    def build(expression: str) -> Any:
        with cupy.cuda.Device(device):  # each thread has a current device of its own
            module = cupy.RawModule(
                code=source(stem),
                options=options,
                name_expressions=(expression,),
                enable_cooperative_groups=together,
            )
            return module.get_function(expression)

    def build_all() -> list[Any]:
        if len(expressions) < 2:
            return [build(x) for x in expressions]
        with ThreadPoolExecutor(len(expressions)) as pool:
            return list(pool.map(build, expressions))

    try:
        return build_all()
    except OSError as error:
        warnings.warn(
            f"cupy_gdelta: CuPy's kernel cache cannot be used ({error}); compiling in memory. "
            f"Set CUPY_CACHE_DIR to a writable folder to keep compiled kernels",
            RuntimeWarning,
            stacklevel=2,
        )
    before = os.environ.get("CUPY_CACHE_IN_MEMORY")
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    try:
        return build_all()
    finally:
        if before is None:
            del os.environ["CUPY_CACHE_IN_MEMORY"]
        else:
            os.environ["CUPY_CACHE_IN_MEMORY"] = before
