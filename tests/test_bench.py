"""bench: what it asks for, measures, keeps and shows, with invented figures and invented peers."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from archives import one_line
from conftest import python

from cupy_gdelta import accuracy, bench, devices, reference
from cupy_gdelta.bench import (
    backward,
    decode,
    first_call,
    measure,
    peers,
    readme,
    report,
    shapes,
    store,
)
from cupy_gdelta.cli import main

ROOT = Path(__file__).parent.parent
TINY = "2,70,3,8,6,float32"


def inputs(rule="linear", text=TINY):
    """Inputs as NumPy arrays."""
    shape = shapes.parse(text)
    sizes = {name: getattr(shape, name) for name in "BTHKV"}
    x = accuracy.inputs(np.random.default_rng(0), **sizes)
    return shapes.Inputs(rule, shape, **{n: a.astype(shape.dtype) for n, a in x.items()})


def result(rule="linear", name="seed24", **changes):
    """A result that nobody could take for a measured one."""
    shape = shapes.parse(name)
    first = dict.fromkeys(measure.FIELDS) | {"name": "cupy_gdelta", "us": 222.0, "error": 1e-7}
    first |= {"graph_us": 200.0, "host_us": 9.0, "times_floor": 2.22, "gbps": 1.0, "note": ""}
    second = first | {"name": "rival", "us": 1110.0, "times_floor": 11.1, "error": None}
    second |= {"note": "invented", "graph_us": None, "no_graph": "none, either"}
    absent = dict.fromkeys(measure.FIELDS) | {"name": "absent", "note": "absent is not installed"}
    return {
        "rule": rule,
        "shape": {n: getattr(shape, n) for n in ("name", *"BTHKV", "dtype")},
        "precision": "highest",
        "bytes": shape.moved,
        "copy_rate": 1e12,
        "floor_us": 100.0,
        "contenders": [first, second, absent],
    } | changes


def saved(path, *results, **machine):
    about = {"gpu": "No GPU", "driver": "0.0", "cuda_runtime": "0.0", "versions": {"CuPy": "0"}}
    store.save(path, store.saved(about | machine, list(results)))
    return str(path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rule", "both"], "both"),
        (["--shape", "seed25"], "no shape called seed25; there are seed24, d64_fp32"),
        (["--shape", "1,2,3,4,float32"], "five positive numbers; got 1,2,3,4,float32"),
        (["--shape", "1,2,0,4,5,float32"], "five positive numbers"),
        (["--shape", "1,2,-3,4,5,float32"], "five positive numbers"),
        (["--shape", "1,2,3,4,5,float8"], "one of float16, bfloat16, float32, float64; got float8"),
        (["--shape", "1,2,3,257,5,float32"], "K and V must be at most 256; got 257 and 5"),
        (["--repeat", "0"], "must be a positive number of calls; got 0"),
        (["--precision", "low"], "low"),
        (["--json", "no/where.json"], "no/where.json: there is no folder no"),
        (["--plot", "no/where.png"], "no/where.png: there is no folder no"),
        (["--from", "none.json"], "none.json: No such file"),
        (["--from", "none.json", "--peers"], "--peers is for measuring"),
        (["--decode", "--shape", "d64"], "--decode goes with the shapes decode1, decode64, "),
        (["--decode", "--backward"], "--backward goes with sequences"),
        (["--shape", "decode64", "--backward"], "--backward goes with sequences"),
        (["--from", "none.json", "--backward"], "--backward is for measuring"),
        (["--shape", "packed", "--backward"], "--backward goes with dense shapes"),
        (["--shape", "grouped8k", "--backward"], "--backward goes with dense shapes of H = Hq"),
        ([], "bench needs a CUDA device: told so"),
    ],
)
def test_one_line(capsys, tmp_path, monkeypatch, words, text):
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "told so")
    monkeypatch.chdir(tmp_path)
    one_line(capsys, ["bench", *words], text)
    assert not list(tmp_path.iterdir())


def test_options(monkeypatch):
    asked = []
    monkeypatch.setattr(bench.options, "run", lambda request: asked.append(request) or 0)
    assert main(["bench"]) == 0
    assert asked[0] == bench.Request()
    sizes = ["--shape", "d64", "--shape", "1,2,3,4,5, float16", "--shape", "d64"]
    rest = ["--rule", "delta", "--peers", "--precision", "tf32", "--repeat", "7", "--json", "a"]
    assert main(["bench", *sizes, *rest]) == 0
    both = (shapes.NAMED["d64"], shapes.Shape("1,2,3,4,5,float16", 1, 2, 3, 4, 5, "float16"))
    wanted = bench.Request(("delta",), both, True, "tf32", 7, Path("a"))
    assert asked[1] == wanted
    assert main(["bench", "--decode", "--shape", "decode64"]) == 0
    assert asked[2] == bench.Request(shapes=(decode.NAMED["decode64"],), decode=True)
    assert main(["bench", "--backward"]) == 0
    assert asked[3] == bench.Request(backward=True)


def test_help_imports_no_array_library():
    python("""
        import contextlib, io, sys
        import cupy_gdelta
        assert "cupy_gdelta.bench" not in sys.modules
        from cupy_gdelta.cli import main
        with contextlib.redirect_stdout(io.StringIO()) as text:
            main(["bench", "--help"])
        assert "--peers" in text.getvalue()
        assert not {"cupy", "torch", "jax", "rich", "matplotlib"} & set(sys.modules)
    """)


def test_the_floor_counts_every_byte_once():
    for text in (TINY, "2,70,3,8,6,float64"):
        x = inputs(text=text)
        y = reference.gated_linear_attention(*x.arrays)[0].astype(x.shape.dtype)
        assert x.shape.moved == sum(a.nbytes for a in (*x.arrays, y))
    assert shapes.parse("1,1,1,3,5,bfloat16").moved == 2 * (3 + 5) * 2 + 2 * 4
    assert shapes.NAMED["seed24"].moved / 4.26e6 == pytest.approx(24, abs=0.5)  # microseconds


@pytest.mark.parametrize("layout", ["", *shapes.LAYOUTS])
def test_layouts_hold_the_same_numbers(layout):
    x = inputs()
    laid = shapes.laid_out(layout, x.q, x.k, x.q + x.k)
    for a, b in zip(laid, (x.q, x.k, x.q + x.k), strict=True):
        assert np.array_equal(a, b)
        assert a.flags["C_CONTIGUOUS"] == (layout in ("", "packed"))
    names = {shape.layout for shape in shapes.NAMED.values()}
    assert names == {"", *shapes.LAYOUTS}
    assert {shape.data for shape in shapes.NAMED.values()} == {"", *shapes.DATA}
    assert len(shapes.USUAL) == 7


@pytest.mark.gpu
def test_shapes_of_their_own_data():
    shape = replace(shapes.NAMED["d128"], T=256)
    usual, alike, lasting = (
        shapes.make("delta", replace(shape, data=data)) for data in ("", "alike", "lasting")
    )
    for x, least in ((usual, -0.5), (alike, 0.8)):
        k = x.k.astype("float32").get()
        assert np.linalg.norm(k, axis=-1) == pytest.approx(1, abs=0.01)
        assert (k[:, :1] * k[:, 1:]).sum(-1).min() > least
    for x, most in ((usual, 1e-4), (lasting, 1)):
        assert x.gate.prod(1).max() < most
    assert lasting.gate.prod(1).min() > 0.9


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_packed_shapes_are_compared_with_packed_sequences(rule):
    sizes = inputs(rule, "1,900,2,8,6,float32")
    x = replace(sizes, shape=replace(sizes.shape, layout="packed"))
    offsets = x.cu_seqlens
    assert len(offsets) == shapes.SEQUENCES + 1
    assert (offsets[0], offsets[-1]) == (0, 900)
    assert (np.diff(offsets) > 0).all()
    y = shapes.LOOPS[rule](*(a.astype("float64") for a in x.arrays), **x.options)[0]
    assert accuracy.error(x.sample(y), x.expected) < 1e-6
    assert accuracy.error(x.expected, sizes.expected) > 1e-3


def test_the_floor_of_gradients_counts_what_either_way_needs():
    x = inputs()
    y = reference.gated_linear_attention(*x.arrays)[0].astype("float32")
    forward = sum(a.nbytes for a in (*x.arrays, y))
    assert x.shape.moved_backward == forward + sum(2 * a.nbytes for a in x.arrays) + y.nbytes
    assert shapes.NAMED["d64_fp32"].moved_backward / 4.26e6 == pytest.approx(350, rel=0.02)


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_the_sample_of_gradients_is_that_of_the_whole(rule):
    x = inputs(rule, "2,600,2,8,6,float32")
    whole = shapes.GRAD_LOOPS[rule](x.early_dy, *x.arrays)
    for got, expected in zip(whole, x.expected_gradients, strict=False):
        np.testing.assert_allclose(x.sample(got), expected, rtol=0, atol=1e-13)
    assert x.dy[:, shapes.SAMPLE :].all()


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_the_sample_is_that_of_the_whole(rule):
    x = inputs(rule, "3,600,2,8,6,float32")
    y = shapes.LOOPS[rule](*x.arrays)[0]
    assert x.expected.shape == (2, shapes.SAMPLE, 1, 6)
    np.testing.assert_allclose(x.sample(y), x.expected, rtol=0, atol=1e-14)
    one = inputs(rule, "1,5,1,8,6,float32")
    assert one.expected.shape == (1, 5, 1, 6)


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_the_sample_of_grouped_heads(rule):
    x = inputs(rule, "2,70,4,8,6,float32")
    x = replace(x, q=x.q[:, :, :2], k=x.k[:, :, :2], shape=replace(x.shape, Hq=2))
    y = shapes.LOOPS[rule](*x.arrays)[0]
    np.testing.assert_allclose(x.sample(y), x.expected, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(shapes.LOOPS[rule](*x.repeated, *x.arrays[2:])[0], y)
    out = y.astype(x.shape.dtype)
    assert x.shape.moved == sum(a.nbytes for a in (*x.arrays, out))


# peers: stand-ins with the signatures that the real ones document


def _simple_gla(q, k, v, g=None, g_gamma=None, scale=None):
    return _with_logs("linear", q, k, v, g, None, scale), None


def _gated_delta_rule(q, k, v, g, beta, scale=None):
    return _with_logs("delta", q, k, v, g, beta, scale), None


def _with_logs(rule, q, k, v, g, beta, scale):
    q, k, v, g = (np.asarray(x) for x in (q, k, v, g))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    beta = None if beta is None else np.asarray(beta)
    return shapes.LOOPS[rule](q, k, v, None, beta, log_gate=g, scale=scale)[0]


def _chunk_scan(x, dt, A, B, C, chunk_size):
    x, dt, A, B, C = (np.asarray(a) for a in (x, dt, A, B, C))
    assert chunk_size > 0
    return reference.gated_linear_attention(C, B, x, np.exp(dt * A), dt)[0]


def _linear_attention(kind, q, k, v, *, impl="auto", g, beta=None, scale=None):
    assert impl == "mosaic_gpu"
    rule = {"simple_gla": "linear", "gated_deltanet": "delta"}[kind]
    assert (beta is None) == (rule == "linear")
    return _with_logs(rule, q, k, v, g, beta, scale), None


@pytest.fixture
def invented(monkeypatch):
    pytest.importorskip("torch")  # before it could find the others
    jax = {
        "jit": lambda f: f,
        "block_until_ready": lambda x: x,
        "dlpack": SimpleNamespace(from_dlpack=np.from_dlpack),
    }
    modules = {
        "fla.ops.simple_gla": {"chunk_simple_gla": _simple_gla},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _gated_delta_rule},
        "flash_qla": {"chunk_gated_delta_rule": _gated_delta_rule},
        "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": _chunk_scan},
        "jla.ops": {"linear_attention": _linear_attention},
        "jax": jax,
    }
    for name, contents in modules.items():
        parts = name.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[0]))
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule, some in peers.PEERS.items() for name in some]
)
def test_a_peer_is_given_the_same_problem(invented, rule, name):
    x = inputs(rule, "2,70,3,128,128,float32" if name == "flash_qla" else TINY)
    if name == "flash_qla":
        with pytest.raises(peers.Unavailable, match="16 bits and K = V = 128 only"):
            peers.flash_qla(x)
        halves = {n: getattr(x, n).astype("float16") for n in "qkv"}
        shape = shapes.parse("2,70,3,128,128,float16")
        x = shapes.Inputs(rule, shape, **halves, gate=x.gate, beta=x.beta)
    contender = peers.PEERS[rule][name](x)
    assert accuracy.error(x.sample(contender.call()), x.expected) < 1e-6
    assert (contender.wait is None) == (name != "jla")


class Differentiable:
    """What a peer's function does on tensors, by way of this library's own gradients."""

    def __init__(self, rule):
        self.function = peers.FUNCTIONS[rule]

    def __call__(self, q, k, v, g, beta=None, scale=None):
        return self.function(q, k, v, log_gate=g, beta=beta, scale=scale), None


@pytest.mark.parametrize(
    ("rule", "name"), [("linear", "fla"), ("delta", "fla"), ("delta", "flash_qla")]
)
def test_a_peer_computes_the_same_gradients(invented, monkeypatch, rule, name):
    function, x = Differentiable(rule), inputs(rule)
    if name == "flash_qla":
        with pytest.raises(peers.Unavailable, match="16 bits and K = V = 128 only"):
            backward.flash_qla(x)
        monkeypatch.setattr(sys.modules["flash_qla"], "chunk_gated_delta_rule", function)
        halves = {n: getattr(inputs(rule, "2,70,3,128,128,float32"), n) for n in "qkv"}
        halves = {n: a.astype("float16") for n, a in halves.items()}
        shape = shapes.parse("2,70,3,128,128,float16")
        x = shapes.Inputs(rule, shape, **halves, gate=x.gate, beta=x.beta)
    kind = {"linear": "simple_gla", "delta": "gated_delta_rule"}[rule]
    monkeypatch.setattr(sys.modules[f"fla.ops.{kind}"], f"chunk_{kind}", function)
    contender = backward.PEERS[rule][name](x)
    contender.call()
    tolerance = 1e-5 if name == "fla" else 3e-3
    for got, expected in zip(contender.gradients(), x.expected_gradients, strict=True):
        assert accuracy.error(got, expected) < tolerance


def test_our_own_gradients():
    x = inputs("delta")
    contender = backward.ours(x, "highest")
    contender.call()
    for got, expected in zip(contender.gradients(), x.expected_gradients, strict=True):
        assert accuracy.error(got, expected) < 1e-5


def test_jla_gets_a_function_to_differentiate(invented):
    x = inputs()
    forward, arrays, _, note = peers.jla_call(x)
    assert accuracy.error(x.sample(forward(*arrays)), x.expected) < 1e-6
    assert note.startswith(peers.FOLDED)


def test_bfloat16_goes_to_torch_bit_by_bit():
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array([1, -0.5, 3e38]).astype(ml_dtypes.bfloat16)
    assert peers.as_torch(x).dtype == torch.bfloat16
    np.testing.assert_array_equal(shapes.host(peers.as_torch(x)), x.astype(np.float64))


# decode steps


def step_inputs(rule="linear", state="float32"):
    """Inputs of a step as NumPy arrays."""
    rng = np.random.default_rng(0)
    x = {n: a[:, 0] for n, a in accuracy.inputs(rng, B=3, T=1, H=2, K=128, V=128).items()}
    shape = decode.StepShape("tiny", 3, 1, 2, 128, 128, "float16", state)
    x = {n: a.astype("float16" if n in "qkv" else "float32") for n, a in x.items()}
    before = rng.standard_normal((3, 2, 128, 128)).astype(state)
    return decode.StepInputs(rule, shape, **x, state=before)


def test_the_floor_of_a_step_counts_the_state_twice():
    for state in ("float32", "float16"):
        x = step_inputs(state=state)
        y = x.v.nbytes
        assert x.shape.moved == sum(a.nbytes for a in x.arrays) + 2 * x.state.nbytes + y
    assert decode.NAMED["decode256"].moved / 4.26e6 == pytest.approx(253, abs=2)  # microseconds


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_the_sample_of_a_step(rule):
    x = step_inputs(rule)
    inputs = [a[:, None] for a in x.arrays]
    y, _ = shapes.LOOPS[rule](*inputs, initial_state=x.state)
    np.testing.assert_allclose(x.sample(y), x.expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(x.sample(y[:, 0]), x.expected, rtol=0, atol=1e-14)
    assert x.expected.shape == (2, 1, 1, 128)


def _recurrent_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, **options):
    assert options == {"output_final_state": True}
    return _step("linear", q, k, v, np.exp(np.asarray(g)), None, initial_state, scale)


def _recurrent_delta(q, k, v, g=None, beta=None, scale=None, initial_state=None, **options):
    assert options == {"output_final_state": True}
    return _step("delta", q, k, v, np.exp(np.asarray(g)), beta, initial_state, scale)


def _flashinfer(q, k, v, state, A_log, a, dt_bias, b, scale=None, **options):
    assert options == {"use_qk_l2norm": False}
    a, b, A_log, dt_bias = (np.asarray(x).astype(np.float64) for x in (a, b, A_log, dt_bias))
    gate = np.exp(-np.exp(A_log) * np.log1p(np.exp(a + dt_bias)))
    y, after = _step("delta", q, k, v, gate, 1 / (1 + np.exp(-b)), state.swapaxes(2, 3), scale)
    state.copy_(state.new_tensor(after).swapaxes(2, 3))
    return y, state


def _step(rule, q, k, v, gate, beta, state, scale):
    some = [None if x is None else np.asarray(x) for x in (q, k, v, gate, beta)]
    return shapes.LOOPS[rule](*some, initial_state=np.asarray(state), scale=scale)


@pytest.fixture
def invented_steps(monkeypatch):
    pytest.importorskip("torch")
    import torch

    modules = {
        "fla.ops.simple_gla": {"fused_recurrent_simple_gla": _recurrent_simple_gla},
        "fla.ops.gated_delta_rule": {"fused_recurrent_gated_delta_rule": _recurrent_delta},
        "flashinfer.gdn_decode": {"gated_delta_rule_decode_pretranspose": _flashinfer},
    }
    for name, contents in modules.items():
        parts = name.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[0]))
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    cupy = SimpleNamespace(empty_like=np.empty_like)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(peers, "as_torch", torch.from_numpy)


def graph_of(call):
    """A stand-in for a graph: warmed up, then replayed by calling."""
    y = np.zeros_like(np.asarray(call()))
    return lambda: np.copyto(y, np.asarray(call())), y


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("name", ["cupy_gdelta", "cupy_gdelta, torch", "fla", "flashinfer"])
def test_contenders_of_a_step(invented_steps, monkeypatch, rule, name):
    x = step_inputs(rule)
    makers = decode.contenders(rule, True)
    if name == "flashinfer" and rule == "linear":
        assert name not in makers
        return
    contender = makers[name](x)
    before = x.state.copy()
    assert accuracy.error(x.sample(contender.call()), x.expected) < 2e-3
    if name != "fla":  # the state went on, in a copy
        assert accuracy.error(x.sample(contender.call()), x.expected) > 0.01
    assert np.array_equal(x.state, before)
    monkeypatch.setattr(decode.timing, "cupy_graph", graph_of)
    monkeypatch.setattr(decode.timing, "torch_graph", graph_of)
    replay, y = contender.capture()
    y[...] = 0
    replay()  # starts from the first state again
    assert accuracy.error(x.sample(y), x.expected) < 2e-3


def test_fla_keeps_states_in_float32(invented_steps):
    with pytest.raises(peers.Unavailable, match="states in float32 only"):
        decode.fla(step_inputs(state="float16"))


def test_host_costs(invented_steps, monkeypatch):
    monkeypatch.setattr(decode, "CALLS", 20)
    monkeypatch.setattr(decode, "make", lambda rule, shape: step_inputs(rule))
    device = SimpleNamespace(synchronize=lambda: None)
    sys.modules["cupy"].cuda = SimpleNamespace(Device=lambda: device)
    rows = decode.host_costs()
    assert [(row["rule"], row["array"]) for row in rows] == [
        (rule, name) for rule in ("linear", "delta") for name in ("CuPy", "torch")
    ]
    assert all(row["us"] > 0 for row in rows)
    rows = decode.host_costs(True)
    names = {rule: [r["array"] for r in rows if r["rule"] == rule] for rule in ("linear", "delta")}
    assert names == {
        "linear": ["CuPy", "torch", "fla"],
        "delta": ["CuPy", "torch", "fla", "flashinfer"],
    }
    text = report.markdown(store.saved({"gpu": "", "versions": {}}, [result()], rows))
    assert re.search(r"\| linear \| \S+ \| \S+ \| \S+ \| - \|\n\| delta \|", text)
    monkeypatch.setitem(decode.PEERS, "fla", lambda inputs: 1 / 0)
    monkeypatch.setattr(decode, "on_torch", lambda inputs: __import__("missing_library"))
    rows = decode.host_costs(True)
    assert [row["array"] for row in rows] == ["CuPy", "CuPy", "flashinfer"]
    monkeypatch.setattr(decode, "ours", lambda inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decode.host_costs()


def test_host_costs_are_kept_and_shown(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    rows = [{"rule": "linear", "array": "CuPy", "us": 11.25}]
    rows += [{"rule": "linear", "array": "torch", "us": 17.0}]
    about = {"gpu": "No GPU", "versions": {"CuPy": "0"}}
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    state = vars(decode.NAMED["decode64"])
    store.save(one, store.saved(about, [result(shape=dict(state))], rows))
    saved(two, result("delta"))
    assert store.load(one)["host"] == rows
    assert store.join([one, one])["host"] == rows
    assert "host" not in store.join([two])
    assert main(["bench", "--from", str(one)]) == 0
    text = capsys.readouterr().out
    assert "64, 1, 32, 128, 128, bfloat16, state float32" in text
    assert [cell.strip() for cell in text.splitlines()[-2].strip("│").split("│")] == [
        "linear rule",
        "11.2",
        "17.0",
    ]
    assert main(["bench", "--from", str(one), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert text.endswith("| rule | CuPy | torch |\n| --- | --- | --- |\n| linear | 11.2 | 17.0 |\n")


# measuring, with a clock that needs no GPU


class Clock:
    flush_us = 150.0

    def copy_rate(self):
        return 1e9

    def call(self, call):
        call()
        return 50.0, 5.0


def broken(x):
    raise RuntimeError("a peer\nmay raise")


@pytest.fixture
def no_gpu_needed(monkeypatch):
    monkeypatch.setattr(shapes, "make", lambda rule, shape: inputs(rule, shape.name))
    monkeypatch.setattr(measure, "_still_works", lambda name: None)


def test_measure(no_gpu_needed, monkeypatch):
    def right(x, precision):
        y = x.expected[:, :, [0, 0, 0]]
        out = np.zeros_like(y)
        return peers.Contender(lambda: y, lambda: (lambda: np.copyto(out, y), out))

    def wrong(x):
        y = 1.5 * x.expected[:, :, [0, 0, 0]]
        return peers.Contender(lambda: y, lambda: (lambda: None, y.copy()), note="half more")

    def nan(x):
        return peers.Contender(lambda: np.full((2, 70, 3, 6), np.nan))

    monkeypatch.setattr(peers, "ours", right)
    monkeypatch.setitem(peers.LOCAL, "linear", {"wrong": wrong, "nan": nan, "broken": broken})
    monkeypatch.setitem(peers.PEERS, "linear", {"fla": peers.fla})
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setenv("FLA_FLASH_QLA", "1")  # put back afterwards
    found = measure.measure("linear", shapes.parse(TINY), "highest", True, Clock())
    assert found["floor_us"] == pytest.approx(found["bytes"] / 1e9 * 1e6)
    rows = {row["name"]: row for row in found["contenders"]}
    assert list(rows) == ["cupy_gdelta", "wrong", "nan", "broken", "fla"]
    assert rows["cupy_gdelta"] == {"name": "cupy_gdelta"} | {
        "us": 50.0,
        "graph_us": 50.0,
        "host_us": 5.0,
        "times_floor": 50 / found["floor_us"],
        "gbps": found["bytes"] / 50e3,
        "error": 0.0,
        "note": "",
        "no_graph": None,
    }
    assert rows["wrong"]["error"] == pytest.approx(0.5)
    assert (rows["wrong"]["us"], rows["wrong"]["graph_us"]) == (50.0, None)
    assert rows["wrong"]["no_graph"] == "a replay computes something else"
    assert (rows["nan"]["us"], rows["nan"]["error"]) == (50.0, None)
    assert (rows["broken"]["us"], rows["broken"]["note"]) == (None, "RuntimeError: a peer")
    assert (rows["fla"]["us"], rows["fla"]["note"]) == (None, "fla.ops is not installed")
    json.dumps(found, allow_nan=False)


def test_measure_with_gradients(no_gpu_needed, monkeypatch):
    def wrong(x):
        samples = [a * (1 + 0.1 * i) for i, a in enumerate(x.expected_gradients)]
        return peers.Contender(lambda: None, gradients=lambda: samples)

    monkeypatch.setitem(backward.PEERS, "linear", {"wrong": wrong, "broken": broken})
    found = measure.measure("linear", shapes.parse(TINY), "highest", True, Clock(), True)
    assert found["backward"]
    assert found["bytes"] == shapes.parse(TINY).moved_backward
    ours, other, last = found["contenders"]
    assert ours["error"] < 1e-5
    assert (ours["us"], ours["graph_us"], ours["no_graph"]) == (50.0, None, None)
    assert other["error"] == pytest.approx(0.2)
    assert last["note"] == "RuntimeError: a peer"


# keeping and showing


def test_what_is_saved_comes_back(tmp_path):
    path = tmp_path / "results.json"
    saved(path, result(), result("delta"))
    assert store.load(path)["results"] == [result(), result("delta")]
    before = path.read_text()
    with pytest.raises(ValueError):
        saved(path, result(floor_us=float("nan")))
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "machine": {"gpu": 1}}', "\x00"])
def test_another_file_is_refused(capsys, tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    one_line(capsys, ["bench", "--from", str(path)], "holds no results of bench")


def test_files_are_joined(capsys, tmp_path):
    one = saved(tmp_path / "1.json", result(), result(floor_us=1.0))
    two = saved(tmp_path / "2.json", result("delta"), result(floor_us=50.0))
    three = saved(tmp_path / "3.json", result(), versions={"CuPy": "1"})
    four = saved(tmp_path / "4.json", result(), gpu="Other")
    both = tmp_path / "both.json"
    assert main(["bench", "--from", one, "--from", two, "--json", str(both)]) == 0
    joined = store.load(both)["results"]
    assert [(r["rule"], r["floor_us"]) for r in joined] == [("linear", 50.0), ("delta", 100.0)]
    back = saved(tmp_path / "5.json", result(backward=True))
    assert len(store.join([Path(one), Path(back)])["results"]) == 2
    capsys.readouterr()
    one_line(capsys, ["bench", "--from", one, "--from", three], "CuPy 1, other files with 0")
    one_line(capsys, ["bench", "--from", one, "--from", four], "two machines do not mix")
    one_line(capsys, ["bench", "--from", one, "--shape", "d64"], "no results of that rule")
    one_line(capsys, ["bench", "--from", one, "--rule", "delta"], "no results of that rule")


def test_the_table(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = saved(tmp_path / "results.json", result(), result("delta"))
    assert main(["bench", "--from", path]) == 0
    text = capsys.readouterr().out
    assert text.count("No GPU, driver 0.0, CUDA 0.0, CuPy 0, a device-to-device copy") == 1
    assert "linear rule, seed24: B, T, H, K, V = 32, 2048, 4, 24, 24, float32" in text
    assert "floor 100.0 us for 102.8 MB at 1.00 TB/s" in text
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in text.splitlines()
        if line.startswith("│")
    ]
    assert rows[:3] == rows[3:]
    assert rows[0] == ["cupy_gdelta", "222.0", "200.0", "9.0", "2.22", "1", "1.0e-07"]
    assert rows[1][1:3] == ["1110.0", "-"]
    assert rows[1][6] == "NaN"
    assert rows[2] == ["absent", *["-"] * 6]
    notes = "rival: invented; no graph: none, either\nabsent: absent is not installed\n"
    assert text.count(notes) == 2


def test_a_failure_of_ours_is_an_exit_code(tmp_path):
    bad = result()
    bad["contenders"][0] |= {"us": None, "times_floor": None, "note": "out of memory"}
    assert main(["bench", "--from", saved(tmp_path / "bad.json", bad)]) == 1


MARKDOWN = """\
Measured on one No GPU, driver 0.0, CUDA 0.0, CuPy 0, a device-to-device copy moves 1.00 TB/s.

Linear rule, microseconds (times the floor, error of y):

| shape | B, T, H, K, V | floor | cupy_gdelta | rival |
| --- | --- | --- | --- | --- |
| seed24 | 32, 2048, 4, 24, 24, float32 | 100 | 222 (2.22x, 1.0e-7) | 1110 (11.10x, NaN) |
| as given, tf32 | 1, 2, 3, 4, 5, float32 | 100 | 222 (2.22x, 1.0e-7) | 1110 (11.10x, NaN) |

rival: invented.
"""


def test_markdown(capsys, tmp_path):
    other = result(name="1,2,3,4,5,float32", precision="tf32")
    path = saved(tmp_path / "results.json", result(), other)
    assert main(["bench", "--from", path, "--markdown"]) == 0
    assert capsys.readouterr().out == MARKDOWN


def test_gradients_have_a_table_of_their_own(capsys, tmp_path):
    path = saved(tmp_path / "results.json", result(), result(backward=True))
    assert main(["bench", "--from", path, "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "Linear rule, microseconds (times the floor, error of y):" in text
    assert "Linear rule, y and gradients, microseconds (times the floor, largest error):" in text
    assert main(["bench", "--from", path]) == 0
    assert "linear rule, y and gradients, seed24: B, T" in capsys.readouterr().out


def test_plot(tmp_path, monkeypatch):
    figures = []
    import matplotlib.figure

    write = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure,
        "savefig",
        lambda f, *a, **o: figures.append(f) or write(f, *a, **o),
    )
    path = saved(tmp_path / "results.json", result(), result(name="d64"), result("delta"))
    image = tmp_path / "plot.png"
    assert main(["bench", "--from", path, "--plot", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    linear, delta = figures[0].axes
    assert [axis.get_title() for axis in (linear, delta)] == ["linear rule", "delta rule"]
    assert "times the memory floor" in linear.get_xlabel()
    assert [bar.get_x() + bar.get_width() for bar in linear.patches] == [2.22, 11.1] * 2
    assert [t.get_text().split("\n")[0] for t in linear.get_yticklabels()] == ["seed24", "d64"]


@pytest.mark.parametrize("kind", readme.KINDS)
def test_the_readme_is_generated(kind, tmp_path, capsys):
    source, text = tmp_path / "results.json", tmp_path / "README.md"
    steps = {"shape": dict(vars(decode.NAMED["decode64"]))} if kind == "decode" else {}
    saved(source, result(**steps))
    blocks = [
        "\n".join((begin, f"old {name}", end))
        for name in readme.KINDS
        for begin, end in [readme.markers(name)]
    ]
    text.write_text("\n\n".join(["before", *blocks, "after\n"]))
    assert readme.main([str(source), str(text)]) == 0
    assert readme.current(text.read_text(), kind) == readme.block(source, text)
    assert text.read_text().startswith("before\n")
    assert text.read_text().endswith("after\n")
    assert {name for name in readme.KINDS if f"old {name}" in text.read_text()} == {
        name for name in readme.KINDS if name != kind
    }
    assert report.markdown(store.load(source)) in text.read_text()
    assert "](results.png)" in text.read_text()
    assert (tmp_path / "results.png").stat().st_size > 0
    text.write_text("no markers\n")
    assert readme.main([str(source), str(text)]) == 2
    assert readme.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("kind", readme.KINDS)
def test_the_readme_shows_what_is_committed(kind):
    source, path = ROOT / "examples" / f"{kind}_h200.json", ROOT / "README.md"
    shown = readme.current(path.read_text(encoding="utf-8"), kind)
    if not source.is_file() or shown is None:
        pytest.skip("no results are committed, or the README has no place for them")
    again = f"python -m cupy_gdelta.bench.readme examples/{kind}_h200.json README.md"
    assert shown == readme.block(source, path), f"run {again}"
    assert source.with_suffix(".png").is_file()


@pytest.mark.gpu
def test_bench_of_gradients_on_a_gpu(tmp_path):
    pytest.importorskip("ml_dtypes")
    path = tmp_path / "results.json"
    words = ["--shape", "2,600,2,24,24,float32", "--shape", "2,600,2,64,32,bfloat16"]
    assert main(["bench", *words, "--backward", "--repeat", "2", "--json", str(path)]) == 0
    for r in store.load(path)["results"]:
        (ours,) = r["contenders"]
        assert ours["error"] <= accuracy.GRADIENT_TOLERANCE[r["shape"]["dtype"]]


@pytest.mark.gpu
def test_bench_on_a_gpu(tmp_path, capsys):
    pytest.importorskip("ml_dtypes")
    path = tmp_path / "results.json"
    words = ["--shape", "2,100,2,24,24,float32", "--shape", "2,100,2,64,32,bfloat16"]
    assert main(["bench", *words, "--repeat", "2", "--json", str(path)]) == 0
    found = store.load(path)["results"]
    assert [r["rule"] for r in found] == ["linear", "linear", "delta", "delta"]
    for r in found:
        assert r["copy_rate"] > 1e10
        kind = r["rule"], r["shape"]["dtype"]
        ours, *others = r["contenders"]
        assert ours["error"] <= accuracy.TOLERANCE[kind]
        assert ours["graph_us"] > 0
        assert ours["times_floor"] == pytest.approx(ours["us"] / r["floor_us"])
        if kind == ("linear", "float32"):
            assert [o["name"] for o in others] == ["user_kernel.cu"]
            assert others[0]["error"] < 2e-6
            assert others[0]["graph_us"] > 0


@pytest.mark.gpu
def test_decode_on_a_gpu(tmp_path, capsys):
    pytest.importorskip("ml_dtypes")
    path = tmp_path / "results.json"
    words = ["--shape", "decode1", "--shape", "decode1_bf16", "--repeat", "2"]
    assert main(["bench", "--decode", *words, "--json", str(path)]) == 0
    found = store.load(path)
    assert [r["shape"]["state"] for r in found["results"]] == ["float32", "bfloat16"] * 2
    for r in found["results"]:
        ours = r["contenders"][0]
        assert ours["error"] <= accuracy.TOLERANCE[r["rule"], "bfloat16"]
        assert ours["graph_us"] is not None
    assert {row["array"] for row in found["host"]} >= {"CuPy"}


def test_a_first_call_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "told so")
    assert first_call.main([]) == 2
    line = "cupy_gdelta.bench.first_call needs a CUDA device: told so\n"
    assert capsys.readouterr().err == line


def test_first_calls_of_no_shape(capsys):
    assert first_call.main(["--shape", "1,2,3"]) == 2
    assert capsys.readouterr().err.startswith("cupy_gdelta.bench.first_call: --shape must be ")


@pytest.mark.gpu
def test_first_calls_in_processes_of_their_own(capsys):
    assert first_call.main(["--rule", "delta", "--shape", "1,5,1,4,4,float32"]) == 0
    rule, shape, empty, filled = capsys.readouterr().out.splitlines()[1].split()
    assert (rule, shape) == ("delta", "1,5,1,4,4,float32")
    assert 0 < float(filled) < float(empty)
