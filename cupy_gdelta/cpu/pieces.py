"""From the caller's arrays to the chunks and back: layout, width of the numbers, padding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class Scratch:
    """Arrays that are used again from segment to segment, each under its name; one per thread."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self._flat: dict[str, np.ndarray] = {}
        self._zeroed: dict[str, tuple[int, ...]] = {}

    def __call__(self, name: str, *shape: int, dtype: Any = None) -> np.ndarray:
        """An array of ``shape`` with undefined contents."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size:
            flat = self._flat[name] = np.empty(size, self.dtype if dtype is None else dtype)
        return flat[:size].reshape(shape)

    def zeroed(self, name: str, *shape: int) -> np.ndarray:
        """Zeros at first, and what was last written into it while the shape stays the same."""
        x = self(name, *shape)
        if self._zeroed.get(name) != shape:
            x.fill(0)
            self._zeroed[name] = shape
        return x


def in_chunks(x: np.ndarray, chunk: int, repeat: int) -> np.ndarray:
    """Tokens x [S, M * chunk, G * repeat, D] seen as [M, S, G, repeat, chunk, D]."""
    S, t, heads, D = x.shape
    x = x.reshape(S, t // chunk, chunk, heads // repeat, repeat, D)
    return x.transpose(1, 0, 3, 4, 2, 5)


def load(x: np.ndarray, dtype: str, out: np.ndarray, fill: float = 0.0) -> None:
    """Copy tokens x [S, t, heads, D] into chunks out [M, L, R, C, D], widened to out's dtype.

    L = S * G, and heads = G * R: R value heads share a query head. Tokens past t become ``fill``.
    """
    M, L, R, C, D = out.shape
    S, t = x.shape[:2]
    out = out.reshape(M, S, L // S, R, C, D)
    full, rest = divmod(t, C)
    if full:
        widen(in_chunks(x[:, : full * C], C, R), dtype, out[:full])
    if rest:
        part = x[:, full * C :].reshape(S, rest, L // S, R, D)
        widen(part.transpose(0, 2, 3, 1, 4), dtype, out[full, ..., :rest, :])
        out[full, ..., rest:, :] = fill


def store(chunks: np.ndarray, dtype: str, y: np.ndarray, index: tuple[Any, ...], t: int) -> None:
    """Write chunks [M, L, R, C, V] into the tokens y[index] [S, t, heads, V], rounded to dtype."""
    M, L, R, C, V = chunks.shape
    if dtype == "bfloat16":
        chunks = bfloat16_bits(chunks)
    S = L * R // y[:1, :1, index[2]].shape[2]
    chunks = chunks.reshape(M, S, L // S, R, C, V)
    if isinstance(index[1], slice) and t == M * C:
        in_chunks(y[index], C, R)[...] = chunks
    else:
        y[index] = chunks.transpose(1, 0, 4, 2, 3, 5).reshape(S, M * C, -1, V)[:, :t]


def widen(x: np.ndarray, dtype: str, out: np.ndarray) -> None:
    """Copy x, an array of ``dtype``, into the wider numbers of out."""
    if dtype != "bfloat16":
        np.copyto(out, x, casting="same_kind")
        return
    bits = out.view(np.uint32) if out.dtype == np.float32 else np.empty(out.shape, np.uint32)
    np.copyto(bits, x)
    np.left_shift(bits, 16, out=bits)
    if out.dtype != np.float32:
        np.copyto(out, bits.view(np.float32))


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """The bits of float32 values rounded to bfloat16, ties to even. Destroys x."""
    bad = np.isnan(x)
    bits = x.view(np.uint32)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    bits += odd
    bits >>= 16
    bits[bad] = 0x7FC0
    return bits.astype(np.uint16)
