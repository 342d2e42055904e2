"""Steps of a known form: addresses followed, everything else noticed, and what a call costs.

Without a GPU: CuPy arrays over memory of the CPU, and kernels run by the host harness.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compare import REFERENCE, assert_close, host
from conftest import Family
from host import simt

import cupy_gdelta
from cupy_gdelta import accuracy, arrays

cupy = pytest.importorskip("cupy")

from posed import needs_compiler  # noqa: E402

from cupy_gdelta import gpu, step  # noqa: E402
from cupy_gdelta.gpu import loader, repeat  # noqa: E402

SOURCE = loader.folder() / "step.cu"
STEPS = {
    "linear": cupy_gdelta.gated_linear_attention_step,
    "delta": cupy_gdelta.gated_delta_rule_step,
}


class Stream:
    ptr = 0

    def is_capturing(self):
        return False


def seen_by_cupy(x: np.ndarray) -> Any:
    """A CuPy array over the memory of a NumPy array, on device 0."""
    memory = cupy.cuda.UnownedMemory(x.ctypes.data, max(x.nbytes, 1), x, 0)
    return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0), strides=x.strides)


class Device:
    """Runs kernels on the CPU, and counts calls that were checked and prepared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.prepared, self.launches, self.functions = 0, 0, [], []
        self.computes = True
        plain = gpu.step.prepare

        def prepare(*given: Any) -> Any:
            self.prepared += 1
            return plain(*given)

        def empty(like: Any, shape: tuple, dtype: str) -> arrays.View:
            return arrays.take(self.empty(shape, dtype))

        monkeypatch.setattr(gpu.step, "prepare", prepare)
        monkeypatch.setattr(loader, "kernel", self.kernel)
        monkeypatch.setattr(gpu.step, "_launch", self.launch)
        monkeypatch.setattr(gpu, "_on", lambda x: contextlib.nullcontext())
        monkeypatch.setattr(gpu, "limits", lambda device: (132, 1 << 17))
        monkeypatch.setattr(cupy.cuda, "get_current_stream", Stream)
        monkeypatch.setattr(repeat, "_current_stream", Stream)
        monkeypatch.setattr(repeat.runtime, "getDevice", lambda: self.current)
        monkeypatch.setattr(repeat, "_empty", self.empty)
        monkeypatch.setattr(repeat, "_known", {})
        monkeypatch.setattr(step, "_repeat", {})
        monkeypatch.setattr(arrays, "empty", empty)

    def empty(self, shape: tuple, dtype: Any) -> Any:
        return seen_by_cupy(np.empty(shape, dtype))

    def kernel(self, stem: str, expression: str, device: int, shared_bytes: int) -> Any:
        kernels = simt.Kernels(SOURCE, [expression])

        def function(grid, threads, shared, struct) -> None:
            assert shared <= shared_bytes
            self.launches.append(struct)
            if self.computes:
                value = np.frombuffer(struct, np.dtype((np.void, len(struct))))[0]
                kernels.launch(expression, grid, threads, shared, [value])

        self.functions.append(function)
        found = types.SimpleNamespace(ptr=len(self.functions) - 1)
        return types.SimpleNamespace(kernel=found)

    def launch(self, function, *how) -> None:
        *sizes, shared, stream, parameters, extra = how
        assert (stream, extra) == (Stream.ptr, 0)
        at = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        struct = ctypes.string_at(at, gpu.step.BYTES)
        self.functions[function](tuple(sizes[:3]), sizes[3], shared, struct)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def problem(rng, **sizes):
    p = accuracy.inputs(rng, **{"B": 2, "T": 1, "H": 4, "Hq": 2, "K": 8, "V": 8} | sizes)
    return {n: a.astype("float32") for n, a in p.items()}


def one_step(rule, p, state, **options):
    """y of a step on stand-ins for CuPy arrays; the state is updated."""
    held = {n: a if a is None else np.array(a) for n, a in p.items()}
    x = {n: a if a is None else seen_by_cupy(a) for n, a in held.items()}
    y = STEPS[rule](**x, state=seen_by_cupy(state), **options)
    return on_host(y).copy()


def on_host(x: Any) -> np.ndarray:
    """The memory of a stand-in, as NumPy sees it."""
    interface = {
        "data": (x.data.ptr, False),
        "shape": x.shape,
        "strides": x.strides,
        "typestr": x.dtype.str,
        "version": 3,
    }
    return np.asarray(type("Memory", (), {"__array_interface__": interface})())


@needs_compiler
@pytest.mark.parametrize("rule", STEPS)
def test_addresses_are_followed(rule, device, rng):
    for i in range(4):
        p = problem(rng)
        state = rng.standard_normal((2, 4, 8, 8)).astype("float32")
        before = state.copy()
        y = one_step(rule, p, state)
        expected = REFERENCE[rule](**p, initial_state=before)
        assert_close(y, expected[0], 5e-6, f"call {i} y")
        assert_close(state, expected[1], 5e-6, f"call {i} state")
    assert device.prepared == 1
    assert len(device.launches) == 4


def test_every_other_form_is_noticed(device, rng):
    """What checks or the launch depend on makes another form; the rest does not."""
    device.computes = False
    p, state = problem(rng, T=2, V=12), np.zeros((9, 4, 8, 12), np.float32)
    out, seen = np.zeros((2, 2, 4, 12), np.float32), np.zeros((2, 2, 4, 8, 12), np.float32)
    odd = np.zeros(state.size + 1, np.float32)[1:].reshape(state.shape)
    wide = np.zeros((9, 4, 8, 24), np.float32)[..., :12]
    gate, rows = p["gate"], np.array([0, 1])
    one = {n: np.ascontiguousarray(a[:, :1]) for n, a in p.items()}
    forms = [
        ({}, {}),
        ({"state": state[:2]}, {"state_indices": None}),
        ({"gate": None}, {}),
        ({"beta": None}, {}),
        ({"gate": None}, {"log_gate": gate}),
        (one, {}),
        ({n: a[:, 0] for n, a in one.items()}, {}),
        ({"q": np.repeat(p["q"], 2, 2), "k": np.repeat(p["k"], 2, 2)}, {}),
        ({"v": p["v"][..., ::-1]}, {}),
        ({"state": odd}, {}),
        ({"state": wide}, {}),
        ({"state": state.astype("float16")}, {}),
        ({}, {"scale": 0.5}),
        ({}, {"qk_l2norm": True}),
        ({}, {"out": out}),
        ({}, {"states_out": seen}),
        ({}, {"state_indices": rows.astype("int32")}),
        ({}, {"state_indices": np.repeat(rows, 2)[::2]}),
    ]
    for known, (changes, options) in enumerate(forms):
        for again in range(3):
            x = {
                n: a if a is None else aligned(a)
                for n, a in (p | {"state": state} | changes).items()
            }
            if "state" in changes:
                x["state"] = changes["state"]
            some = {"state_indices": rows} | options
            some = {n: seen_by_cupy(a) if isinstance(a, np.ndarray) else a for n, a in some.items()}
            x = {n: a if a is None else seen_by_cupy(a) for n, a in x.items()}
            cupy_gdelta.gated_delta_rule_step(**x, **some)
            assert device.prepared == known + 1, (known, again)
            assert len(device.launches) == 3 * known + again + 1


def aligned(x: np.ndarray) -> np.ndarray:
    """The same values and strides elsewhere, at a multiple of 64 bytes."""
    base = x.base if x.base is not None and x.strides != np.empty(x.shape, x.dtype).strides else x
    if base is x:
        memory = np.zeros(x.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        copy[...] = x
        return copy
    return x


def test_equal_numbers_are_one_form(device, rng):
    device.computes = False
    p, state = problem(rng), np.zeros((2, 4, 8, 8), np.float32)
    for scale in (2, 2.0, np.float64(2), np.float32(2)):
        one_step("delta", p, state, scale=scale)
    assert device.prepared == 1
    one_step("delta", p, state, scale=np.array(2.0))  # cannot be hashed
    assert device.prepared == 2
    with pytest.raises(TypeError, match="scale must be a real number; got bool"):
        one_step("delta", p, state, scale=True)
    one_step("delta", p, state)
    with pytest.raises(TypeError, match="scale must be a real number; got bool"):
        one_step("delta", p, state, scale=True)
    with pytest.raises(TypeError, match="qk_l2norm must be True or False; got int"):
        one_step("delta", p, state, qk_l2norm=0)


def test_what_must_be_refused_at_any_address(device, rng):
    """Overlap depends on addresses: it is looked at in every call."""
    device.computes = False
    p = problem(rng, K=8, V=8)
    memory = np.zeros(10_000, np.float32)
    state = memory[1024 : 1024 + 512].reshape(2, 4, 8, 8)
    x = {n: seen_by_cupy(a) for n, a in p.items()}
    function = cupy_gdelta.gated_delta_rule_step
    function(**x, state=seen_by_cupy(state))
    for start in (1024 - 63, 1024, 1024 + 500, 1024 + 511):
        v = memory[start : start + 64].reshape(2, 1, 4, 8)
        with pytest.raises(ValueError, match="state must share no memory with v"):
            function(**x | {"v": seen_by_cupy(v)}, state=seen_by_cupy(state))
    for start in (1024 - 64, 1024 + 512):
        v = memory[start : start + 64].reshape(2, 1, 4, 8)
        function(**x | {"v": seen_by_cupy(v)}, state=seen_by_cupy(state))
    out = memory[5000:5064].reshape(2, 1, 4, 8)
    function(**x, state=seen_by_cupy(state), out=seen_by_cupy(out))
    with pytest.raises(ValueError, match="out must share no memory with state"):
        function(
            **x,
            state=seen_by_cupy(state),
            out=seen_by_cupy(state.reshape(-1)[:64].reshape(out.shape)),
        )


@needs_compiler
def test_out_that_overlaps_is_never_taken_for_one_that_does_not(device, rng, monkeypatch):
    p = problem(rng)
    monkeypatch.setattr(arrays, "fill", lambda x, y: np.copyto(on_host(x.array), on_host(y.array)))
    for order in ((True, False), (False, True, False)):
        repeat._known.clear()
        for overlapping in order:
            held = {n: a.copy() for n, a in p.items()}
            x = {n: seen_by_cupy(a) for n, a in held.items()}
            state = np.zeros((2, 4, 8, 8), np.float32)
            out = x["v"] if overlapping else seen_by_cupy(np.zeros((2, 1, 4, 8), np.float32))
            y = cupy_gdelta.gated_linear_attention_step(**x, state=seen_by_cupy(state), out=out)
            assert y is out
            expected = REFERENCE["linear"](**p)[0]
            assert_close(on_host(y), expected, 2e-6, f"overlapping {overlapping}")


def test_arrays_on_two_devices_are_refused_though_the_form_is_known(device, rng):
    device.computes = False
    p, state = problem(rng), np.zeros((2, 4, 8, 8), np.float32)
    one_step("delta", p, state)
    x = {n: seen_by_cupy(a) for n, a in p.items()}
    memory = cupy.cuda.UnownedMemory(p["gate"].ctypes.data, 64, p["gate"], 1)
    x["gate"] = cupy.ndarray(p["gate"].shape, "float32", cupy.cuda.MemoryPointer(memory, 0))
    with pytest.raises(TypeError, match="gate must be a CuPy array on CUDA device 0, as q is"):
        cupy_gdelta.gated_delta_rule_step(**x, state=seen_by_cupy(state))
    numpy = {n: seen_by_cupy(a) for n, a in p.items()} | {"gate": p["gate"]}
    with pytest.raises(TypeError, match="gate must be a CuPy array"):
        cupy_gdelta.gated_delta_rule_step(**numpy, state=seen_by_cupy(state))


def test_the_device_of_the_arrays_is_made_current(device, rng, monkeypatch):
    device.computes = False
    entered = []

    @contextlib.contextmanager
    def use(number):
        entered.append(number)
        yield

    monkeypatch.setattr(cupy.cuda, "Device", use)
    p, state = problem(rng), np.zeros((2, 4, 8, 8), np.float32)
    one_step("delta", p, state)
    one_step("delta", p, state)
    assert entered == []
    device.current = 1
    one_step("delta", p, state)
    assert entered == [0]
    assert device.prepared == 1


def test_a_capture_without_out_goes_the_long_way(device, rng, monkeypatch):
    device.computes = False
    p, state = problem(rng), np.zeros((2, 4, 8, 8), np.float32)
    one_step("delta", p, state)
    monkeypatch.setattr(Stream, "ptr", 7)
    monkeypatch.setattr(Stream, "is_capturing", lambda self: True)
    monkeypatch.setattr(repeat.runtime, "streamIsCapturing", lambda ptr: ptr == 7)
    monkeypatch.setattr(gpu, "_captured", [])
    one_step("delta", p, state)
    assert device.prepared == 2
    assert len(gpu._captured) == 1  # y outlives the graph


def test_threads_do_not_share_arguments(device, rng, monkeypatch):
    """Each launch in flight has a struct of its own."""
    device.computes = False
    p, state = problem(rng), np.zeros((2, 4, 8, 8), np.float32)
    one_step("delta", p, state)
    (form,) = repeat._known.values()
    inside, seen = threading.Barrier(4), []

    def launch(*how):
        inside.wait()
        at = ctypes.cast(how[-2], ctypes.POINTER(ctypes.c_void_p))[0]
        seen.append((at, ctypes.string_at(at, 8)))

    monkeypatch.setattr(gpu.step, "_launch", launch)
    form.launch._spare.clear()
    threads = [threading.Thread(target=form.launch, args=([i] * 9, 0)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({address for address, _ in seen}) == 4
    assert sorted(first for _, first in seen) == [i.to_bytes(8, "little") for i in range(4)]


class DriverError(RuntimeError):
    status = 201  # CUDA_ERROR_INVALID_CONTEXT


def test_a_thread_without_a_context_gets_one(device, rng, monkeypatch):
    p, state = problem(rng), np.zeros((2, 4, 8, 8), np.float32)
    plain, asked = gpu.step._launch, []

    def launch(*how):
        if not asked:
            raise DriverError
        plain(*how)

    monkeypatch.setattr(gpu.step, "_launch", launch)
    monkeypatch.setattr(gpu.step, "driver", types.SimpleNamespace(CUDADriverError=DriverError))
    context = types.SimpleNamespace(memGetInfo=lambda: asked.append("context"))
    monkeypatch.setattr(gpu.step, "runtime", context)
    one_step("delta", p, state)
    assert (asked, len(device.launches)) == (["context"], 1)
    asked.clear()
    monkeypatch.setattr(DriverError, "status", 1)
    with pytest.raises(DriverError):
        one_step("delta", p, state)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_a_new_thread_takes_a_step(name, rng):
    if name == "torch-cuda":
        pytest.importorskip("torch")
    family = Family(name)
    x = {n: a[:, 0] for n, a in family.arrays(problem(rng), "float32").items()}
    state = family.array(np.zeros((2, 4, 8, 8)), "float32")
    out = family.array(np.zeros((2, 4, 8)), "float32")
    step_ = lambda: STEPS["delta"](**x, state=state, out=out)  # noqa: E731
    step_()
    seen = []

    def run() -> None:
        step_()
        seen.append("done")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == ["done"]


def test_forms_are_few(device, rng, monkeypatch):
    device.computes = False
    monkeypatch.setattr(repeat, "MOST", 5)
    for B in range(1, 20):
        one_step("delta", problem(rng, B=B), np.zeros((B, 4, 8, 8), np.float32))
        assert len(repeat._known) <= 5
    one_step("delta", problem(rng, B=19), np.zeros((19, 4, 8, 8), np.float32))
    assert device.prepared == 19


# torch: forms of CPU tensors, which have all that those of CUDA tensors have


@pytest.fixture
def torch_form():
    torch = pytest.importorskip("torch")
    x = [torch.zeros(2, 4, 8) for _ in range(3)]
    scalars = [torch.zeros(2, 4) for _ in range(2)]
    state = torch.zeros(2, 4, 8, 8)

    def form(**changes: Any) -> tuple | None:
        names = ("q", "k", "v", "gate", "beta", "indices", "out", "state", "states_out")
        given = dict(zip(names, (*x, *scalars, None, None, state, None), strict=True))
        given |= changes
        key, at = repeat._torch_form("delta", False, 1.0, False, tuple(given.values()))
        assert key is None or len(at) == 9
        return key

    return form


def test_the_form_of_torch_tensors(torch_form):
    import torch

    first = torch_form()
    assert first is not None
    assert hash(first) == hash(torch_form(gate=torch.ones(2, 4)))
    others = [
        torch_form(gate=None),
        torch_form(gate=torch.zeros(2, 4, dtype=torch.bfloat16)),
        torch_form(gate=torch.zeros(4, 2).t()),
        torch_form(state=torch.zeros(2, 4, 8, 8, dtype=torch.bfloat16)),
        torch_form(state=torch.zeros(513)[1:].view(2, 4, 8, 8)),
        torch_form(out=torch.zeros(2, 4, 8)),
    ]
    assert len({first, *others}) == 7
    assert None not in others


def test_torch_tensors_that_are_not_plain_have_no_form(torch_form):
    import torch

    class Mine(torch.Tensor):
        pass

    lazy = torch._neg_view(torch.ones(2, 4))
    graded = torch.zeros(2, 4, requires_grad=True)
    sparse = torch.zeros(2, 4).to_sparse()
    for odd in (lazy, graded, sparse, torch.zeros(2, 4).as_subclass(Mine), np.zeros((2, 4))):
        assert torch_form(gate=odd) is None
    with torch.no_grad():
        assert torch_form(gate=graded) is not None

    def mapped(gate):
        assert torch_form(gate=gate) is None
        return gate

    torch.func.vmap(mapped)(torch.zeros(3, 2, 4))


def test_torch_is_told_what_a_known_form_wrote(monkeypatch):
    torch = pytest.importorskip("torch")
    from cupy_gdelta.gpu.repeat import Form

    at_launch = []
    x = torch.zeros(2, 4, 8)
    state, gate = torch.zeros(2, 4, 8, 8), torch.zeros(2, 4)
    arrays_ = (x, x.clone(), x.clone(), gate, None, None, None, state, None)
    key, at = repeat._torch_form("delta", False, 1.0, False, arrays_)
    launch = lambda pointers, stream: at_launch.append((list(pointers), stream))  # noqa: E731
    monkeypatch.setattr(repeat, "_known", {key: Form(launch, 0, (2, 4, 8), True, [])})
    monkeypatch.setattr(repeat, "_torch_stream", lambda device: "its stream")
    monkeypatch.setattr(repeat.runtime, "getDevice", lambda: 0)
    version = state._version
    y = repeat.on_torch("delta", False, 1.0, False, arrays_)
    assert (tuple(y.shape), y.dtype) == ((2, 4, 8), x.dtype)
    assert at_launch == [([*at[:6], y.data_ptr(), *at[7:]], "its stream")]
    assert state._version == version + 1
    assert repeat.on_torch("linear", False, 1.0, False, arrays_) is None


# on a GPU


def timed(call: Callable[[], Any], wait: Callable[[], Any], calls: int = 10_000) -> float:
    """Microseconds of a call on the host, the best of five runs of ``calls``."""
    best = float("inf")
    for _ in range(5):
        wait()
        begin = time.perf_counter()
        for _ in range(calls // 5):
            call()
        best = min(best, time.perf_counter() - begin)
        wait()
    return 5e6 * best / calls


@pytest.mark.gpu
@pytest.mark.parametrize("rule", STEPS)
@pytest.mark.parametrize(("name", "most"), [("cupy", 20), ("torch-cuda", 25)])
def test_what_a_call_costs_the_host(name, most, rule, rng):
    if name == "torch-cuda":
        pytest.importorskip("torch")
    family = Family(name)
    p = accuracy.inputs(rng, B=1, T=1, H=32, K=128, V=128)
    x = {n: a[:, 0] for n, a in family.arrays(p, "bfloat16").items()}
    state = family.array(np.zeros((1, 32, 128, 128)), "float32")
    us = timed(lambda: STEPS[rule](**x, state=state), cupy.cuda.Device().synchronize)
    assert us <= most, f"{us:.1f} us"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
@pytest.mark.parametrize("rule", STEPS)
def test_repeats_on_a_gpu(name, rule, rng):
    """Other addresses, streams and alignments, in turns."""
    if name == "torch-cuda":
        torch = pytest.importorskip("torch")
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    else:
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    family = Family(name)
    for i in range(12):
        p = accuracy.inputs(rng, B=3, T=2, H=4, Hq=2, K=24, V=24)
        x = family.arrays(p, "float32")
        flat = family.array(rng.standard_normal(3 * 4 * 24 * 24 + 1), "float32")
        state = flat[i % 2 :][: 3 * 4 * 24 * 24].reshape(3, 4, 24, 24)
        before = host(state)
        cupy.cuda.Device().synchronize()
        with torch.cuda.stream(streams[i % 2]) if name == "torch-cuda" else streams[i % 2]:
            y = STEPS[rule](**x, state=state)
        cupy.cuda.Device().synchronize()
        expected = REFERENCE[rule](**{n: host(a) for n, a in x.items()}, initial_state=before)
        assert_close(y, expected[0], 5e-6, f"call {i} y")
        assert_close(state, expected[1], 5e-6, f"call {i} state")
