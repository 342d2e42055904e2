"""Faults that people have reported in kernels like these: wrong values.

Each test is named by a row, a fault report of another project restated as a small input; its
docstring gives the symptom and where it was reported ("fla" is fla-org/flash-linear-attention).
test_cases_memory.py holds those about layouts, test_cases_machine.py about streams and devices,
test_cases_cache.py about compiled kernels, test_cases_decode.py about decode steps,
test_cases_grad.py and test_autograd.py about gradients; rows about arrays and refusals stand beside
the other tests of their module. ``COVERED`` names them all.

Not yet covered, and what they wait for: N05 (a helper that makes gates, which this package has
not); a part of P02 (a y wider than the inputs).
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from compare import assert_close, check, host

import cupy_gdelta
from cupy_gdelta import accuracy, reference

COVERED = """
    N01 N02 S01 S02 D01 T01 A01 V01 I01 L01 L02 S03 H01 H02 C01 C03 X01 X02 X03 R01 M01 E01
    V03 X04 E02 E03 E04 P02 O01 X06 U01 U03 L04 X09 X10 R03 R04 E05 E06 Z01 Z02 Y01 Y02
    G01 G02 G03 G04 G06 G07 X07 X08
"""

FUNCTIONS = {
    "linear": cupy_gdelta.gated_linear_attention,
    "delta": cupy_gdelta.gated_delta_rule,
}
RULES = pytest.mark.parametrize("rule", FUNCTIONS)


def ones(T, gate=1.0, beta=1.0):
    """q = k = v = 1 and K = V = 1: the state is a number."""
    x = np.ones((1, T, 1, 1))
    gate = np.broadcast_to(gate, (T,)).reshape(1, T, 1)
    return {"q": x, "k": x, "v": x, "gate": gate, "beta": np.full((1, T, 1), beta)}


def with_states(rng, p, N=None):
    (B, _, H, V), K = p["v"].shape, p["q"].shape[-1]
    return p | {"initial_state": rng.standard_normal((B if N is None else N, H, K, V))}


def run(rule, p, dtype="float32", **options):
    return check(rule, FUNCTIONS[rule], p, dtype, **options)


def test_every_row_has_a_test():
    text = "\n".join(x.read_text() for x in Path(__file__).parent.glob("test_*.py"))
    named = set(re.findall(r"^def test_([A-Z]\d\d)_", text, re.MULTILINE))
    assert sorted(named) == sorted(COVERED.split())


FORGETTING = [[20], [0], [15], [16], [31], [32], [63], [64], [0, 20, 63, 64, 65], list(range(130))]
NAMES = [str(x) if len(x) < 9 else "all" for x in FORGETTING]


@RULES
@pytest.mark.parametrize("zeros", FORGETTING, ids=NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_N01_a_gate_of_zero_starts_a_new_document(backend, rule, zeros, dtype, rng):
    """Log-based chunked forms give NaN where a gate is exactly 0 (fla#20)."""
    gate = np.full(130, 0.9)
    gate[zeros] = 0
    p = backend.arrays(ones(130, gate, beta=0.5 if rule == "delta" else 1), dtype)
    y, _ = run(rule, p, dtype)
    assert (host(y)[0, zeros, 0, 0] == (0.5 if rule == "delta" else 1)).all()
    p = accuracy.inputs(rng, T=130)
    p["gate"][:, zeros] = 0
    p = backend.arrays(p, dtype)
    y, state = run(rule, p, dtype)
    starts = sorted({0, *zeros, 130})
    packed, states = FUNCTIONS[rule](**p, cu_seqlens=starts, return_state=True)
    tolerance = accuracy.TOLERANCE[rule, dtype]
    assert_close(packed, host(y), tolerance, "packed y")
    assert_close(states[-1:], host(state), tolerance, "packed state")
    last = {n: x[:, starts[-2] :] for n, x in p.items()}
    assert_close(FUNCTIONS[rule](**last), host(y)[:, starts[-2] :], tolerance, "last document")


@RULES
@pytest.mark.parametrize("gate", [1e-12, 0.2, 1e-37, 1e-30])
@pytest.mark.parametrize("T", [64, 130])
def test_N02_products_of_gates_may_underflow(backend, rule, gate, T, rng):
    """exp(sum) * exp(-sum) overflows, or the carried state becomes 0 (fla#77, executorch#21417)."""
    p = with_states(rng, accuracy.inputs(rng, T=T))
    p["gate"][...] = gate
    run(rule, backend.arrays(p, "float32"))
    p["gate"][:, 40:] = 1  # what was carried through is still there
    run(rule, backend.arrays(p, "float32"))


@RULES
def test_D01_float32_is_not_rounded_to_tf32(backend, rule, rng):
    """Inputs were silently rounded to TF32, an error of 4e-4 (triton#1671, triton#674)."""
    p = accuracy.inputs(rng, T=256, K=24, V=24)
    p["gate"][...] = 0.99
    p["q"] /= np.linalg.norm(p["q"], axis=-1, keepdims=True)
    p = backend.arrays(p, "float32")
    y, _ = run(rule, p, tolerance=5e-6)
    expected, _ = getattr(reference, FUNCTIONS[rule].__name__)(**{n: host(x) for n, x in p.items()})
    assert np.allclose(host(y), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@RULES
@pytest.mark.parametrize("C", [16, 32, 64, 128])
def test_T01_the_state_after_a_part_of_a_chunk(backend, rule, C):
    """The gate of a zeroed tail slot decayed the final state; y was right (sparkinfer PR#604)."""
    beta = 0.5 if rule == "delta" else 1.0
    for T in (1, C - 1, C, C + 1, 2 * C - 1):
        _, state = run(rule, backend.arrays(ones(T, 0.5, beta), "float32"), what=f"T={T}")
        if rule == "linear":
            assert host(state).item() == pytest.approx(2 - 2.0 ** (1 - T), rel=1e-6)


@RULES
@pytest.mark.parametrize(
    "starts", [[0, 0, 128, 128, 256, 256], [0], [0, 0], [0, 0, 0], [0, 256, 256]]
)
@pytest.mark.parametrize("with_state", [False, True])
def test_V01_empty_sequences(backend, rule, starts, with_state, rng):
    """Empty sequences crashed, or shifted the rows of later ones (fla#103, flashinfer PR#3536)."""
    p = accuracy.inputs(rng, T=256 if len(starts) > 3 or 256 in starts else 3)
    if with_state:
        p = with_states(rng, p, len(starts) - 1)
    p = backend.arrays(p, "float32")
    y, states = run(rule, p, cu_seqlens=starts)
    assert tuple(states.shape) == (len(starts) - 1, 2, 24, 24)
    for n, (a, b) in enumerate(pairwise(starts)):
        if a == b and with_state:
            assert np.array_equal(host(states)[n], host(p["initial_state"])[n])
        elif a == b:
            assert not host(states)[n].any()
    assert not host(y)[:, starts[-1] :].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("T", [32, 64, 130])
def test_I01_one_key_again_and_again(backend, dtype, T, rng):
    """Inverting a matrix of ones by repeated squaring explodes (fla#537, FlashKDA PR#10)."""
    p = accuracy.inputs(rng, T=T, K=16, V=8, gate="one")
    p["k"] = np.broadcast_to(np.eye(16)[3], p["k"].shape)
    p["beta"] = np.ones_like(p["beta"])
    p = backend.arrays(p, dtype)
    y, state = run("delta", p, dtype)
    exact = host(p["q"])[..., 3:4] * host(p["v"])
    assert_close(y, exact, accuracy.TOLERANCE["delta", dtype], "y")
    assert_close(state[:, :, 3], host(p["v"])[:, -1], accuracy.TOLERANCE["delta", dtype], "state")


@RULES
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_C01_a_sequence_that_starts_inside_a_chunk(backend, rule, dtype, rng):
    """The initial state decayed from the start of the chunk on (vllm PR#23279)."""
    p = with_states(rng, accuracy.inputs(rng, T=200), 4)
    p["gate"] = 0.5 + 0.5 * rng.random(p["gate"].shape)
    p = backend.arrays(p, dtype)
    starts = [0, 5, 70, 71, 200]
    y, states = run(rule, p, dtype, cu_seqlens=starts)
    tolerance = accuracy.TOLERANCE[rule, dtype]
    for n, (a, b) in enumerate(pairwise(starts)):
        one = {m: x[:, a:b] for m, x in p.items()} | {
            "initial_state": p["initial_state"][n : n + 1]
        }
        alone, end = FUNCTIONS[rule](**one, return_state=True)
        assert_close(alone, host(y)[:, a:b], tolerance, f"sequence {n}")
        assert_close(end, host(states)[n : n + 1], tolerance, f"state {n}")


@RULES
@pytest.mark.parametrize("T", [1, 130])
def test_C03_the_initial_state_counts_once_for_each_value_head(backend, rule, T, rng):
    """It was left out, counted twice, or sized by query heads (fla#351, sparkinfer PR#1071)."""
    p = with_states(rng, accuracy.inputs(rng, B=2, T=T, H=4, Hq=2, K=9, V=5))
    y, _ = run(rule, backend.arrays(p, "float32"))
    if T == 1 and rule == "linear":
        q, k = (np.repeat(p[n][:, 0], 2, 1) for n in ("q", "k"))
        g, b = (p[n][:, 0, :, None, None] for n in ("gate", "beta"))
        state = g * p["initial_state"] + b * k[..., None] * p["v"][:, 0, :, None]
        assert_close(y[:, 0], (q[..., None] * state).sum(-2), 2e-6, "y")
    p["initial_state"][...] = 0
    zero = backend.arrays(p, "float32")
    none = {n: x for n, x in zero.items() if n != "initial_state"}
    for a, b in zip(run(rule, zero), run(rule, none), strict=True):
        assert np.array_equal(host(a), host(b))


def test_O01_decay_comes_before_the_error(family):
    """Decaying after the error gives [.5, .5]; a gate of 1 hides it (fla#885)."""
    p = family.arrays(ones(2, 0.5, 0.5), "float32")
    assert host(cupy_gdelta.gated_delta_rule(**p)).ravel().tolist() == [0.5, 0.625]


def test_P02_a_state_beyond_float16(backend):
    """The state of float16 inputs must not overflow when y does (vllm#54308)."""
    x = np.ones((1, 64, 1, 24))
    p = {n: backend.array(a, "float16") for n, a in (("q", x), ("k", x), ("v", 100 * x))}
    y, state = cupy_gdelta.gated_linear_attention(**p, return_state=True)
    assert (host(state) == 6400).all()
    exact = 2400.0 * np.arange(1, 65)
    assert np.isposinf(host(y)[0, exact > 65520, 0]).all()
    fits = exact <= 65504
    assert_close(host(y)[0, fits, 0, 0], exact[fits], 6e-4, "what float16 can hold")
    scaled, _ = run("linear", p, "float16", scale=0.01)  # the way to ask for less
    assert host(scaled)[0, -1, 0, 0] == 1536


@RULES
def test_U01_no_state_is_left_over(backend, rule, rng):
    """An earlier call's state leaked into a call without one (llama.cpp#29092, vllm-metal#488)."""
    p = with_states(rng, accuracy.inputs(rng, T=70))
    huge = backend.arrays(p | {"initial_state": np.full((1, 2, 24, 24), 1e30)}, "float32")
    fresh = {n: x for n, x in huge.items() if n != "initial_state"}
    expected = run(rule, fresh)
    for _ in range(10):
        FUNCTIONS[rule](**huge, return_state=True)
        for a, b in zip(FUNCTIONS[rule](**fresh, return_state=True), expected, strict=True):
            assert np.array_equal(host(a), host(b))


@RULES
@pytest.mark.parametrize("B", [1, 2, 3, 4, 5, 7, 33])
def test_U03_every_entry_of_a_batch(backend, rule, B, rng):
    """One entry was corrupt from batch 3 on (omlx#2119, ik_llama.cpp PR#1933)."""
    p = with_states(rng, accuracy.inputs(rng, B=B, T=70, K=8, V=8))
    p = backend.arrays(p, "float32")
    y, state = run(rule, p)
    for b in range(B):
        alone, end = FUNCTIONS[rule](**{n: x[b : b + 1] for n, x in p.items()}, return_state=True)
        assert_close(alone, host(y)[b : b + 1], accuracy.TOLERANCE[rule, "float32"], f"y {b}")
        assert_close(end, host(state)[b : b + 1], accuracy.TOLERANCE[rule, "float32"], f"state {b}")


@RULES
def test_L04_one_long_head(backend, rule, rng):
    """NaN on a single long head with random gates (fla#122)."""
    p = with_states(rng, accuracy.inputs(rng, T=43884, H=1, K=64, V=64))
    run(rule, backend.arrays(p, "float32"))


@RULES
@pytest.mark.timeout(120)
def test_R03_one_long_sequence_among_short_ones(backend, rule, rng):
    """A long tail with an initial state never ended (flashinfer#3698)."""
    starts = np.cumsum([0, *[1] * 30, 20000, *[1] * 30])
    p = accuracy.inputs(rng, T=int(starts[-1]), H=2, K=16, V=16)
    p["initial_state"] = np.zeros((61, 2, 16, 16))
    run(rule, backend.arrays(p, "float32"), cu_seqlens=starts)


@RULES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_R04_a_prefix_may_be_cut_anywhere(backend, rule, dtype, rng):
    """Results depended on where a prefix was cut (sglang PR#13309); here by rounding."""
    p = backend.arrays(accuracy.inputs(rng, T=192), dtype)
    y, state = run(rule, p, dtype)
    for cut in (64, 128, 1, 50, 65, 191):
        head, middle = FUNCTIONS[rule](**{n: x[:, :cut] for n, x in p.items()}, return_state=True)
        tail = {n: x[:, cut:] for n, x in p.items()} | {"initial_state": middle}
        tail, end = FUNCTIONS[rule](**tail, return_state=True)
        joined = np.concatenate([host(head), host(tail)], 1)
        assert_close(joined, host(y), accuracy.TOLERANCE[rule, dtype], f"cut at {cut}")
        assert_close(end, host(state), accuracy.TOLERANCE[rule, dtype], f"state, cut at {cut}")


@RULES
@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"H": 0}, {"B": 0, "T": 0, "H": 0}], ids=str)
def test_Z01_nothing_to_do(family, rule, sizes, rng):
    """A grid of size zero aborts (sglang#31350, triton-ascend PR#1221)."""
    p = with_states(rng, accuracy.inputs(rng, **{"B": 2, "T": 3, "H": 2, "K": 4, "V": 5} | sizes))
    arrays = family.arrays(p, "float32")
    y, state = run(rule, arrays)
    assert tuple(y.shape) == p["v"].shape
    if sizes == {"T": 0}:
        assert np.array_equal(host(state), host(arrays["initial_state"]))
    arrays.pop("initial_state")
    assert not host(run(rule, arrays)[1]).any()


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1), (3, 3), (2, 3, 3, 1), (1, 3, 3), (2, 1, 3)])
def test_Z02_a_gate_of_another_shape_is_refused(family, shape, rng):
    """[B, T], [B, T, 1] or [T, H] were broadcast to something (sglang-kernel-npu PR#810)."""
    p = accuracy.inputs(rng, B=2, T=3, H=3, K=4, V=4)
    gate = family.array(np.ones(shape), "float32")
    with pytest.raises(
        ValueError, match=r"gate must have shape \(B, T, H\) with B, T, H = 2, 3, 3"
    ):
        cupy_gdelta.gated_delta_rule(**family.arrays(p, "float32") | {"gate": gate})


def test_Y01_a_void_reference_fails_the_test(rng):
    """A reference that is itself Inf or NaN made a test pass (llama.cpp PR#22794)."""
    p = accuracy.inputs(rng, T=64) | {"beta": None, "gate": None}
    p["k"] = rng.standard_normal(p["k"].shape)
    with pytest.raises(AssertionError, match="void reference"):
        run("delta", p, "float64")
    p["v"][0, 3] = np.nan
    with pytest.raises(AssertionError, match="void reference"):
        run("linear", p, "float64")
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(np.array([1.0, np.nan]), np.array([1.0, 1.0]), 1.0, "x")
    with pytest.raises(AssertionError, match=r"worst at \(1,\)"):
        assert_close(np.array([1.0, 1.1]), np.array([1.0, 1.0]), 1e-3, "x")


@RULES
@pytest.mark.parametrize("gate", accuracy.GATES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_Y02_every_gate_regime_with_keys_that_nearly_repeat(backend, rule, gate, dtype, rng):
    """One gate law in the tests hid faults (fla#891)."""
    p = with_states(rng, accuracy.inputs(rng, T=130, gate=gate, correlated=True))
    tolerance = accuracy.CORRELATED.get((rule, dtype))
    run(rule, backend.arrays(p, dtype), dtype, tolerance=tolerance)
