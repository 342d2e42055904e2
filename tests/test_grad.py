"""Gradients against the float64 loops, on every back end; the loops against finite differences."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from compare import assert_close, bits, check_grad, host

import cupy_gdelta
from cupy_gdelta import accuracy, reference
from cupy_gdelta.cpu import blocks, steps, walk

RULES = {"linear": "gated_linear_attention", "delta": "gated_delta_rule"}
FUNCTION = {rule: getattr(cupy_gdelta, f"{name}_grad") for rule, name in RULES.items()}
DTYPES = ("float16", "bfloat16", "float32", "float64")
C = blocks.CHUNK

both_rules = pytest.mark.parametrize("rule", RULES)


def problem(rng, N=None, **sizes) -> dict:
    """Inputs of accuracy.inputs with a state for each sequence, and gradients to start from."""
    x = accuracy.inputs(rng, **sizes)
    shape = (x["v"].shape[0] if N is None else N, x["v"].shape[2], x["q"].shape[3], x["v"].shape[3])
    x["initial_state"] = rng.standard_normal(shape)
    return x


def outputs(rng, x: dict, family, dtype: str) -> tuple:
    """dy and dstate."""
    state = "float64" if dtype == "float64" else "float32"
    return (
        family.array(rng.standard_normal(x["v"].shape), dtype),
        family.array(rng.standard_normal(x["initial_state"].shape), state),
    )


def run(rule, rng, family, dtype="float32", N=None, prepare=None, options=None, **sizes):
    x = problem(rng, N, **sizes)
    dy, dstate = outputs(rng, x, family, dtype)
    x = family.arrays(x, dtype)
    if prepare is not None:
        x = prepare(x)
    return check_grad(rule, FUNCTION[rule], dy, dstate, x, dtype, **(options or {}))


@pytest.fixture
def small_segments(monkeypatch):
    """Segments of few chunks, three threads, and no call too small for them."""
    monkeypatch.setattr(blocks, "BYTES", 1 << 17)
    monkeypatch.setattr(walk, "WORTH_A_THREAD", 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")


def same_bits(a, b) -> bool:
    return all(host(x).tobytes() == host(y).tobytes() for x, y in zip(a, b, strict=True))


# --- the reference


def differences(rule: str, dy, dstate, x: dict, options: dict) -> dict:
    """The gradient of sum(y dy) + sum(state dstate) by central differences."""
    loop, found = getattr(reference, RULES[rule]), {}

    def loss(changed: dict) -> float:
        y, state = loop(**changed, **options)
        return float((y * dy).sum() + (state * dstate).sum())

    for name, value in x.items():
        found[name] = np.zeros(value.shape)
        for at in np.ndindex(*value.shape):
            ends = [value.copy() for _ in range(2)]
            ends[0][at] += 1e-6
            ends[1][at] -= 1e-6
            found[name][at] = (loss(x | {name: ends[0]}) - loss(x | {name: ends[1]})) / 2e-6
    return found


@both_rules
@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.3}, {"cu_seqlens": [0, 3, 3, 7]}, {"qk_l2norm": True}], ids=str
)
@pytest.mark.parametrize("regime", ["one", "zeros among", "negative", "1e-37"])
def test_reference_agrees_with_finite_differences(rule, options, regime, rng):
    if rule == "linear" and "qk_l2norm" in options:
        pytest.skip("an option of the delta rule")
    x = problem(rng, len(options.get("cu_seqlens", (0, 8))) - 1, T=8, H=4, Hq=2, K=3, V=2)
    x["gate"] = accuracy.gates(regime, x["gate"].shape, rng)
    x["gate"][0, 2, 0] = 0
    dy = rng.standard_normal(x["v"].shape)
    dstate = rng.standard_normal(x["initial_state"].shape)
    got = getattr(reference, f"{RULES[rule]}_grad")(dy, **x, dstate=dstate, **options)
    for name, expected in differences(rule, dy, dstate, x, options).items():
        assert_close(getattr(got, name), expected, 1e-8, name)


@both_rules
def test_reference_of_log_gates(rule, rng):
    x = problem(rng, T=8, K=3, V=2)
    x["log_gate"] = np.log(x.pop("gate"))
    dy, dstate = rng.standard_normal(x["v"].shape), np.zeros(x["initial_state"].shape)
    got = getattr(reference, f"{RULES[rule]}_grad")(dy, **x)
    expected = differences(rule, dy, dstate, x, {})
    assert_close(got.gate, expected["log_gate"], 1e-8, "log gate")


# --- against the reference


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", accuracy.GATES)
def test_every_dtype_and_gate(family, rule, dtype, gate, rng):
    run(rule, rng, family, dtype, B=2, T=150, H=4, Hq=2, K=24, V=40, gate=gate)


@both_rules
@pytest.mark.parametrize("T", [0, 1, 2, 15, 31, 32, 33, 64, 65, 200])
def test_lengths(backend, rule, T, rng):
    run(rule, rng, backend, B=2, T=T)


@both_rules
@pytest.mark.parametrize(
    ("K", "V"), [(1, 1), (1, 9), (3, 1), (9, 24), (40, 17), (64, 64), (96, 80), (128, 128)]
)
def test_head_dims(backend, rule, K, V, rng):
    run(rule, rng, backend, T=75, H=2, Hq=1, K=K, V=V, gate="zeros among")


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_head_dims(backend, rule, dtype, rng):
    run(rule, rng, backend, dtype, T=37, H=1, K=256, V=256)


@both_rules
@pytest.mark.parametrize(("H", "Hq"), [(6, 1), (6, 2), (6, 3), (16, 1), (0, 0)])
def test_grouped_heads(backend, rule, H, Hq, rng, small_segments):
    run(rule, rng, backend, B=3, T=70, H=H, Hq=Hq, K=8, V=12)


def test_heads_that_nothing_reads(backend):
    q, v = backend.array(np.ones((1, 5, 2, 3))), backend.array(np.ones((1, 5, 0, 3)))
    got = cupy_gdelta.gated_linear_attention_grad(v, q, q, v)
    assert not host(got.q).any()
    assert not host(got.k).any()


@both_rules
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "ends", [[0], [0, 0], [0, 0, 5, 5, 69, 69], [0, 1, 2, 3, 5, 8, 40, 72, 104, 200]]
)
def test_packed(backend, rule, dtype, ends, rng, small_segments):
    sizes = {"T": ends[-1] + 7, "H": 4, "Hq": 2, "K": 8, "V": 12, "N": len(ends) - 1}
    got = run(rule, rng, backend, dtype, options={"cu_seqlens": ends}, **sizes)
    for x in got[:5]:
        assert not host(x)[:, ends[-1] :].any()


@both_rules
@pytest.mark.parametrize("scale", [0.3, -2, 0.0])
def test_scale(backend, rule, scale, rng):
    run(rule, rng, backend, T=65, options={"scale": scale})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "Hq"), [(2, 2), (4, 1)])
def test_qk_l2norm(backend, dtype, H, Hq, rng):
    def lengthen(x):
        return x | {"q": 3 * x["q"], "k": 2 * x["k"]}

    sizes = {"T": 70, "H": H, "Hq": Hq, "K": 20, "V": 24}
    run("delta", rng, backend, dtype, prepare=lengthen, options={"qk_l2norm": True}, **sizes)


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_gate(backend, rule, dtype, rng):
    def logarithms(x):
        kind = "float64" if dtype == "float64" else "float32"
        with np.errstate(divide="ignore"):
            return x | {"log_gate": backend.array(np.log(host(x.pop("gate"))), kind)}

    got = run(rule, rng, backend, dtype, T=90, gate="zeros among", prepare=logarithms)
    assert np.isfinite(host(got.gate)).all()


@both_rules
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gate_and_beta_of_16_bits(backend, rule, dtype, rng):
    def narrow(x):
        return x | {n: backend.array(host(x[n]), dtype) for n in ("gate", "beta")}

    run(rule, rng, backend, dtype, T=90, prepare=narrow)


@both_rules
@pytest.mark.parametrize("missing", ["dy", "dstate", "gate", "beta", "initial_state"])
def test_what_may_be_left_out(backend, rule, missing, rng):
    x = problem(rng, T=70, H=4, Hq=2, K=8, V=12)
    start = dict(zip(("dy", "dstate"), outputs(rng, x, backend, "float32"), strict=True))
    x = backend.arrays(x, "float32")
    (start if missing in start else x)[missing] = None
    check_grad(rule, FUNCTION[rule], start["dy"], start["dstate"], x, "float32")


@both_rules
@pytest.mark.parametrize("sign", ["one sign", "both signs"])
def test_errors_do_not_add_up(backend, rule, sign, rng):
    """Rounding errors of equal gates, or of terms that are all positive, all go one way."""
    x = problem(rng, T=4096, H=1, K=16, V=16, gate="0.9995")
    start = [rng.standard_normal(x[name].shape) for name in ("v", "initial_state")]
    if sign == "one sign":
        x = {name: np.abs(a) for name, a in x.items()}
        start = [np.abs(a) for a in start]
        x["beta"] *= 0.1
        x["v"] *= 0.1
        start[0] *= 0.1
    dy, dstate = (backend.array(a, "float32") for a in start)
    check_grad(rule, FUNCTION[rule], dy, dstate, backend.arrays(x, "float32"), "float32")


# --- layouts


@both_rules
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_strided_arrays(backend, rule, dtype, rng):
    """Reversed, transposed and broadcast arrays, and rows apart."""
    x = problem(rng, B=2, T=70, H=4, Hq=2, K=8, V=12)
    start = dict(zip(("dy", "dstate"), outputs(rng, x, backend, dtype), strict=True))
    arrays = backend.arrays(x, dtype)
    plain = FUNCTION[rule](**start, **arrays)
    xp = np if backend.name == "numpy" else pytest.importorskip("cupy")

    def apart(a):
        wide = xp.zeros((*a.shape[:-1], 2 * a.shape[-1] + 1), a.dtype)
        wide[..., 1::2] = a
        return wide[..., 1::2]

    def turned(a):
        return xp.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)

    def reversed_(a):
        return xp.ascontiguousarray(a[:, ::-1])[:, ::-1]

    for change in (apart, turned, reversed_):
        views = {name: change(a) for name, a in (start | arrays).items()}
        before = bits(*map(host, views.values()))
        for name, got, want in zip(plain._fields, FUNCTION[rule](**views), plain, strict=True):
            assert_close(got, host(want), 1e-6 if dtype == "float32" else 8e-3, name)
        assert bits(*map(host, views.values())) == before


@both_rules
def test_broadcast_gradients(backend, rule, rng):
    """y.sum().backward() hands in one number with strides of 0."""
    x = problem(rng, B=2, T=70)
    arrays = backend.arrays(x, "float32")
    xp = np if backend.name == "numpy" else pytest.importorskip("cupy")
    dy = xp.broadcast_to(backend.array(np.ones(()), "float32"), x["v"].shape)
    dstate = xp.broadcast_to(backend.array(np.ones((24, 24)), "float32"), x["initial_state"].shape)
    check_grad(rule, FUNCTION[rule], dy, dstate, arrays, "float32")


# --- promises


@both_rules
@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "beta", "dy"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("K", [8, 24])
def test_nan_stays_in_its_head(backend, rule, name, value, K, rng, small_segments):
    x = problem(rng, B=3, T=7 * C + 3, H=4, K=K, V=8)
    dy, dstate = outputs(rng, x, backend, "float32")
    arrays = backend.arrays(x, "float32") | {"dy": dy}
    plain = FUNCTION[rule](**arrays, dstate=dstate)
    arrays[name][1, 4 * C + 5, 2] = value
    bad = FUNCTION[rule](**arrays, dstate=dstate)
    seen = [not np.isfinite(host(a)).all() for a in bad]
    assert any(seen)
    for a, b in zip(bad, plain, strict=True):
        a, b = host(a).copy(), host(b)
        if a.shape[1] == 4:
            a[1, 2] = b[1, 2]
        else:
            a[1, :, 2] = b[1, :, 2]
        assert bits(a) == bits(b)


@both_rules
def test_nan_stays_in_its_packed_sequence(backend, rule, rng):
    ends = [0, 3, 6, 40, 41, 75, 140]
    x = problem(rng, 6, T=150)
    dy, dstate = outputs(rng, x, backend, "float32")
    arrays = backend.arrays(x, "float32") | {"dy": dy, "dstate": dstate, "cu_seqlens": ends}
    plain = FUNCTION[rule](**arrays)
    for name in ("q", "k", "v", "dy"):
        arrays[name][:, [4, 60, 145]] = np.nan
    bad = FUNCTION[rule](**arrays)
    for a, b in zip(bad[:5], plain[:5], strict=True):
        a, b = host(a), host(b)
        for first, last in ((0, 3), (6, 41), (75, 140), (140, 150)):
            assert bits(a[:, first:last]) == bits(b[:, first:last])


@both_rules
def test_nothing_comes_through_a_gate_of_zero(backend, rule, rng):
    x = problem(rng, T=2 * C + 9)
    x["gate"][:, C + 3] = 0
    dy, dstate = outputs(rng, x, backend, "float32")
    dy[:, : C + 3] = 0
    got = FUNCTION[rule](dy, **backend.arrays(x, "float32"), dstate=dstate)
    for name in ("q", "k", "v", "gate", "beta"):
        assert not host(getattr(got, name))[:, : C + 3].any(), name
    assert not host(got.initial_state).any()
    assert host(got.gate)[:, C + 3].all(), "the gate itself has one"


@both_rules
def test_same_bits_again(backend, rule, rng, small_segments, monkeypatch):
    x = problem(rng, B=3, T=10 * C, H=4, Hq=2)
    dy, dstate = outputs(rng, x, backend, "float32")
    arrays = backend.arrays(x, "float32")
    first = FUNCTION[rule](dy, **arrays, dstate=dstate)
    for i in range(20 if backend.on_gpu else 3):
        monkeypatch.setenv("OMP_NUM_THREADS", str(1 + i))
        assert same_bits(FUNCTION[rule](dy, **arrays, dstate=dstate), first)


@both_rules
@pytest.mark.parametrize("cut", [1, C, C + 7, 100])
def test_gradients_are_carried_over_a_split(backend, rule, cut, rng):
    x = problem(rng, B=2, T=150)
    dy, dstate = outputs(rng, x, backend, "float32")
    arrays = backend.arrays(x, "float32")
    whole = FUNCTION[rule](dy, **arrays, dstate=dstate)
    first = arrays.pop("initial_state")
    head = {n: a[:, :cut] for n, a in arrays.items()}
    tail = {n: a[:, cut:] for n, a in arrays.items()}
    forward = getattr(cupy_gdelta, RULES[rule])
    _, state = forward(**head, initial_state=first, return_state=True)
    late = FUNCTION[rule](dy[:, cut:], **tail, initial_state=state, dstate=dstate)
    early = FUNCTION[rule](dy[:, :cut], **head, initial_state=first, dstate=late.initial_state)
    for name, a, b, want in zip(whole._fields, early, late, whole, strict=True):
        got = host(a) if name == "initial_state" else np.concatenate((host(a), host(b)), 1)
        assert_close(got, host(want), 2e-5, name)


@both_rules
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_grows_by_the_states_between_segments(rule, dtype, monkeypatch):
    monkeypatch.setattr(blocks, "BYTES", 1 << 20)

    def peak(T: int) -> int:
        x = np.zeros((1, T, 4, 16), np.float32)
        x, gate = x.astype(accuracy_dtype(dtype)), np.ones((1, T, 4), np.float32)
        tracemalloc.start()
        got = FUNCTION[rule](x, x, x, x, gate, gate)
        size = tracemalloc.get_traced_memory()[1] - sum(a.nbytes for a in got[:5])
        tracemalloc.stop()
        return size

    peak(9)
    short = peak(8192)
    states = (65536 - 8192) // C * 4 * 16 * 16 * 4
    assert peak(65536) < 1.2 * short + states + 100_000


def accuracy_dtype(dtype: str):
    return pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype


# --- gates above one


LARGE = [[1e20, 1e20, 0], [1e13, 1e13, 1e13, 0], [1e-30, 1e-30, 1e30, 1e30], [-3e38, 0, 1, 1]]


@both_rules
@pytest.mark.parametrize("gates", LARGE, ids=str)
@pytest.mark.parametrize("T", [8, C, 3 * C + 5])
@pytest.mark.parametrize("first", [0, 3, C - 2])
def test_large_gates_on_a_state_of_zero(backend, rule, gates, T, first):
    """Their products overflow, what they multiply does not: one is 0, or a gate of 0 follows."""
    ones = np.ones((1, T, 1, 1))
    v, dy, gate = ones.copy(), ones.copy(), np.ones((1, T, 1))
    v[:, : first + 4] = 0
    dy[:, : first + 4] = 0
    gate[0, first : first + len(gates), 0] = gates[: max(0, T - first)]
    after = gate[0, first + len(gates) :]
    if after.size:
        gate[0, first + 4 : first + 5] = 0
    x = backend.arrays(
        {"q": ones, "k": ones, "v": v, "gate": gate, "beta": ones[..., 0]}, "float32"
    )
    got = FUNCTION[rule](backend.array(dy, "float32"), **x)
    expected = getattr(reference, f"{RULES[rule]}_grad")(dy, **{n: host(a) for n, a in x.items()})
    for name in ("q", "k", "v", "gate", "beta"):
        want = getattr(expected, name)
        assert np.isfinite(want).all()
        assert_close(getattr(got, name), want, 2e-5, name)


@both_rules
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_gates_against_the_reference(backend, rule, dtype, rng):
    x = problem(rng, B=2, T=100, H=4, Hq=2, K=16, V=16)
    dy, dstate = (rng.standard_normal(x[name].shape) for name in ("v", "initial_state"))
    gate = x["gate"]
    gate[:, [5, 40, 41, 70]] = 0
    x["v"][:, 5:9] = 0
    dy[:, 5:9] = 0
    gate[:, 6:9] = 1e18
    gate[:, 9] = 0
    x["v"][:, 40:43] = 0
    dy[:, 40:43] = 0
    gate[:, 42] = -3e37
    gate[:, 43] = 0
    dy, dstate = backend.array(dy, dtype), backend.array(dstate, "float32")
    arrays = backend.arrays(x, dtype)
    check_grad(rule, FUNCTION[rule], dy, dstate, arrays, dtype, what="large gates")


@both_rules
def test_gates_of_any_size_go_step_by_step(rule, rng, monkeypatch):
    """Whole problems in the way that is kept for chunks whose products overflow."""
    monkeypatch.setattr(steps, "LIMIT", -1.0)
    x = problem(rng, B=2, T=3 * C + 5, H=4, Hq=2, K=8, V=12)
    x["gate"][:, ::7] *= 1.1  # one above 1, for a look at the products
    x["gate"][:, 3::C] = 1.5
    dy, dstate = (rng.standard_normal(x[name].shape) for name in ("v", "initial_state"))
    calls = []
    loop = steps.loop
    monkeypatch.setattr(steps, "loop", lambda *a: calls.append(1) or loop(*a))
    check_grad(rule, FUNCTION[rule], dy, dstate, x, "float64")
    assert calls


@both_rules
@pytest.mark.parametrize("ends", [[0, 9, 9, 18, 60, 200], [0, 40, 80, 81, 121, 230]])
def test_gradients_of_packed_sequences_are_their_own(backend, rule, ends, rng, small_segments):
    x = problem(rng, len(ends) - 1, T=ends[-1] + 3, H=4, Hq=2, K=8, V=12)
    dy, dstate = outputs(rng, x, backend, "float32")
    arrays = backend.arrays(x, "float32")
    got = FUNCTION[rule](dy, **arrays, dstate=dstate, cu_seqlens=ends)
    states = arrays.pop("initial_state")
    # a GPU may take another kernel for a sequence of this length alone
    tolerance = accuracy.GRADIENT_TOLERANCE["float32"] if backend.on_gpu else 5e-6
    for n, (a, b) in enumerate(itertools.pairwise(ends)):
        one = {name: value[:, a:b] for name, value in arrays.items()}
        rows = slice(n, n + 1)
        alone = FUNCTION[rule](dy[:, a:b], **one, initial_state=states[rows], dstate=dstate[rows])
        for name, x_, y_ in zip(got._fields, got, alone, strict=True):
            part = x_[rows] if name == "initial_state" else x_[:, a:b]
            assert_close(part, host(y_), tolerance, f"sequence {n} {name}")


# --- refusals


@both_rules
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dy": None}, "dy or dstate must be given; got neither"),
        ({"dy": np.ones((1, 5, 2, 4), np.float32)}, r"dy must have shape \(B, T, H, V\) with"),
        ({"dy": np.ones((1, 5, 2, 3))}, "dy must have dtype float32 for q of float32; got float64"),
        ({"dstate": np.ones((2, 2, 3, 3), np.float32)}, r"dstate must have shape \(N, H, K, V\)"),
        ({"dstate": np.ones((1, 2, 3, 3))}, "dstate must have dtype float32 for q of float32"),
        ({"dy": 1.0}, "dy must be an array"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals(rule, change, message):
    x = np.ones((1, 5, 2, 3), np.float32)
    arguments = {"dy": x, "q": x, "k": x, "v": x} | change
    with pytest.raises((TypeError, ValueError), match=f"{RULES[rule]}_grad: {message}"):
        FUNCTION[rule](**arguments)
