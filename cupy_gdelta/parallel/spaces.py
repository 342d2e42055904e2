"""Arrays of a caller's family for the work between ranks: NumPy on the CPU, CuPy or torch on a GPU.

Views (see arrays) are what the functions of one rank take and return. Here their ``array`` is
computed with, which on the CPU is a NumPy array for every family.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import arrays
from ..arrays import View


@dataclass(frozen=True)
class Space:
    """The library and the device of ``like``, an array of the caller."""

    like: View

    @property
    def xp(self) -> Any:
        """The module whose functions compute."""
        if self.like.device < 0:
            return np
        return sys.modules["torch" if self.like.family == "torch" else "cupy"]

    @property
    def _torch(self) -> bool:
        return self.like.device >= 0 and self.like.family == "torch"

    def current(self) -> Any:
        """Make the device of CuPy's arrays the current one; compute in no dtype but that asked."""
        if self.like.device < 0:
            return contextlib.nullcontext()
        if self._torch:
            return self.xp.autocast("cuda", enabled=False)
        return self.xp.cuda.Device(self.like.device)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> View:
        x = arrays.empty(self.like, shape, dtype)
        arrays.fill(x, 0.0)
        return x

    def bytes(self, count: int) -> Any:
        """Memory for a message."""
        return arrays.empty(self.like, (count,), "uint8").array

    def typed(self, x: Any, dtype: str) -> Any:
        """Bytes seen as numbers, or numbers as bytes ("uint8")."""
        return x.view(getattr(self.xp, dtype))

    def view(self, x: Any) -> View:
        """``x``, as computed here, as the functions of one rank take it."""
        if self.like.family == "torch" and isinstance(x, np.ndarray):
            x = sys.modules["torch"].from_numpy(x)
        return arrays.take(x)

    def wide(self, x: Any) -> Any:
        """In float64."""
        return x.double() if self._torch else x.astype(np.float64)

    def host(self, x: Any) -> np.ndarray:
        if self.like.device < 0:
            return x
        return x.cpu().numpy() if self._torch else x.get()

    def widened(self, x: View, start: int, stop: int) -> Any:
        """Tokens of an input in float32, or in float64 where it is."""
        part = x.array[:, start:stop]
        if x.dtype in ("float32", "float64"):
            return part
        if self._torch:
            return part.float()
        if x.dtype == "bfloat16" and self.like.device < 0:  # as its bits
            return np.left_shift(part, 16, dtype=np.uint32).view(np.float32)
        return part.astype(np.float32)

    def longer(self, x: Any) -> Any:
        """In float64, where that is no wider than x in one that is on the CPU."""
        if self.like.device < 0 and x.dtype == np.float64:
            return x.astype(np.longdouble)
        return self.wide(x)

    def scaled(self, x: Any, exponents: Any) -> Any:
        """``x`` in float64 times 2 to whole powers, which may go beyond its range by themselves."""
        for _ in range(3):
            some = self.xp.clip(exponents, -1000, 1000)
            x = x * self._powers(some)
            exponents = exponents - some
        return x

    def _powers(self, exponents: Any) -> Any:
        """2 to these, exactly, by its bits."""
        whole = exponents.long() if self._torch else exponents.astype(np.int64)
        return self.typed((whole + 1023) << 52, "float64")
