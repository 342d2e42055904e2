"""Reads machine code: what the compiler made of a kernel that a GPU is needed to run."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_LINE = re.compile(r"\*/\s+(?:@!?U?P\d+ +)?(\S+)\s*(.*?)\s*;")
_PRODUCT = re.compile(r"R\d+, R(\d+), gdesc")  # the left factor in registers
_TARGET = re.compile(r"R(\d+)\b")


def disassembler() -> str | None:
    """nvdisasm of the PyPI package, or of a CUDA toolkit on the path."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for found in Path(place).rglob("nvdisasm*"):
            if found.is_file() and found.suffix in ("", ".exe"):
                return str(found)
    return shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> list[tuple[str, str]]:
    """Every instruction, as its name and its operands."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler(), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [m.groups() for line in text.splitlines() if (m := _LINE.search(line))]


def early_writes(code: list[tuple[str, str]]) -> list[str]:
    """Instructions that write a left factor of wgmma before the product is known to be done.

    The hardware reads such registers while the product is under way, and nothing holds a write
    back until then.
    """
    under_way: set[int] = set()
    found = []
    for name, operands in code:
        target = _TARGET.match(operands)
        if name.startswith("HGMMA"):
            if factor := _PRODUCT.match(operands):
                under_way |= set(range(int(factor[1]), int(factor[1]) + 4))
        elif name in ("WARPGROUP.DEPBAR.LE", "EXIT") and "0x1" not in operands:
            under_way.clear()
        elif name.startswith(("ST", "SYNCS", "RED", "USETMAXREG")) or target is None:
            continue
        elif any(int(target[1]) + i in under_way for i in range(_width(name))):
            found.append(f"{name} {operands}")
    return found


def _width(name: str) -> int:
    """Registers that an instruction writes."""
    if ".128" in name or (name.startswith("LDSM") and name.endswith(".4")):
        return 4
    return 2 if ".64" in name or ".WIDE" in name else 1
