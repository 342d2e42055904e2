"""Arrays of any other library through DLPack on the CPU, in and out, and who owns the memory."""

from __future__ import annotations

import ctypes as ct
import gc
import sys
import weakref

import numpy as np
import pytest
from compare import host
from conftest import python

import cupy_gdelta
from cupy_gdelta import accuracy, arrays, dlpack

FUNCTIONS = (cupy_gdelta.gated_linear_attention, cupy_gdelta.gated_delta_rule)


class Foreign:
    """An array of a library that nobody knows: it speaks DLPack and no more."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()

    def __dlpack__(self, *, max_version=None):
        return self.inner.__dlpack__(max_version=max_version)


class Old(Foreign):
    """One from before DLPack 1.0."""

    def __dlpack__(self):
        return self.inner.__dlpack__()


def from_dlpack(source) -> Foreign:
    """This library's own importer, found beside its arrays."""
    import torch

    return Foreign(torch.from_dlpack(source))


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def strict():
    return pytest.importorskip("array_api_strict")


def problem(rng, **sizes):
    return accuracy.inputs(rng, **{"B": 2, "T": 70, "H": 2, "K": 4, "V": 3} | sizes)


# results in the caller's library


@pytest.mark.parametrize("kind", [Foreign, Old])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_an_unknown_library_gets_its_own_arrays_back(torch, kind, dtype, rng):
    p = {n: torch.tensor(x, dtype=torch.float32) for n, x in problem(rng).items()}
    p |= {n: p[n].to(getattr(torch, dtype)) for n in "qkv"}
    foreign = {n: kind(x) for n, x in p.items()}
    assert arrays.take(foreign["q"]).dtype == dtype
    for function in FUNCTIONS:
        expected, end = function(**p, return_state=True)
        y, state = function(**foreign, return_state=True)
        assert type(y) is type(state) is Foreign
        assert y.inner.dtype == p["q"].dtype
        assert torch.equal(y.inner, expected)
        assert torch.equal(state.inner, end)


def test_array_api_strict_gets_its_own_arrays_back(strict, rng):
    p = {n: x.astype("float32") for n, x in problem(rng).items()}
    expected = cupy_gdelta.gated_delta_rule(**p)
    y = cupy_gdelta.gated_delta_rule(**{n: strict.asarray(x) for n, x in p.items()})
    assert type(y) is type(strict.asarray(0))
    assert y.dtype == strict.float32
    assert np.array_equal(host(y), expected)


def test_out_of_another_library_is_written_and_comes_back(torch, strict, rng):
    p = problem(rng)
    expected = cupy_gdelta.gated_delta_rule(**p)
    out = strict.zeros(expected.shape)
    some = {n: strict.asarray(x) for n, x in p.items()}
    assert cupy_gdelta.gated_delta_rule(**some, out=out) is out
    assert np.array_equal(host(out), expected)
    for kind in (Foreign, Old):
        out = kind(torch.zeros(expected.shape, dtype=torch.float64))
        foreign = {n: kind(torch.tensor(x)) for n, x in p.items()}
        assert cupy_gdelta.gated_delta_rule(**foreign, out=out) is out
        assert np.array_equal(out.inner.numpy(), expected)


def test_a_library_without_from_dlpack_is_refused_before_any_work(torch, rng, monkeypatch):
    monkeypatch.delitem(globals(), "from_dlpack")
    p = {n: Foreign(torch.tensor(x)) for n, x in problem(rng).items()}
    text = r"v must come from a library with from_dlpack, .*; got test_dlpack\.Foreign$"
    with pytest.raises(TypeError, match=text):
        cupy_gdelta.gated_delta_rule(**p)


def test_two_foreign_libraries_are_not_mixed(torch, strict, rng):
    p = {n: Foreign(torch.tensor(x)) for n, x in problem(rng).items()}
    p["gate"] = strict.asarray(p["gate"].inner.numpy())
    text = (
        "gate must be an array of test_dlpack on the CPU, as q is; got an array of array_api_strict"
    )
    with pytest.raises(TypeError, match=text):
        cupy_gdelta.gated_delta_rule(**p)


def test_arrays_of_jax_are_never_written(torch, rng, monkeypatch):
    """They are immutable, though what they export says nothing of it."""
    monkeypatch.setattr(Foreign, "__module__", "jaxlib._jax")
    monkeypatch.setattr(Foreign, "__array_namespace__", lambda self: torch, raising=False)
    p = {n: Foreign(torch.tensor(x)) for n, x in problem(rng).items()}
    assert cupy_gdelta.gated_delta_rule(**p).shape == (2, 70, 2, 3)
    with pytest.raises(ValueError, match="out must be writable; got a read-only array"):
        cupy_gdelta.gated_delta_rule(**p, out=Foreign(torch.zeros_like(p["v"].inner)))


# what is read


def test_read_shares_the_memory():
    x = np.arange(24, dtype="float32").reshape(2, 3, 4)
    for y in (x, x.T, x[:, ::-2, 1:], x[1, 1, 1:2].reshape(()), x[:0]):
        array, dtype = dlpack.read(y)
        assert dtype == "float32"
        assert np.array_equal(array, y)
        assert np.shares_memory(array, y) == (y.size > 0)
        assert y.size == 0 or array.strides == y.strides
    dlpack.read(x)[0][...] = 5
    assert (x == 5).all()


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "bool", "complex64", "float64"])
def test_read_knows_every_dtype(dtype):
    x = np.ones(3, dtype)
    array, name = dlpack.read(x)
    assert (array.dtype, name) == (x.dtype, dtype)


def test_X09_read_only_arrays_are_inputs_and_never_written(strict, rng):
    """Read-only arrays were refused, or written to all the same (numpy/numpy#20742, jax#40789)."""
    p = {n: np.ascontiguousarray(x) for n, x in problem(rng).items()}
    expected = cupy_gdelta.gated_delta_rule(**p)
    for x in p.values():
        x.flags.writeable = False
        array, _ = dlpack.read(x)
        assert not array.flags.writeable
    assert np.array_equal(cupy_gdelta.gated_delta_rule(**p), expected)
    sealed = {n: strict.asarray(x, copy=False) for n, x in p.items()}
    assert np.array_equal(host(cupy_gdelta.gated_delta_rule(**sealed)), expected)
    out = strict.asarray(p["v"], copy=False)
    with pytest.raises(ValueError, match="out must be writable; got a read-only array"):
        cupy_gdelta.gated_delta_rule(**sealed, out=out)


def test_X10_a_capsule_is_no_array(rng):
    """A capsule instead of its owner, a used one, a copy refused (cupy#9842, cuda-quantum#2688)."""
    p = problem(rng)
    with pytest.raises(TypeError, match=r"q must be an array .*; got PyCapsule"):
        cupy_gdelta.gated_delta_rule(**p | {"q": p["q"].__dlpack__()})


def test_X10_a_capsule_can_be_used_once(rng):
    """A producer that keeps its capsule can be read once, then says so."""
    for version in (None, (1, 0)):
        p = problem(rng)
        odd = Foreign(p["q"])
        capsule = p["q"].__dlpack__(max_version=version)
        odd.__class__ = type("Hoard", (Foreign,), {"__dlpack__": lambda self, c=capsule, **_: c})
        assert np.array_equal(dlpack.read(odd)[0], p["q"])
        text = "q must give an unused DLPack capsule; got one that was used, or none"
        with pytest.raises(TypeError, match=text):
            cupy_gdelta.gated_delta_rule(odd, odd, odd)
    odd.__class__ = type("Liar", (Foreign,), {"__dlpack__": lambda self, **_: None})
    with pytest.raises(TypeError, match=text):
        cupy_gdelta.gated_delta_rule(odd, odd, odd)


def test_devices_that_nobody_computes_on_are_refused(rng):
    odd = Foreign(problem(rng)["q"])
    odd.__class__ = type("Elsewhere", (Foreign,), {"__dlpack_device__": lambda self: (8, 0)})
    text = "q must lie on the CPU or a CUDA device; got DLPack device type 8"
    with pytest.raises(TypeError, match=text):
        cupy_gdelta.gated_delta_rule(odd, odd, odd)


def test_a_refusal_to_export_is_passed_on(rng, monkeypatch):
    def refuse(self, **_):
        raise BufferError("not today")

    monkeypatch.setattr(Foreign, "__dlpack__", refuse)
    odd = Foreign(problem(rng)["q"])
    text = "gated_delta_rule: q must be exported through DLPack; got this refusal: not today"
    with pytest.raises(TypeError, match=text):
        cupy_gdelta.gated_delta_rule(odd, odd, odd)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(Foreign, "__dlpack_device__", lambda self: (2, 1))
    text = "q must lie on the CPU where CuPy cannot be imported; got CUDA device 1"
    with pytest.raises(TypeError, match=text):
        cupy_gdelta.gated_delta_rule(odd, odd, odd)


# what is offered


@pytest.mark.parametrize("version", [None, (1, 0), (1, 1), (2, 0)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_an_export_is_read_back(dtype, version):
    x = np.arange(24, dtype="uint16" if dtype == "bfloat16" else dtype).reshape(2, 3, 4)
    offer = Foreign(dlpack.Export(x, dtype))
    capsule = offer.inner.__dlpack__(max_version=version)
    assert ("versioned" in repr(capsule)) == (version is not None)
    offer.__class__ = type("Once", (Foreign,), {"__dlpack__": lambda self, **_: capsule})
    array, name = dlpack.read(offer)
    assert name == dtype
    assert np.shares_memory(array, x)
    assert array.strides == x.strides


def test_an_export_of_nothing_keeps_its_shape():
    array, dtype = dlpack.read(dlpack.Export(np.empty((2, 0, 3), np.uint16), "bfloat16"))
    assert (array.shape, dtype) == ((2, 0, 3), "bfloat16")


def test_X10_an_export_can_be_a_copy():
    x = np.arange(3.0)
    offer = Foreign(dlpack.Export(x, "float64"))
    capsule = offer.inner.__dlpack__(copy=True)
    offer.__class__ = type("Once", (Foreign,), {"__dlpack__": lambda self, **_: capsule})
    array, _ = dlpack.read(offer)
    assert not np.shares_memory(array, x)
    assert np.array_equal(array, x)


def test_an_export_stays_on_the_cpu():
    export = dlpack.Export(np.zeros(3), "float64")
    assert export.__dlpack_device__() == (1, 0)
    assert export.__dlpack__(dl_device=(1, 0)) is not None
    with pytest.raises(BufferError):
        export.__dlpack__(dl_device=(2, 0))


def test_a_consumer_that_refuses_bfloat16_raises_its_own_error():
    """The capsule dies while that error is on its way."""
    with pytest.raises((BufferError, RuntimeError, TypeError), match=r"(?i)type"):
        np.from_dlpack(dlpack.Export(np.zeros(3, np.uint16), "bfloat16"))


# whose memory


class Counted(np.ndarray):
    """A NumPy array that a weak reference can watch."""


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_an_exported_array_lives_as_long_as_its_consumer(version):
    x = np.arange(1000.0).view(Counted)
    gone = weakref.ref(x)
    offer = Foreign(dlpack.Export(x, "float64"))
    capsule = offer.inner.__dlpack__(max_version=version)
    offer.__class__ = type("Once", (Foreign,), {"__dlpack__": lambda self, c=capsule, **_: c})
    array, _ = dlpack.read(offer)
    view = array[10:20]
    del x, offer, array, capsule
    gc.collect()
    assert gone() is not None
    assert view[0] == 10
    del view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_an_exported_array_dies_with_a_capsule_that_nobody_took(version):
    x = np.zeros(3, np.uint16).view(Counted)
    gone = weakref.ref(x)
    capsule = dlpack.Export(x, "bfloat16").__dlpack__(max_version=version)
    del x
    assert gone() is not None
    del capsule
    assert gone() is None


@pytest.mark.parametrize("layout", [dlpack._Managed, dlpack._ManagedVersioned])
def test_the_producers_deleter_is_called_once_when_the_last_view_dies(layout):
    calls = []
    delete = dlpack._Deleter(calls.append)
    data, shape = np.arange(6, dtype="float32"), (ct.c_int64 * 2)(2, 3)
    managed = layout(deleter=delete)
    if layout is dlpack._ManagedVersioned:
        managed.major = 1
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.ndim, tensor.shape = data.ctypes.data, 1, 2, shape
    tensor.code, tensor.bits, tensor.lanes = 2, 32, 1
    new = ct.pythonapi.PyCapsule_New
    new.argtypes, new.restype = [ct.c_void_p, ct.c_char_p, ct.c_void_p], ct.py_object
    name = dict(zip(dlpack._LAYOUTS.values(), dlpack._LAYOUTS, strict=True))[layout]

    class Producer:
        def __dlpack__(self, **_):
            return new(ct.addressof(managed), name, None)

    array, _ = dlpack.read(Producer())
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    part = array[1:]
    del array
    assert calls == []
    del part
    assert calls == [ct.addressof(managed)]

    tensor.lanes = 4  # refused, and given back all the same
    with pytest.raises(TypeError, match="must have a dtype that NumPy has; got float32 x 4"):
        dlpack.read(Producer())
    assert len(calls) == 2
    tensor.lanes, tensor.bits = 1, 24
    with pytest.raises(TypeError, match="must have a dtype that NumPy has; got float24 x 1"):
        dlpack.read(Producer())
    assert len(calls) == 3
    if layout is dlpack._ManagedVersioned:
        managed.major = 2
        with pytest.raises(BufferError, match=r"must speak DLPack 1; got version 2\.0"):
            dlpack.read(Producer())


def test_results_hold_no_memory_of_the_inputs(strict, rng):
    p = {n: strict.asarray(x) for n, x in problem(rng).items()}
    y = cupy_gdelta.gated_delta_rule(**p)
    gone = [weakref.ref(x) for x in p.values()]
    del p
    gc.collect()
    assert [x() for x in gone] == [None] * len(gone)
    assert np.isfinite(host(y)).all()


END = """
    import sys
    import numpy as np
    import cupy_gdelta
    from cupy_gdelta import dlpack

    sys.kept = [dlpack.read(dlpack.Export(np.zeros(3, np.uint16), "bfloat16"))]
"""
WITH_STRICT = """
    import array_api_strict as strict

    x = strict.ones((1, 3, 1, 4))
    sys.kept += [cupy_gdelta.gated_linear_attention(x, x, x)]
"""
WITH_TORCH = """
    import torch

    bits = np.zeros(3, np.uint16)
    sys.kept += [torch.from_dlpack(dlpack.Export(bits, "bfloat16")), dlpack.read(torch.ones(3))]
    torch.kept = sys.kept
"""


@pytest.mark.parametrize(
    ("library", "code"), [("numpy", ""), ("array_api_strict", WITH_STRICT), ("torch", WITH_TORCH)]
)
def test_results_that_live_to_the_end_of_the_process(library, code):
    pytest.importorskip(library)
    python(END + code)
