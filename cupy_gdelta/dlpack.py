"""The DLPack protocol on the CPU, for every dtype: NumPy's own reader and writer refuse bfloat16.

A capsule is read into a NumPy array over the producer's memory, and a NumPy array is offered to any
consumer through :class:`Export`. bfloat16 travels as its bits in uint16 beside the name of the dtype.
On a GPU CuPy speaks the protocol, with streams, and this module is not used.
"""

from __future__ import annotations

import ctypes as ct
from typing import Any

import numpy as np

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_CODES = {name: code for code, name in _KINDS.items()}
_READ_ONLY = 1


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

_NAMES = tuple(_LAYOUTS)  # PyCapsule keeps the pointer to its name, so the bytes must live on
_api = ct.pythonapi
_api.PyCapsule_IsValid.argtypes = [ct.py_object, ct.c_char_p]
_api.PyCapsule_GetPointer.argtypes = [ct.py_object, ct.c_char_p]
_api.PyCapsule_GetPointer.restype = ct.c_void_p
_api.PyCapsule_SetName.argtypes = [ct.py_object, ct.c_char_p]
_Destructor = ct.PYFUNCTYPE(None, ct.c_void_p)
_api.PyCapsule_New.argtypes = [ct.c_void_p, ct.c_char_p, _Destructor]
_api.PyCapsule_New.restype = ct.py_object
_USED = {name: b"used_" + name for name in _LAYOUTS}


class _Memory:
    """Memory of another library, seen by NumPy; gives it back when the last view is gone."""

    def __init__(self, interface: dict[str, Any], managed: Any) -> None:
        self.__array_interface__ = interface
        self._managed = managed

    def __del__(self) -> None:
        if self._managed.deleter:
            self._managed.deleter(ct.addressof(self._managed))


def array_at(ptr: int, shape, strides, dtype: str, readonly: bool = False) -> dict[str, Any]:
    """NumPy's array interface of memory at ``ptr``; strides in elements, bfloat16 as uint16."""
    native = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    return {
        "data": (ptr, readonly),
        "shape": tuple(shape),
        "strides": tuple(s * native.itemsize for s in strides),
        "typestr": native.str,
        "version": 3,
    }


def read(source: Any) -> tuple[np.ndarray, str]:
    """The CPU array behind ``source.__dlpack__()`` without a copy, and the name of its dtype."""
    try:
        capsule = source.__dlpack__(max_version=(1, 1))
    except TypeError:  # a producer from before DLPack 1.0
        capsule = source.__dlpack__()
    name = next((n for n in _LAYOUTS if _api.PyCapsule_IsValid(capsule, n)), None)
    if name is None:
        raise TypeError("its __dlpack__ gave no unused DLPack capsule")
    managed = _LAYOUTS[name].from_address(_api.PyCapsule_GetPointer(capsule, name))
    _api.PyCapsule_SetName(capsule, _USED[name])
    tensor = managed.tensor
    kind = _KINDS.get(tensor.code, "unknown")
    dtype = "bool" if kind == "bool" else f"{kind}{tensor.bits}"
    shape = tensor.shape[: tensor.ndim] if tensor.ndim else []
    if tensor.ndim and tensor.strides:
        strides = tensor.strides[: tensor.ndim]
    else:
        strides = _contiguous(shape)
    readonly = name == b"dltensor_versioned" and bool(managed.flags & _READ_ONLY)
    address = (tensor.data or 0) + tensor.byte_offset
    memory = _Memory({}, managed)  # from here on the producer's memory is given back in any case
    if tensor.lanes != 1 or not (dtype == "bfloat16" or _known(dtype)):
        raise TypeError(f"DLPack dtype {dtype} with {tensor.lanes} lanes has no NumPy form")
    if 0 in shape:
        return np.empty(shape, "uint16" if dtype == "bfloat16" else dtype), dtype
    memory.__array_interface__ = array_at(address, shape, strides, dtype, readonly)
    return np.asarray(memory), dtype


def _known(dtype: str) -> bool:
    try:
        return bool(np.dtype(dtype))
    except TypeError:
        return False


def _contiguous(shape) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


_exported: dict[int, tuple] = {}  # what a consumer still holds, by the address of its struct


@_Deleter
def _release(address: int) -> None:
    _exported.pop(address, None)


_is_valid = ct.PYFUNCTYPE(ct.c_int, ct.c_void_p, ct.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ct.PYFUNCTYPE(ct.c_void_p, ct.c_void_p, ct.c_char_p)(("PyCapsule_GetPointer", _api))


@_Destructor
def _discard(capsule: int) -> None:
    """Destructor of a capsule: lets the array go if no consumer took it."""
    for name in _LAYOUTS:
        if _is_valid(capsule, name):
            _release(_pointer(capsule, name))


class Export:
    """Offers a C-contiguous NumPy array, or bfloat16 bits in uint16, to any DLPack consumer."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self._array, self._dtype = array, dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None) -> Any:
        if dl_device not in (None, (CPU, 0)):
            raise BufferError(f"the array lies on the CPU; it cannot be exported to {dl_device}")
        array = self._array.copy() if copy else self._array
        versioned = max_version is not None and max_version[0] >= 1
        managed = _LAYOUTS[_NAMES[versioned]]()
        if versioned:
            managed.major, managed.minor = 1, 0
        managed.deleter = _release
        tensor = managed.tensor
        tensor.data, tensor.device_type, tensor.ndim = array.ctypes.data, CPU, array.ndim
        kind = self._dtype.rstrip("0123456789")
        tensor.code, tensor.bits, tensor.lanes = _CODES[kind], array.itemsize * 8, 1
        tensor.shape = (ct.c_int64 * array.ndim)(*array.shape)
        tensor.strides = (ct.c_int64 * array.ndim)(*_contiguous(array.shape))
        address = ct.addressof(managed)
        _exported[address] = (managed, array)
        return _api.PyCapsule_New(address, _NAMES[versioned], _discard)
