"""Compiles kernels with NVRTC for any architecture, without a GPU, and says what they use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cuda.bindings import nvrtc

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120")
CUPY_OPTIONS = ("-ftz=true",)  # that CuPy adds to every compilation

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_NUMBERS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "shared": re.compile(r"(\d+) bytes smem"),
    "stack": re.compile(r"(\d+) bytes (?:stack frame|cumulative stack size)"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
}


@dataclass(frozen=True)
class Usage:
    """Of one kernel; bytes but for the registers of a thread."""

    registers: int
    shared: int = 0  # static
    stack: int = 0  # local arrays that found no registers, and spills
    spill_stores: int = 0
    spill_loads: int = 0


def usage(
    source: str, expressions: Sequence[str], arch: str, options: Sequence[str] = ()
) -> dict[str, Usage]:
    """What each instantiation uses on an architecture; RuntimeError with the log if it is wrong."""
    log, names, _ = _compile(source, expressions, arch, options)
    found = _parse(log)
    return {e: found[name] for e, name in zip(expressions, names, strict=True)}


def machine_code(
    source: str, expressions: Sequence[str], arch: str, options: Sequence[str] = ()
) -> tuple[bytes, str]:
    """A cubin of the instantiations, and what the compiler said."""
    log, _, cubin = _compile(source, expressions, arch, options)
    return cubin, log


def _compile(
    source: str, expressions: Sequence[str], arch: str, options: Sequence[str]
) -> tuple[str, list[str], bytes]:
    """The compiler's log, the names of the kernels, and the cubin."""
    program = _call(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        for expression in expressions:
            _call(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        flags = [*options, *CUPY_OPTIONS, f"-arch={arch}", "--ptxas-options=-v"]
        encoded = [flag.encode() for flag in flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize(program)))
        _call(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{arch}: {status.name}\n{text}")
        names = [_call(nvrtc.nvrtcGetLoweredName(program, e.encode())) for e in expressions]
        cubin = bytearray(_call(nvrtc.nvrtcGetCUBINSize(program)))
        _call(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return text, [name.decode() for name in names], bytes(cubin)


def version() -> tuple[int, int]:
    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(status.name)
    return major, minor


def _call(result: tuple):
    """The value of an NVRTC call, if it succeeded."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(status.name)
    return values[0] if values else None


def _parse(log: str) -> dict[str, Usage]:
    """Of each kernel in what ptxas says; functions that a kernel calls count for it."""
    _, *parts = _ENTRY.split(log)
    found = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        numbers = {
            label: max(map(int, pattern.findall(text)), default=None)
            for label, pattern in _NUMBERS.items()
        }
        if None in (numbers["registers"], numbers["stack"], numbers["spill_stores"]):
            raise RuntimeError(f"ptxas does not say what {name} uses:\n{text}")
        found[name] = Usage(**{label: n or 0 for label, n in numbers.items()})
    return found
