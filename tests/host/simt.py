"""Runs CUDA kernels on the CPU: builds a .cu with g++ and the runtime of this folder, launches it.

Every CUDA thread is a fibre, so barriers, shuffles and asynchronous copies work as on a GPU; no
CUDA header, compiler or device is needed. ``check=True`` takes a second, instrumented build that
follows every access to memory: races, accesses out of bounds and reads of uninitialised shared
memory raise :class:`Fault` with the place in the source.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import functools
import hashlib
import math
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ORDERS = (0, 1, 2, 3)  # ascending threads, descending, and two seeds of shuffled ones
KEEP_SECONDS = 7 * 24 * 3600  # that an unused library stays in the cache
MAX_THREADS, MAX_SHARED = 1024, 227 * 1024  # of a block, on the largest GPUs

_FLAGS = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-march=native",
    "-ffp-contract=fast",  # as NVRTC does
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-U_FORTIFY_SOURCE",  # its longjmp refuses to go to another stack
    "-DSIMT_HOST",
]
_KERNEL_FLAGS = [
    "-gdwarf-4",  # addr2line mixes up the files of version 5
    "-fno-exceptions",
    "-fno-strict-aliasing",
]
_CHECK_FLAGS = ["-fsanitize=thread", "-fsanitize=alignment,bounds,shift,signed-integer-overflow"]
_RUNTIME = ("simt", "signals", "twins", "check")


class Fault(RuntimeError):
    """A kernel broke a rule of CUDA; the message says which one, where, and which threads."""


class _Region(ct.Structure):
    _fields_ = [
        ("name", ct.c_char_p),
        ("begin", ct.c_size_t),
        ("end", ct.c_size_t),
        ("writable", ct.c_int),
    ]


class _Launch(ct.Structure):
    _fields_ = [
        ("grid", ct.c_uint * 3),
        ("block", ct.c_uint * 3),
        ("shared_bytes", ct.c_uint64),
        ("order", ct.c_uint),
        ("check", ct.c_uint),
        ("together", ct.c_uint),
        ("padding", ct.c_uint),
        ("region_count", ct.c_uint64),
        ("regions", ct.POINTER(_Region)),
    ]


class Kernels:
    """Instantiations of the kernel templates of one .cu file, built when first launched.

    Parameters
    ----------
    source : path of the .cu file; its folder is where quoted includes are looked for.
    expressions : the instantiations, such as ``"recurrent<float, 24, 24>"``.
    defines : macros, as ``{"NAME": value}``.
    """

    def __init__(
        self,
        source: str | Path,
        expressions: Sequence[str],
        defines: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = Path(source).resolve()
        self.expressions = tuple(expressions)
        self.defines = tuple(f"-D{k}={v}" for k, v in (defines or {}).items())

    def launch(
        self,
        expression: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        smem: int,
        args: Sequence[Any],
        *,
        order: int = 0,
        check: bool = False,
        together: bool = False,
        reads: Mapping[str, np.ndarray] | None = None,
        writes: Mapping[str, np.ndarray] | None = None,
        uninitialised: bool = True,
    ) -> None:
        """Run one kernel to its end; raises :class:`Fault`.

        Parameters
        ----------
        expression : one of the expressions the object was made with.
        grid, block : numbers of blocks and threads, up to three of each.
        smem : bytes of dynamic shared memory, filled with NaN.
        args : one NumPy scalar or structured scalar per parameter; an array stands for its address.
        order : 0 runs blocks and threads in ascending order, 1 in descending order, any other
            number is the seed of a random order.
        check : follow every access to memory.
        together : run all blocks at once, in processes of their own: what they write is seen only
            in memory that processes share. Without ``check``, and without atomics.
        reads, writes : with ``check``, all global memory the kernel may only read, or also write.
            Without either, accesses to global memory are not checked.
        uninitialised : with ``check``, refuse to read shared memory nobody has written.
        """
        library = _library(self.source, self.expressions, self.defines, check)
        index = self.expressions.index(expression)
        values = [_value(x) for x in args]
        _match(library, index, expression, values)
        named = [(n, x, False) for n, x in (reads or {}).items()]
        named += [(n, x, True) for n, x in (writes or {}).items()]
        regions = (_Region * len(named))(*(_region(*entry) for entry in named))
        sizes = _triple(grid), _triple(block)
        if not 1 <= math.prod(sizes[1]) <= MAX_THREADS or 0 in sizes[0] or smem > MAX_SHARED:
            raise ValueError(f"cannot launch {grid} blocks of {block} threads with {smem} bytes")
        what = _Launch(
            *sizes,
            smem,
            order,
            (1 | uninitialised << 1) if check else 0,
            together,
            0,
            len(named),
            regions,
        )
        pointers = (ct.c_void_p * len(values))(*(x.ctypes.data for x in values))
        if getattr(library, f"simt_run_{index}")(ct.byref(what), pointers):
            message = library.simt_message().decode()
            raise Fault(f"{expression}: {_places(message, library._name)}")


def _triple(x: int | tuple[int, ...]) -> Any:
    sizes = (x,) if isinstance(x, int) else tuple(x)
    return (ct.c_uint * 3)(*sizes, *(1,) * (3 - len(sizes)))


def _value(x: Any) -> np.ndarray:
    """The bytes of one argument: of the scalar itself, or of the address of an array."""
    if isinstance(x, np.ndarray) and x.ndim:
        return np.array(x.ctypes.data, np.uintp)
    if not isinstance(x, (np.ndarray, np.generic)):
        raise TypeError(f"arguments must be NumPy scalars or arrays; got {type(x).__name__}")
    return np.array(x)


def _match(library: ct.CDLL, index: int, expression: str, values: list[np.ndarray]) -> None:
    sizes = (ct.c_size_t * 64)()
    count = getattr(library, f"simt_sizes_{index}")(sizes, 64)
    want, got = list(sizes[:count]), [x.nbytes for x in values]
    if want != got:
        raise TypeError(f"{expression} takes arguments of {want} bytes; got {got}")


def _region(name: str, x: np.ndarray, writable: bool) -> _Region:
    begin = end = x.ctypes.data
    if x.size:
        reach = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
        begin += sum(r for r in reach if r < 0)
        end += sum(r for r in reach if r > 0) + x.itemsize
    return _Region(name.encode(), begin, end, writable)


def _places(message: str, library: str) -> str:
    """``message`` with its program counters, {0x1234}, as file:line."""

    def place(match: re.Match) -> str:
        tool = shutil.which("addr2line")
        if tool is None:
            return f"+{match[1]}"
        command = [tool, "-i", "-e", library, hex(int(match[1], 16) - 1)]
        out = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        lines = [Path(line.split(" ")[0]).name for line in out.splitlines()]
        own = {path.name for path in HERE.glob("*.h")}
        kernel = [x for x in lines if x.split(":")[0] not in own]
        return " < ".join(dict.fromkeys(kernel or lines))

    return re.sub(r"\{(0x[0-9a-f]+)\}", place, message)


@functools.cache
def compiler() -> str | None:
    """g++, or None where there is none."""
    return shutil.which("g++")


@functools.cache
def _machine() -> str:
    """What -march=native and the compiler's version depend on."""
    version = subprocess.run(
        [str(compiler()), "--version"], capture_output=True, text=True, check=True
    )
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return version.stdout + "\n".join(sorted(features))


@functools.cache
def _cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"cupy_gdelta-simt-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and time.time() - path.stat().st_mtime > KEEP_SECONDS:
                path.unlink()
    return folder


def _texts(source: Path, seen: dict[Path, str]) -> dict[Path, str]:
    """A source file and everything it includes with quotes."""
    if source not in seen:
        seen[source] = source.read_text()
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', seen[source], re.MULTILINE):
            for folder in (source.parent, HERE):
                if (folder / name).exists():
                    _texts((folder / name).resolve(), seen)
                    break
    return seen


def _compile(command: list[str], suffix: str, *parts: str) -> Path:
    """What ``command`` makes, from the cache if it was made before; parallel processes may meet."""
    digest = hashlib.sha256("\0".join((*command, *parts, _machine())).encode()).hexdigest()[:24]
    target = _cache() / f"{digest}{suffix}"
    if target.exists():
        target.touch()
    else:
        with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
            made = Path(scratch) / target.name
            full = [str(compiler()), *command, "-o", str(made)]
            run = subprocess.run(full, capture_output=True, text=True, check=False)
            if run.returncode:
                raise RuntimeError(f"{' '.join(full)}\n{run.stderr}")
            made.rename(target)
    return target


@functools.cache
def _library(
    source: Path, expressions: tuple[str, ...], defines: tuple[str, ...], check: bool
) -> ct.CDLL:
    objects = []
    for stem in _RUNTIME:
        path = HERE / f"{stem}.cpp"
        command = [*_FLAGS, "-c", str(path)]
        objects.append(_compile(command, ".o", *_texts(path, {}).values()))
    wrapper = f'#include "simt.h"\n#include "{source}"\n#include "entry.h"\n' + "".join(
        f"SIMT_ENTRY({i}, {expression})\n" for i, expression in enumerate(expressions)
    )
    name = hashlib.sha256(wrapper.encode()).hexdigest()[:24]
    path = _cache() / f"{name}.cpp"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=_cache(), delete=False) as file:
            file.write(wrapper)
        Path(file.name).rename(path)
    flags = [*_FLAGS, *_KERNEL_FLAGS, *(_CHECK_FLAGS if check else ()), *defines]
    command = [*flags, f"-I{HERE}", f"-I{source.parent}", "-c", str(path)]
    texts = _texts(path, {}) | _texts(source, {}) | _texts(HERE / "entry.h", {})
    objects.append(_compile(command, ".o", *texts.values()))
    link = ["-shared", "-Wl,-z,defs,-Bsymbolic", *map(str, objects)]
    library = ct.CDLL(str(_compile(link, ".so")))
    library.simt_message.restype = ct.c_char_p
    return library
