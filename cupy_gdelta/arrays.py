"""Arrays of every family in, arrays of the same family out: NumPy, CuPy, torch, DLPack.

Nothing is copied here but what NumPy itself cannot address (a foreign byte order, strides that are
no multiple of the item). Libraries are found through ``sys.modules``: an array can only come from a
library that is imported already.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import dlpack

FLOATS = ("float16", "bfloat16", "float32", "float64")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}


def state_dtype(dtype: str) -> str:
    """What states are kept in for q of ``dtype``, and gates and betas where they are not of it."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class View:
    """An array as the package sees it: where it lies and how, whoever made it.

    ``array`` is what can be indexed here: a NumPy array on the CPU (for bfloat16 the bits in
    uint16), on a GPU a CuPy array or a torch tensor. ``strides`` count elements; ``ptr`` is 0 on
    the CPU.
    """

    owner: Any
    family: str  # "numpy", "cupy", "torch" or "dlpack"
    device: int  # -1 is the CPU, else the number of the CUDA device
    array: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    ptr: int
    needs_grad: bool = False
    copied: bool = False  # array is a copy: what is written to it does not reach the owner

    @property
    def readonly(self) -> bool:
        if _library(self.owner) == "jaxlib":  # immutable, but its exports do not say so
            return True
        return isinstance(self.array, np.ndarray) and not self.array.flags.writeable

    @property
    def extent(self) -> tuple[int, int]:
        """First byte and one past the last byte that the elements occupy on a GPU."""
        if 0 in self.shape:
            return self.ptr, self.ptr
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        item = ITEMSIZE[self.dtype]
        low = self.ptr + item * sum(r for r in reach if r < 0)
        return low, self.ptr + item * (1 + sum(r for r in reach if r > 0))

    def overlaps(self, other: View) -> bool:
        """Whether the two may share memory; both must lie on one device."""
        if self.device < 0:
            return np.may_share_memory(self.array, other.array)
        (a, b), (c, d) = self.extent, other.extent
        return a < d and c < b

    def shares(self, other: View) -> bool:
        """Whether some element of one lies in memory of the other; slower than ``overlaps``."""
        if not self.overlaps(other):
            return False
        try:
            most: Any = 100_000  # steps of a search that may take exponentially many
            return np.shares_memory(_Laid(self).seen(), _Laid(other).seen(), max_work=most)
        except RuntimeError:  # too hard to tell
            return True

    def beside(self, other: View) -> bool:
        """Whether the two are of one library and on one device."""
        if (self.family, self.device) != (other.family, other.device):
            return False
        return self.family != "dlpack" or _library(self.owner) == _library(other.owner)

    @property
    def where(self) -> str:
        return "on the CPU" if self.device < 0 else f"on CUDA device {self.device}"

    @property
    def kind(self) -> str:
        """What to call it in a message."""
        names = {"numpy": "a NumPy array", "cupy": "a CuPy array", "torch": "a torch tensor"}
        return f"{names.get(self.family) or f'an array of {_library(self.owner)}'} {self.where}"


class _Laid:
    """Where a view's elements lie, for NumPy to compare; nothing is read."""

    def __init__(self, x: View) -> None:
        item = ITEMSIZE[x.dtype]
        self.__array_interface__ = {
            "data": (x.ptr if x.device >= 0 else x.array.ctypes.data, True),
            "shape": x.shape,
            "strides": tuple([s * item for s in x.strides]),
            "typestr": f"|V{item}",
            "version": 3,
        }

    def seen(self) -> np.ndarray:
        return np.asarray(self)


def take(x: Any) -> View:
    """See ``x`` as a :class:`View`; TypeError with the rule when it is no array of a known kind."""
    if isinstance(x, np.ndarray):
        return _numpy(x)
    for name, wrap in (("cupy", _cupy), ("torch", _torch)):
        library = sys.modules.get(name)
        kind = getattr(library, {"cupy": "ndarray", "torch": "Tensor"}[name], None)
        if kind is not None and isinstance(x, kind):
            return wrap(x)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _dlpack(x)
    raise TypeError(
        f"must be an array (NumPy, CuPy, torch or any object with __dlpack__); "
        f"got {type(x).__name__}"
    )


@functools.cache
def _name(dtype: np.dtype) -> str:
    return dtype.name  # worked out by NumPy at every call, in 3 us


def _library(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _numpy(x: np.ndarray, owner: Any = None, family: str = "numpy", dtype: str = "") -> View:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("must be a plain array, for its mask would be ignored; got MaskedArray")
    owner = x if owner is None else owner
    x = np.asarray(x)
    kind, item = x.dtype, x.itemsize or 1
    dtype = dtype or _name(kind)
    copied = not kind.isnative or not x.flags.aligned or any([s % item for s in x.strides])
    if copied:
        x = np.array(x, dtype=kind.newbyteorder("="))
    if dtype == "bfloat16":  # ml_dtypes' bfloat16 is of kind V: carry the bits
        x = x.view(np.uint16)
    strides = tuple([s // item for s in x.strides])
    return View(owner, family, -1, x, x.shape, strides, dtype, 0, copied=copied)


def _cupy(x: Any, owner: Any = None, family: str = "cupy") -> View:
    item = x.dtype.itemsize or 1
    at, steps = x.data, x.strides
    if at.ptr % item or any([s % item for s in steps]):
        raise TypeError(f"must lie at whole multiples of its item; got strides of {steps} bytes")
    strides = tuple([s // item for s in steps])
    owner = x if owner is None else owner
    return View(owner, family, at.device_id, x, x.shape, strides, _name(x.dtype), at.ptr)


def _torch(x: Any) -> View:
    torch = sys.modules["torch"]
    on_gpu = x.is_cuda  # x.device makes an object at every asking
    if x.layout != torch.strided or x.is_nested or not (on_gpu or x.is_cpu):
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(
            f"must be a strided torch tensor on the CPU or a CUDA device; "
            f"got layout {layout} on {x.device}"
        )
    plain, lazy = x.detach(), x.is_conj() or x.is_neg()
    if lazy:
        plain = plain.resolve_conj().resolve_neg()
    try:
        ptr = 0 if type(x).__name__ == "FakeTensor" else plain.data_ptr()
    except RuntimeError:  # inside torch.vmap or torch.func.grad
        ptr = 0
    if ptr == 0 and x.numel():
        raise TypeError(
            f"must be a torch tensor with memory of its own; got {type(x).__name__} without, "
            f"as in torch.vmap, torch.func and torch.compile"
        )
    dtype, shape, strides = str(x.dtype).removeprefix("torch."), tuple(x.shape), plain.stride()
    needs_grad = (x.requires_grad and torch.is_grad_enabled()) or _has_tangent(torch, x)
    facts = {"needs_grad": needs_grad, "copied": lazy}
    if on_gpu:
        return View(x, "torch", x.get_device(), plain, shape, strides, dtype, ptr, **facts)
    try:
        if dtype == "bfloat16":
            array = plain.view(torch.int16).numpy().view(np.uint16)
        else:
            array = plain.numpy()
    except TypeError:  # a dtype that NumPy lacks is refused by name later
        array = np.empty(shape, np.void)
    return View(x, "torch", -1, array, shape, strides, dtype, 0, **facts)


def _has_tangent(torch: Any, x: Any) -> bool:
    """Whether ``x`` carries a derivative forward, as in torch.autograd.forward_ad."""
    forward = torch.autograd.forward_ad
    return forward._current_level >= 0 and forward.unpack_dual(x).tangent is not None


def _dlpack(x: Any) -> View:
    kind, index = x.__dlpack_device__()
    if kind in (dlpack.CPU, dlpack.CUDA_HOST):
        try:
            array, dtype = dlpack.read(x)
        except (BufferError, RuntimeError, ValueError) as error:
            raise TypeError(
                f"must be exported through DLPack; got this refusal: {error}"
            ) from error
        return _numpy(array, x, "dlpack", dtype)
    if kind in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        try:
            import cupy
        except ImportError as error:
            raise TypeError(
                f"must lie on the CPU where CuPy cannot be imported; got CUDA device {index}"
            ) from error
        try:
            with cupy.cuda.Device(index):
                return _cupy(cupy.from_dlpack(x), x, "dlpack")
        except (BufferError, NotImplementedError, RuntimeError, ValueError) as error:
            raise TypeError(
                f"must be exported through DLPack; got this refusal: {error}"
            ) from error
    raise TypeError(f"must lie on the CPU or a CUDA device; got DLPack device type {int(kind)}")


def traced(q: Any, *others: Any) -> bool:
    """Whether torch has to see a call as an operator: to differentiate, compile or autocast it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        return True
    given = (q, *others)
    return torch.is_grad_enabled() and any([getattr(x, "requires_grad", False) for x in given])


def empty(like: View, shape: tuple[int, ...], dtype: str) -> View:
    """A new C-contiguous array of the family and on the device of ``like``."""
    if like.family == "torch":
        torch = sys.modules["torch"]
        return _torch(torch.empty(shape, dtype=getattr(torch, dtype), device=like.owner.device))
    if like.device < 0:
        if dtype != "bfloat16":
            return _numpy(np.empty(shape, dtype), None, like.family)
        if like.family == "dlpack":
            return _numpy(np.empty(shape, np.uint16), None, like.family, dtype)
        return _numpy(np.empty(shape, like.owner.dtype.type))
    import cupy

    with cupy.cuda.Device(like.device):
        kind = like.array.dtype if dtype == like.dtype else dtype
        return _cupy(cupy.empty(shape, kind), None, like.family)


def with_rows(x: View) -> View:
    """``x`` on a GPU itself where its last axis is contiguous, as kernels need it; else a copy."""
    return x if x.shape[-1] <= 1 or x.strides[-1] == 1 else _contiguous(x)


def contiguous(x: View) -> View:
    """``x`` on a GPU itself where it is C-contiguous; else a copy."""
    return x if is_contiguous(x) else _contiguous(x)


def is_contiguous(x: View) -> bool:
    """Whether elements follow each other in the order of C."""
    step = 1
    for n, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if n > 1 and stride != step:
            return False
        step *= n
    return True


def _contiguous(x: View) -> View:
    if x.family == "torch":
        return _torch(x.array.contiguous())
    import cupy

    with cupy.cuda.Device(x.device):
        return _cupy(cupy.ascontiguousarray(x.array), None, x.family)


def fill(x: View, value: View | float) -> None:
    """Write a number or a view of the same family into ``x``, on the stream of its library."""
    if x.device < 0 or x.family == "torch":
        x.array[...] = value.array if isinstance(value, View) else value
        return
    import cupy

    with cupy.cuda.Device(x.device):
        x.array[...] = value.array if isinstance(value, View) else value


def written(x: View) -> None:
    """Let the library of ``x`` know that it was written."""
    if x.family == "dlpack" and x.device >= 0:  # it cannot be told to wait
        with x.array.device:
            sys.modules["cupy"].cuda.get_current_stream().synchronize()
    # for autograd to refuse a gradient that needs the old values
    if x.family == "torch" and not x.owner.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(x.owner)


def give(x: View, like: View) -> Any:
    """``x`` as the caller gets it: an array of the library that ``like`` came from."""
    if like.family != "dlpack":
        return x.owner
    if x.device < 0:
        return importer(like.owner)(dlpack.Export(x.array, x.dtype))
    with x.array.device:  # on whose current stream CuPy then lets the other library wait
        return importer(like.owner)(x.array)


def importer(owner: Any) -> Any:
    """``from_dlpack`` of the library that made ``owner``; TypeError where there is none."""
    if hasattr(owner, "__array_namespace__"):
        return owner.__array_namespace__().from_dlpack
    root = _library(owner)
    for name in (root, f"{root}.dlpack", f"{root}.utils.dlpack", type(owner).__module__):
        found = getattr(sys.modules.get(name), "from_dlpack", None)
        if found is not None:
            return found
    raise TypeError(
        f"must come from a library with from_dlpack, to hand the result back in; "
        f"got {type(owner).__module__}.{type(owner).__qualname__}"
    )
