"""Tensor maps, which tell the copy engine of sm_90 of an array; the driver makes them."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

from ..arrays import ITEMSIZE, View

ROWS, ROW_BYTES = 64, 128  # of a tile, unless it has fewer rows
BYTES = 128  # sizeof(CUtensorMap)
_NO_INTERLEAVE, _SWIZZLE_128B, _L2_256B, _ZEROS = 0, 3, 3, 0
_TYPES = {2: 1, 4: 2}  # CUtensorMapDataType of whole numbers, copied as they are, by size
# elements along an axis, for which the kernel's 32 bits leave room; bytes from one to the next
_MOST, _MOST_STRIDE = 2**31 - 2**12, 2**40


def fits(x: View) -> bool:
    """Whether the copy engine can read and write (B, T, heads, columns) x."""
    size = ITEMSIZE[x.dtype]
    steps = [stride * size for n, stride in zip(x.shape[:3], x.strides[:3], strict=True) if n > 1]
    return (
        0 not in x.shape
        and x.ptr % 16 == 0
        and (x.strides[3] == 1 or x.shape[3] == 1)
        and max(x.shape) <= _MOST
        and all(step % 16 == 0 and 0 < step < _MOST_STRIDE for step in steps)
    )


def make(x: View, rows: int = ROWS) -> np.ndarray:
    """The map of (B, T, heads, columns) x in swizzled tiles, as a kernel's argument."""
    packed = _encode(x.ptr, x.shape, x.strides, ITEMSIZE[x.dtype], rows)
    return np.frombuffer(packed, np.dtype((np.void, BYTES)))


@functools.lru_cache(maxsize=4096)
def _encode(
    ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, rows: int
) -> bytes:
    B, T, heads, columns = shape
    steps = [strides[axis] * size if shape[axis] > 1 else 16 for axis in (2, 1, 0)]
    space = ctypes.create_string_buffer(BYTES + 64)
    at = ctypes.addressof(space) + -ctypes.addressof(space) % 64
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _TYPES[size],
        4,
        ctypes.c_void_p(ptr),
        (ctypes.c_uint64 * 4)(columns, heads, T, B),
        (ctypes.c_uint64 * 3)(*steps),
        (ctypes.c_uint32 * 4)(ROW_BYTES // size, 1, rows, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128B,
        _L2_256B,
        _ZEROS,
    )
    if status:
        raise RuntimeError(f"cupy_gdelta: the driver made no tensor map of {shape}: error {status}")
    return ctypes.string_at(at, BYTES)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
