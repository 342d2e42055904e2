"""The DLPack protocol on the CPU, for every dtype: NumPy's own reader and writer refuse bfloat16.

A capsule is read into a NumPy array over the producer's memory, and a NumPy array is offered to
any consumer through :class:`Export`. bfloat16 travels as its bits in uint16 beside its name.
On a GPU CuPy speaks the protocol, with streams, and this module is not used.
"""

from __future__ import annotations

import ctypes as ct
from typing import Any

import numpy as np

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_BFLOAT = 4
_KINDS = {0: "int", 1: "uint", 2: "float", _BFLOAT: "bfloat", 5: "complex", 6: "bool"}
_READ_ONLY, _IS_COPIED = 1, 2  # flags of a versioned export


class _Tensor(ct.Structure):
    _fields_ = [
        ("data", ct.c_void_p),
        ("device_type", ct.c_int32),
        ("device_id", ct.c_int32),
        ("ndim", ct.c_int32),
        ("code", ct.c_uint8),
        ("bits", ct.c_uint8),
        ("lanes", ct.c_uint16),
        ("shape", ct.POINTER(ct.c_int64)),
        ("strides", ct.POINTER(ct.c_int64)),
        ("byte_offset", ct.c_uint64),
    ]


_Deleter = ct.CFUNCTYPE(None, ct.c_void_p)


class _Managed(ct.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ct.c_void_p), ("deleter", _Deleter)]


class _ManagedVersioned(ct.Structure):
    _fields_ = [
        ("major", ct.c_uint32),
        ("minor", ct.c_uint32),
        ("context", ct.c_void_p),
        ("deleter", _Deleter),
        ("flags", ct.c_uint64),
        ("tensor", _Tensor),
    ]


_LAYOUTS: dict[bytes, Any] = {b"dltensor": _Managed, b"dltensor_versioned": _ManagedVersioned}
_USED = {name: b"used_" + name for name in _LAYOUTS}  # a capsule keeps the pointer to its name

_api = ct.pythonapi
_api.PyCapsule_IsValid.argtypes = [ct.py_object, ct.c_char_p]
_api.PyCapsule_GetPointer.argtypes = [ct.py_object, ct.c_char_p]
_api.PyCapsule_GetPointer.restype = ct.c_void_p
_api.PyCapsule_SetName.argtypes = [ct.py_object, ct.c_char_p]


class _Memory:
    """Memory of another library, seen by NumPy; gives it back when the last view is gone."""

    __array_interface__: dict[str, Any]

    def __init__(self, managed: Any) -> None:
        self._delete, self._address = managed.deleter, ct.addressof(managed)

    def __del__(self) -> None:
        if self._delete:
            self._delete(self._address)


def read(source: Any) -> tuple[np.ndarray, str]:
    """The CPU array behind ``source.__dlpack__()`` without a copy, and the name of its dtype."""
    try:
        capsule = source.__dlpack__(max_version=(1, 1))
    except TypeError:  # a producer from before DLPack 1.0
        capsule = source.__dlpack__()
    name, managed = _managed(capsule)
    versioned = name == b"dltensor_versioned"
    if versioned and managed.major > 1:
        raise BufferError(f"must speak DLPack 1; got version {managed.major}.{managed.minor}")
    _api.PyCapsule_SetName(capsule, _USED[name])
    tensor = managed.tensor
    kind = _KINDS.get(tensor.code, "unknown")
    dtype = "bool" if kind == "bool" else f"{kind}{tensor.bits}"
    shape = tensor.shape[: tensor.ndim] if tensor.shape else []
    strides = tensor.strides[: tensor.ndim] if tensor.strides else _contiguous(shape)
    readonly = versioned and bool(managed.flags & (_READ_ONLY | _IS_COPIED))
    address = (tensor.data or 0) + tensor.byte_offset
    memory = _Memory(managed)  # from here on the producer's memory is given back in any case
    try:
        native = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    except TypeError:
        native = None
    if native is None or tensor.lanes != 1:
        raise TypeError(
            f"must have a dtype that NumPy has; got {dtype} x {tensor.lanes} through DLPack"
        )
    if 0 in shape:
        return np.empty(shape, native), dtype
    memory.__array_interface__ = {
        "data": (address, readonly),
        "shape": tuple(shape),
        "strides": tuple(s * native.itemsize for s in strides),
        "typestr": native.str,
        "version": 3,
    }
    return np.asarray(memory), dtype


def _managed(capsule: Any) -> tuple[bytes, Any]:
    """The name of an unused capsule and the struct inside."""
    for name, layout in _LAYOUTS.items():
        if _api.PyCapsule_IsValid(capsule, name):
            return name, layout.from_address(_api.PyCapsule_GetPointer(capsule, name))
    raise TypeError("must give an unused DLPack capsule; got one that was used, or none")


def _contiguous(shape) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


class Export:
    """Offers a NumPy array, or bfloat16 bits in uint16, to any DLPack consumer."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self._array, self._dtype = array, dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None) -> Any:
        array = self._array.copy() if copy else self._array
        try:
            capsule = array.__dlpack__(max_version=max_version, dl_device=dl_device)
        except TypeError:  # NumPy before 2.1 knows no such arguments
            capsule = array.__dlpack__()
        if self._dtype == "bfloat16":
            _managed(capsule)[1].tensor.code = _BFLOAT
        return capsule
