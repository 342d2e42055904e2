"""Arrays of every family in, arrays of the same family out."""

from __future__ import annotations

import numpy as np
import pytest
from compare import host
from conftest import python

import cupy_gdelta
from cupy_gdelta import accuracy, arrays

DTYPES = ("float16", "bfloat16", "float32", "float64")


def problem(rng, **sizes):
    return accuracy.inputs(rng, **{"B": 2, "T": 7, "H": 2, "K": 4, "V": 3} | sizes)


# NumPy


def test_numpy_view_is_the_array_itself():
    x = np.arange(24, dtype="float32").reshape(2, 3, 4)[:, ::-1, ::2]
    view = arrays.take(x)
    assert view.owner is x
    assert np.shares_memory(view.array, x)
    assert (view.family, view.device, view.where) == ("numpy", -1, "on the CPU")
    assert (view.shape, view.strides, view.dtype) == ((2, 3, 2), (12, -4, 2), "float32")
    assert not any((view.readonly, view.copied, view.needs_grad))


def test_numpy_bfloat16_is_carried_as_its_bits():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array([1, -2], ml_dtypes.bfloat16)
    for y in (x, x.astype(x.dtype.newbyteorder(">"))):
        view = arrays.take(y)
        assert (view.dtype, view.array.dtype) == ("bfloat16", np.uint16)
        assert view.array.tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize("what", ["big-endian", "unaligned", "field"])
def test_what_numpy_alone_can_address_is_copied_once(what):
    x = np.arange(6, dtype="float32").reshape(2, 3)
    if what == "big-endian":
        odd = x.astype(">f4")
    elif what == "unaligned":
        odd = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view("float32").reshape(2, 3)
    else:
        odd = np.zeros((2, 3), [("a", "u1"), ("x", "f4")])["x"]
        odd[...] = x
    view = arrays.take(odd)
    assert view.copied
    assert view.array.flags.aligned
    assert view.array.dtype == np.float32
    assert view.array.dtype.isnative
    assert np.array_equal(view.array, x)


def test_a_broadcast_array_is_read_only_and_gives_no_warning():
    wide, _ = np.broadcast_arrays(np.zeros((1, 3)), np.zeros((2, 3)))
    assert arrays.take(wide).strides == (0, 1)
    view = arrays.take(np.broadcast_to(np.zeros(3), (2, 3)))
    assert view.strides == (0, 1)
    assert view.readonly


def test_subclasses_of_numpy_arrays_are_arrays(tmp_path, rng):
    p = problem(rng)
    y = cupy_gdelta.gated_delta_rule(**p)
    for name, x in p.items():
        np.save(tmp_path / f"{name}.npy", x)
    mapped = {n: np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in p}
    result = cupy_gdelta.gated_delta_rule(**mapped)
    assert type(result) is np.ndarray
    assert np.array_equal(result, y)
    out = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", y.dtype, y.shape)
    assert cupy_gdelta.gated_delta_rule(**mapped, out=out) is out
    out.flush()
    assert np.array_equal(np.load(tmp_path / "y.npy"), y)


def test_overlap():
    x = np.zeros((4, 4), np.float32)
    a, b, c = (arrays.take(y) for y in (x[:2], x[1:], x[2:]))
    assert a.overlaps(b)
    assert not a.overlaps(c)
    assert arrays.take(x[::-1]).overlaps(a)
    assert not arrays.take(x[:0]).overlaps(a)
    assert not arrays.take(x.copy()).overlaps(a)


def test_extent_counts_negative_and_zero_strides():
    def extent(shape, strides, ptr=1000):
        return arrays.View(None, "cupy", 0, None, shape, strides, "float32", ptr).extent

    assert extent((2, 3), (3, 1)) == (1000, 1024)
    assert extent((2, 3), (-3, 1)) == (988, 1012)
    assert extent((2, 3), (0, 2)) == (1000, 1020)
    assert extent((0, 3), (3, 1)) == (1000, 1000)
    assert extent((2**40, 2**30), (2**30, 1)) == (1000, 1000 + 2**72)


# torch


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_torch_view_on_the_cpu_shares_the_memory(torch):
    x = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 1)[:, :, ::2]
    view = arrays.take(x)
    assert view.owner is x
    assert (view.family, view.device, view.kind) == ("torch", -1, "a torch tensor on the CPU")
    assert (view.shape, view.strides, view.dtype) == ((3, 2, 2), (4, 12, 2), "float32")
    view.array[1, 1, 1] = -7
    assert x[1, 1, 1] == -7


def test_torch_bfloat16_is_carried_as_its_bits(torch):
    view = arrays.take(torch.tensor([1, -2], dtype=torch.bfloat16))
    assert view.dtype == "bfloat16"
    assert view.array.tolist() == [0x3F80, 0xC000]


def test_torch_memory_lives_as_long_as_the_view(torch):
    array = arrays.take(torch.arange(100_000.0)).array
    torch.zeros(100_000)
    assert array[-1] == 99_999


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "float8_e4m3fn"])
def test_torch_dtypes_that_are_not_computed_with_are_named(torch, dtype, rng):
    p = {n: torch.tensor(x) for n, x in problem(rng).items()}
    p["k"] = torch.zeros(p["k"].shape, dtype=getattr(torch, dtype))
    text = f"k must have dtype float64 for q of float64; got {dtype}"
    with pytest.raises(TypeError, match=text):
        cupy_gdelta.gated_delta_rule(**p)


def test_torch_lazy_negatives_are_read_right_and_refused_as_out(torch, rng):
    p = {n: torch.tensor(x) for n, x in problem(rng).items()}
    expected = cupy_gdelta.gated_delta_rule(**p)
    lazy = torch.complex(torch.zeros_like(p["v"]), -p["v"]).conj().imag
    assert lazy.is_neg()
    assert torch.equal(cupy_gdelta.gated_delta_rule(**p | {"v": lazy}), expected)
    with pytest.raises(ValueError, match="out must be aligned and in native byte order"):
        cupy_gdelta.gated_delta_rule(**p, out=lazy)


def unsupported(torch):
    x = torch.zeros(2, 7, 2, 4)
    yield x.to_sparse(), "must be a strided torch tensor .*; got layout sparse_coo on cpu"
    yield x.to("meta"), "must be a strided torch tensor .*; got layout strided on meta"
    nested = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
    yield nested, "must be a strided torch tensor .*; got layout nested on cpu"
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        yield mode.from_tensor(x), "must be a torch tensor with memory of its own; got FakeTensor"


@pytest.mark.filterwarnings("ignore")
def test_torch_tensors_without_plain_memory_are_refused(torch):
    x = torch.zeros(2, 7, 2, 4)
    for odd, text in unsupported(torch):
        with pytest.raises(TypeError, match=f"gated_delta_rule: q {text}"):
            cupy_gdelta.gated_delta_rule(odd, x, x)
    for transform in (torch.vmap, lambda f: torch.func.grad(lambda q: f(q).sum())):
        with pytest.raises(TypeError, match="q must be a torch tensor with memory of its own"):
            transform(lambda q: cupy_gdelta.gated_delta_rule(q, x, x))(x[None])


def test_torch_subclasses_and_inference_tensors(torch, rng):
    p = {n: torch.tensor(x) for n, x in problem(rng).items()}
    expected = cupy_gdelta.gated_delta_rule(**p)

    class Mine(torch.Tensor):
        pass

    y = cupy_gdelta.gated_delta_rule(**p | {"v": p["v"].as_subclass(Mine)})
    assert torch.equal(y, expected)
    frozen = torch.nn.Parameter(p["v"], requires_grad=False)
    assert torch.equal(cupy_gdelta.gated_delta_rule(**p | {"v": frozen}), expected)
    with torch.inference_mode():
        inside = {n: x.clone() for n, x in p.items()}
        out = torch.empty_like(expected)
        assert torch.equal(cupy_gdelta.gated_delta_rule(**inside, out=out), expected)
    assert torch.equal(cupy_gdelta.gated_delta_rule(**inside, out=out), expected)


def test_autograd_sees_that_out_was_written(torch, rng):
    p = {n: torch.tensor(x) for n, x in problem(rng).items()}
    out, weight = torch.zeros_like(p["v"]), torch.ones_like(p["v"]).requires_grad_()
    loss = (weight * out).sum()
    cupy_gdelta.gated_delta_rule(**p, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# families


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_come_in_the_family_device_and_dtype_of_the_inputs(family, dtype, rng):
    p = family.arrays(problem(rng), dtype)
    for function in (cupy_gdelta.gated_linear_attention, cupy_gdelta.gated_delta_rule):
        y, state = function(**p, return_state=True)
        assert type(y) is type(state) is type(p["v"])
        assert (y.dtype, y.shape) == (p["v"].dtype, p["v"].shape)
        assert (state.dtype, tuple(state.shape)) == (p["gate"].dtype, (2, 2, 4, 3))
        for x in (y, state):
            assert x.device == p["v"].device
            view = arrays.take(x)
            assert view.strides == tuple(int(np.prod(x.shape[i + 1 :])) for i in range(4))
            assert not view.readonly


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_X04_negative_strides_in_positive_strides_out(family, axis, rng):
    """Negative strides were handed on to a library that aborts on them (cupy/cupy#10172, #5665)."""
    p = problem(rng)
    flipped = {n: np.flip(x, axis).copy() if axis < x.ndim else x for n, x in p.items()}
    expected = cupy_gdelta.gated_delta_rule(**flipped)
    views = family.arrays(p, "float64")
    if family.name.startswith("torch"):
        views = {n: x.flip(axis) if axis < x.ndim else x for n, x in views.items()}
    else:
        turn = (slice(None),) * axis + (slice(None, None, -1),)
        views = {n: x[turn] if axis < x.ndim else x for n, x in views.items()}
        assert arrays.take(views["q"]).strides[axis] < 0
    y = cupy_gdelta.gated_delta_rule(**views)
    assert accuracy.error(host(y), expected) < 1e-13
    assert min(arrays.take(y).strides) > 0


# processes


def test_E04_import_touches_neither_libraries_nor_devices():
    """An import that starts CUDA breaks forked children (cupy PR#3341, inducer/pycuda#137)."""
    code = """
        import sys
        import cupy_gdelta
        print({"cupy", "torch", "ml_dtypes", "cuda"} & set(sys.modules))
    """
    assert python(code) == "set()\n"


def test_E04_a_forked_child_computes():
    """Fork after the import, and after a first call."""
    code = """
        import os
        import warnings
        import numpy as np
        import cupy_gdelta

        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
        x = np.ones((1, 100, 2, 8), np.float32) / 8
        y = None
        for _ in range(2):
            child = os.fork()
            if child == 0:
                z = cupy_gdelta.gated_delta_rule(x, x, x)
                os._exit(0 if y is None or np.array_equal(y, z) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            y = cupy_gdelta.gated_delta_rule(x, x, x)
        print(y.shape)
    """
    assert python(code) == "(1, 100, 2, 8)\n"


@pytest.mark.gpu
def test_E04_a_forked_child_computes_where_the_parent_only_imported_cupy():
    code = """
        import os
        import warnings
        import cupy
        import cupy_gdelta

        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            x = cupy.ones((1, 100, 2, 8), "float32") / 8
            y = cupy_gdelta.gated_delta_rule(x, x, x)
            os._exit(0 if float(y.sum()) > 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    python(code)
