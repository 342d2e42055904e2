"""Reported faults (see test_cases.py): torch, streams, threads, devices, graphs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from compare import check, host
from conftest import GPU_FAMILIES, Family, python

import cupy_gdelta
from cupy_gdelta import accuracy

FUNCTIONS = {
    "linear": cupy_gdelta.gated_linear_attention,
    "delta": cupy_gdelta.gated_delta_rule,
}
RULES = pytest.mark.parametrize("rule", FUNCTIONS)
TORCH = pytest.mark.parametrize("name", ["torch", GPU_FAMILIES[1]])
GPU = pytest.mark.parametrize("name", GPU_FAMILIES)


def problem(rng, **sizes):
    return accuracy.inputs(rng, **{"B": 2, "T": 130, "H": 2, "K": 24, "V": 24} | sizes)


# torch


@TORCH
@RULES
def test_X01_a_tensor_that_requires_grad(name, rule, rng):
    """Such a tensor cannot be exported, or comes back without its gradient (cupy/cupy#7144)."""
    torch = pytest.importorskip("torch")
    function, p = FUNCTIONS[rule], Family(name).arrays(problem(rng), "float32")
    expected = function(**p)
    for argument in p:
        for x in (p[argument].clone().requires_grad_(), torch.nn.Parameter(p[argument])):
            y = function(**p | {argument: x})
            assert torch.equal(y, expected)
            y.sum().backward()
            assert x.grad.shape == x.shape
            assert x.grad.isfinite().all()
            assert x.grad.any()
            with torch.no_grad():
                y = function(**p | {argument: x})
            assert torch.equal(y, expected)
            assert not y.requires_grad
            assert torch.equal(function(**p | {argument: x.detach()}), expected)
            text = f"{function.__name__}: {argument} must not require grad where out is given"
            with pytest.raises(TypeError, match=text):
                function(**p | {argument: x}, out=torch.empty_like(expected))

    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            return function(**p | {"v": v})

        @staticmethod
        def backward(ctx, dy):
            return dy

    y = Mine.apply(p["v"].clone().requires_grad_())
    assert torch.equal(y, expected)
    assert y.requires_grad
    out = torch.zeros_like(expected).requires_grad_()
    with pytest.raises(ValueError, match="out must not require grad"):
        function(**p, out=out)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, at the first dual tensor
def test_X01_a_tensor_with_a_forward_derivative(rng):
    torch = pytest.importorskip("torch")
    p = Family("torch").arrays(problem(rng), "float32")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(p["q"], torch.ones_like(p["q"]))
        with pytest.raises(TypeError, match="q must not require grad"):
            cupy_gdelta.gated_delta_rule(**p | {"q": dual})
        assert torch.isfinite(cupy_gdelta.gated_delta_rule(**p)).all()


@TORCH
@pytest.mark.parametrize("absent", [False, True])
def test_X02_bfloat16_with_and_without_ml_dtypes(name, absent):
    """bfloat16 through DLPack crashed, or was no known type (cupy/cupy#8801, #7527, #9480)."""
    pytest.importorskip("torch")
    code = f"""
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name == "ml_dtypes":
                    raise ModuleNotFoundError(name)

        if {absent}:
            sys.meta_path.insert(0, Absent())
        import torch
        import cupy_gdelta

        x = torch.ones(1, 3, 1, 4, dtype=torch.bfloat16, device={name[6:] or "cpu"!r}) / 2
        gate = torch.ones(1, 3, 1, device=x.device)
        try:
            y = cupy_gdelta.gated_linear_attention(x, x, x, gate)
        except (ImportError, TypeError) as error:
            print(error)
        else:
            assert y.dtype == torch.bfloat16 and y.device == x.device
            print(y[0, :, 0, 0].tolist())
    """
    assert python(code) == "[0.5, 1.0, 1.5]\n"


# streams, threads and devices


@GPU
@RULES
def test_X03_data_made_on_the_callers_stream(name, rule, rng):
    """The kernel ran on stream 0, before the data was there (cudnn-frontend PR#483)."""
    import cupy

    family = Family(name)
    p = family.arrays(problem(rng), "float32")
    fresh, y, function = p["q"] + 0, None, FUNCTIONS[rule]
    expected = host(function(**p, return_state=True)[0])  # and everything is compiled
    code = 'extern "C" __global__ void spin(long long n) {\n'
    code += "long long start = clock64(); while (clock64() - start < n) {} }"
    spin = cupy.RawKernel(code, "spin")
    if name == "cupy":
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    else:
        torch = pytest.importorskip("torch")
        streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(20):
        p["q"][...] = float("nan")
        cupy.cuda.Device().synchronize()
        stream = streams[i % 2]
        if name == "cupy":
            with stream:
                spin((1,), (1,), (np.int64(20_000_000),))
                p["q"][...] = fresh
                y = function(**p).get(stream=stream)
        else:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                p["q"].copy_(fresh)
                y = function(**p).cpu()
        assert np.array_equal(host(y), expected), f"call {i}"


@RULES
@pytest.mark.parametrize("streams", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_X06_threads(rule, streams, rng):
    """Threads shared what belonged to one of them (cupy/cupy#5069, triton#11494)."""
    family = Family("cupy" if streams else "numpy")
    problems = [family.arrays(problem(rng, T=100 + i), "float32") for i in range(8)]
    expected = [FUNCTIONS[rule](**p) for p in problems]
    barrier = threading.Barrier(8)

    def work(p):
        barrier.wait()
        if not streams:
            return [FUNCTIONS[rule](**p) for _ in range(10)]
        import cupy

        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            ys = [FUNCTIONS[rule](**p) for _ in range(10)]
            stream.synchronize()
        return ys

    with ThreadPoolExecutor(8) as pool:
        for ys, y in zip(pool.map(work, problems), expected, strict=True):
            assert all(np.array_equal(host(x), host(y)) for x in ys)


@pytest.mark.gpu
def test_X06_threads_with_streams_of_their_own_and_a_cold_cache(tmp_path):
    code = """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        import cupy
        import cupy_gdelta

        barrier = threading.Barrier(8)

        def work(i):
            barrier.wait()
            x = cupy.full((1, 33, 2, 24), 1 / 8, "float32")
            y = cupy_gdelta.gated_delta_rule(x, x, x)
            return y.get().tobytes()

        with ThreadPoolExecutor(8) as pool:
            print(len(set(pool.map(work, range(8)))))
    """
    environment = {"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1", "CUPY_CACHE_DIR": str(tmp_path)}
    assert python(code, **environment) == "1\n"


@pytest.mark.gpu
@RULES
def test_M01_arrays_on_a_device_that_is_not_the_current_one(rule, rng):
    """Wrong numbers, or the caller's current device was changed (cupy/cupy#3193, #5795)."""
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA devices")
    p = problem(rng)
    here = Family("cupy").arrays(p, "float32")
    with cupy.cuda.Device(1):
        there = Family("cupy").arrays(p, "float32")
    y, state = check(rule, FUNCTIONS[rule], there, "float32")
    assert (y.device.id, state.device.id, cupy.cuda.Device().id) == (1, 1, 0)
    with cupy.cuda.Device(1):
        again, _ = check(rule, FUNCTIONS[rule], here, "float32")
        assert (again.device.id, cupy.cuda.Device().id) == (0, 1)
    assert np.array_equal(host(y), host(again))
    with pytest.raises(TypeError, match="v must be a CuPy array on CUDA device 0, as q is; got a"):
        FUNCTIONS[rule](**here | {"v": there["v"]})
    assert cupy.cuda.Device().id == 0
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        p = {n: x.to("cuda:1") for n, x in Family("torch").arrays(p, "float32").items()}
        y, _ = check(rule, FUNCTIONS[rule], p, "float32")
        assert y.device.index == 1
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@RULES
@pytest.mark.parametrize("K", [24, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_R01_the_same_bits_a_hundred_times(rule, K, dtype, rng):
    """A missing barrier changed results from run to run (fla#889, fla#945, flash-attention#359)."""
    p = Family("cupy").arrays(problem(rng, K=K, V=K, H=4, gate="one"), dtype)
    first = check(rule, FUNCTIONS[rule], p, dtype)
    for _ in range(100):
        for a, b in zip(FUNCTIONS[rule](**p, return_state=True), first, strict=True):
            assert np.array_equal(host(a), host(b))


# graphs


@pytest.mark.gpu
@RULES
@pytest.mark.parametrize("packed", [False, True])
def test_E01_a_cupy_graph_follows_new_inputs(rule, packed, rng):
    """Capture failed on a copy to the host, an allocation or stream 0 (Megatron-LM PR#6796)."""
    import cupy

    family = Family("cupy")
    p = family.arrays(problem(rng, B=1), "float32")
    out = cupy.zeros(p["v"].shape, "float32")
    options = {"cu_seqlens": cupy.array([0, 40, 130])} if packed else {}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        FUNCTIONS[rule](**p, **options, out=out)
        stream.begin_capture()
        FUNCTIONS[rule](**p, **options, out=out)
        graph = stream.end_capture()
    for i in range(3):
        new = family.arrays(problem(rng, B=1), "float32")
        if packed:
            options["cu_seqlens"][1] = 50 + i
        cupy.cuda.Device().synchronize()
        with stream:
            for name, x in new.items():
                p[name][...] = x
            graph.launch(stream)
        stream.synchronize()
        y, _ = check(rule, FUNCTIONS[rule], new, "float32", **options)
        assert np.array_equal(host(out), host(y)), f"replay {i}"


@pytest.mark.gpu
@RULES
def test_E01_a_torch_graph_follows_new_inputs(rule, rng):
    torch = pytest.importorskip("torch")
    family = Family("torch-cuda")
    p = family.arrays(problem(rng), "bfloat16")
    FUNCTIONS[rule](**p, return_state=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, state = FUNCTIONS[rule](**p, return_state=True)
    for i in range(3):
        new = family.arrays(problem(rng), "bfloat16")
        for name, x in new.items():
            p[name].copy_(x)
        graph.replay()
        expected = check(rule, FUNCTIONS[rule], new, "bfloat16")
        assert torch.equal(y, expected[0]), f"replay {i}"
        assert torch.equal(state, expected[1]), f"replay {i}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"cu_seqlens": [0, 7, 8, 31, 130]}], ids=["cold", "offsets"]
)
def test_E01_what_cannot_be_captured_says_so_and_leaves_the_capture_whole(options):
    code = f"""
        import cupy
        import cupy_gdelta

        x = cupy.full((1, 130, 2, 24), 1 / 8, "float32")
        out, options = cupy.zeros_like(x), {options}
        if options:
            cupy_gdelta.gated_delta_rule(x, x, x, cu_seqlens=[0, 130], out=out)
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                cupy_gdelta.gated_delta_rule(x, x, x, **options, out=out)
            except RuntimeError as error:
                print("call once" in str(error))
            stream.end_capture()
            cupy_gdelta.gated_delta_rule(x, x, x, **options, out=out)
        stream.synchronize()
        print(bool(cupy.isfinite(out).all()))
    """
    assert python(code) == "True\nTrue\n"
