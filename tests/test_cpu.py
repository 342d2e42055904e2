"""The CPU path against the float64 reference: every regime, size, layout and promise."""

from __future__ import annotations

import itertools
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from compare import REFERENCE, assert_close, bits, check, host

import cupy_gdelta
from cupy_gdelta import accuracy
from cupy_gdelta.cpu import blocks, pieces, steps, walk

FUNCTION = {
    "linear": cupy_gdelta.gated_linear_attention,
    "delta": cupy_gdelta.gated_delta_rule,
}
DTYPES = ("float16", "bfloat16", "float32", "float64")
C = blocks.CHUNK

both_rules = pytest.mark.parametrize("rule", FUNCTION)


def numpy_dtype(dtype: str):
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def rounded(arrays: dict, dtype: str) -> dict:
    """q, k, v in ``dtype``; gate, beta and state in the state dtype."""
    state = "float64" if dtype == "float64" else "float32"
    return {n: x.astype(numpy_dtype(dtype if n in "qkv" else state)) for n, x in arrays.items()}


def problem(rng, dtype="float32", state=True, **sizes) -> dict:
    arrays = accuracy.inputs(rng, **sizes)
    if state:
        B, _, H, V = arrays["v"].shape
        arrays["initial_state"] = rng.standard_normal((B, H, arrays["q"].shape[3], V))
    return rounded(arrays, dtype)


def same_bits(x, y) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


@pytest.fixture
def small_segments(monkeypatch):
    """Segments of few chunks, three threads, and no call too small for them."""
    monkeypatch.setattr(blocks, "BYTES", 1 << 17)
    monkeypatch.setattr(walk, "WORTH_A_THREAD", 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")


# --- against the reference


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [*accuracy.GATES, "above one"])
def test_every_dtype_and_gate(rule, dtype, gate, rng):
    named = "random" if gate == "above one" else gate
    arrays = problem(rng, dtype, B=2, T=200, H=4, Hq=2, K=24, V=40, gate=named)
    if gate == "above one":
        arrays["gate"][...] = rng.uniform(0.9, 1.1, arrays["gate"].shape)
    out = np.full(arrays["v"].shape, np.nan, arrays["v"].dtype)
    y, _ = check(rule, FUNCTION[rule], arrays, dtype, what=f"{dtype} {gate}", scale=0.7, out=out)
    assert y is out


@both_rules
@pytest.mark.parametrize("T", [0, 1, 2, 15, 31, 32, 33, 63, 64, 65, 200])
def test_lengths(rule, T, rng):
    check(rule, FUNCTION[rule], problem(rng, T=T, B=2), "float32", what=f"T={T}")


@both_rules
@pytest.mark.parametrize(
    ("K", "V"),
    [(1, 1), (3, 1), (1, 65), (24, 3), (64, 65), (65, 24), (256, 3), (3, 256), (256, 256)],
)
def test_head_dims(rule, K, V, rng):
    check(rule, FUNCTION[rule], problem(rng, T=70, K=K, V=V), "float32", what=f"K={K} V={V}")


@both_rules
@pytest.mark.parametrize(("H", "Hq"), [(1, 1), (6, 3), (12, 1), (30, 10), (40, 2)])
def test_grouped_heads(rule, H, Hq, rng):
    arrays = problem(rng, B=3, T=50, H=H, Hq=Hq, K=8, V=8)
    check(rule, FUNCTION[rule], arrays, "float32", what=f"H={H} Hq={Hq}")


@both_rules
@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize(("B", "H"), [(1, 1), (3, 4), (2, 12)])
def test_segment_boundaries(rule, shift, B, H, rng, small_segments):
    arrays = problem(rng, B=B, T=10 * C + shift, H=H, K=16, V=16)
    check(rule, FUNCTION[rule], arrays, "float32", what=f"B={B} H={H} shift={shift}")


@both_rules
@pytest.mark.parametrize("shape", [(0, 5, 2), (2, 5, 0), (2, 0, 2), (0, 0, 0)])
def test_nothing_to_do(rule, shape, rng):
    B, T, H = shape
    arrays = problem(rng, B=B, T=T, H=H, Hq=2, K=4, V=4)
    y, state = FUNCTION[rule](**arrays, return_state=True)
    assert y.shape == (B, T, H, 4)
    assert same_bits(state, arrays["initial_state"])


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
def test_correlated_keys(rule, dtype, rng):
    arrays = problem(rng, dtype, T=300, K=64, V=32, gate="one", correlated=True)
    tolerance = accuracy.CORRELATED.get((rule, dtype))
    check(rule, FUNCTION[rule], arrays, dtype, tolerance=tolerance, what=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_l2norm(dtype, rng):
    arrays = problem(rng, dtype, T=100, H=4, Hq=2)
    arrays["q"] *= numpy_dtype(dtype).type(7)
    arrays["k"] *= numpy_dtype(dtype).type(5)
    check("delta", FUNCTION["delta"], arrays, dtype, what=dtype, qk_l2norm=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_repeated(dtype, rng):
    """With gate = beta = 1 each token replaces what the one before has stored under the key."""
    v = rng.integers(-8, 9, (1, 64, 1, 24)).astype(numpy_dtype(dtype))
    k = np.zeros((1, 64, 1, 4), v.dtype)
    k[..., 2] = 1
    y, state = cupy_gdelta.gated_delta_rule(k, k, v, return_state=True)
    assert np.array_equal(host(y), host(v))
    assert np.array_equal(state[0, 0, 2], host(v)[0, -1, 0])
    key = rng.standard_normal(24)
    k = np.tile(key / np.linalg.norm(key), (1, 64, 1, 1)).astype(v.dtype)
    check("delta", FUNCTION["delta"], {"q": k, "k": k, "v": v}, dtype, what=dtype)


@both_rules
@pytest.mark.parametrize("gate", [0.99999, -0.9999])
def test_equal_gates_do_not_err_the_same_way(rule, gate, rng):
    """Thousands of chunks with the same gate: the rounding of its products must not add up."""
    arrays = problem(rng, B=1, T=40000, H=2, K=4, V=4, state=False)
    arrays["gate"][...] = gate
    arrays["initial_state"] = np.full((1, 2, 4, 4), 100, np.float32)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected = FUNCTION[rule](**wide, return_state=True)
    got = FUNCTION[rule](**arrays, return_state=True)
    for x, e, what in zip(got, expected, ("y", "state"), strict=True):
        assert_close(x, e, accuracy.TOLERANCE[rule, "float32"], what)


# --- arguments


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
def test_defaults(rule, dtype, rng):
    arrays = problem(rng, dtype, T=90)
    ones = np.ones_like(arrays["gate"])
    zeros = np.zeros_like(arrays["initial_state"])
    qkv = {n: arrays[n] for n in "qkv"}
    y, state = FUNCTION[rule](**qkv, return_state=True)
    same = FUNCTION[rule](**qkv, gate=ones, beta=ones, initial_state=zeros, return_state=True)
    assert same_bits(y, same[0])
    assert same_bits(state, same[1])


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_gate(rule, dtype, rng):
    arrays = problem(rng, dtype, T=90, gate="zeros among")
    with np.errstate(divide="ignore"):
        arrays["log_gate"] = np.log(arrays.pop("gate"))
    assert np.isneginf(arrays["log_gate"]).any()
    check(rule, FUNCTION[rule], arrays, dtype, what=dtype)


@both_rules
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gate_and_beta_of_16_bits(rule, dtype, rng):
    arrays = problem(rng, dtype, T=90)
    for name in ("gate", "beta"):
        arrays[name] = arrays[name].astype(numpy_dtype(dtype))
    check(rule, FUNCTION[rule], arrays, dtype, what=dtype)


@both_rules
@pytest.mark.parametrize(
    "ends",
    [
        [0],
        [0, 0],
        [0, 0, 5, 5, 5, 69, 69],
        [0, 1, 2, 3, 5, 7, 8, 40, 72, 104, 200],
        [0, 100, 200, 200, 300, 301, 302, 330],
    ],
)
def test_packed(rule, ends, rng, small_segments):
    T, N = ends[-1] + 7, len(ends) - 1
    arrays = problem(rng, T=T, H=4, Hq=2, K=8, V=12)
    arrays["initial_state"] = rng.standard_normal((N, 4, 8, 12)).astype(np.float32)
    for name in "qkv":
        arrays[name][:, ends[-1] :] = 1e30  # belongs to nothing
    out = np.full(arrays["v"].shape, np.nan, np.float32)
    y, state = check(
        rule, FUNCTION[rule], arrays, "float32", what=f"{ends}", cu_seqlens=ends, out=out
    )
    assert not y[:, ends[-1] :].any()
    for n, (a, b) in enumerate(itertools.pairwise(ends)):
        alone = {m: x[:, a:b] for m, x in arrays.items() if m != "initial_state"}
        initial = arrays["initial_state"][n : n + 1]
        own_y, own_state = FUNCTION[rule](**alone, initial_state=initial, return_state=True)
        assert_close(y[:, a:b], own_y, 1e-6, f"sequence {n} y")
        assert_close(state[n : n + 1], own_state, 1e-6, f"sequence {n} state")


@both_rules
def test_very_many_short_sequences(rule, rng):
    count = 65600
    q, k, v = (rng.standard_normal((1, count, 1, 4)).astype(np.float32) for _ in "qkv")
    beta = rng.random((1, count, 1)).astype(np.float32)
    y, state = FUNCTION[rule](
        q, k, v, beta=beta, cu_seqlens=np.arange(count + 1), return_state=True
    )
    write = (beta[..., None] * k).astype(np.float64)
    assert_close(y, (q * write).sum(-1, keepdims=True) * v, 1e-6, "y")
    assert_close(state, write[0, :, :, :, None] * v[0, :, :, None], 1e-6, "state")


# --- layouts


def layouts(x: np.ndarray) -> dict[str, np.ndarray]:
    """The same values behind other strides."""
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 1), x.dtype)
    wide[..., 1::2] = x
    readonly = x.copy()
    readonly.flags.writeable = False
    order = (1, 2, 0, *range(3, x.ndim))
    return {
        "transposed": np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order)),
        "reversed": np.ascontiguousarray(x[:, ::-1])[:, ::-1],
        "reversed in the last axis": np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        "every other": wide[..., 1::2],
        "column major": np.asfortranarray(x),
        "readonly": readonly,
    }


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", list(layouts(np.zeros((1, 1, 1, 1)))))
def test_strides(rule, dtype, layout, rng):
    arrays = problem(rng, dtype, B=2, T=2 * C + 1, H=4, Hq=2, K=8, V=12)
    plain = FUNCTION[rule](**arrays, return_state=True)
    views = {name: layouts(x)[layout] for name, x in arrays.items()}
    before = bits(*views.values())
    out = layouts(np.full(arrays["v"].shape, np.nan, arrays["v"].dtype))[layout]
    out = out if out.flags.writeable else None
    y, state = FUNCTION[rule](**views, return_state=True, out=out)
    assert_close(y, host(plain[0]), 1e-6 if dtype == "float32" else 4e-3, f"{layout} y")
    assert_close(state, host(plain[1]), 1e-6, f"{layout} state")
    assert bits(*views.values()) == before


@both_rules
@pytest.mark.parametrize("T", [3 * C, 3 * C + 5])
def test_out_inside_a_larger_array(rule, T, rng):
    arrays = problem(rng, B=2, T=T, H=3, K=8, V=12)
    expected = FUNCTION[rule](**arrays)
    room = np.full((2, T + 2, 5, 20), np.nan, np.float32)
    out = room[:, 1:-1, 1:4, 3:15]
    assert FUNCTION[rule](**arrays, out=out) is out
    assert_close(out, expected, 1e-6, "y")
    assert np.isnan(room).sum() == room.size - out.size


@both_rules
def test_broadcast_inputs(rule, rng):
    arrays = problem(rng, B=1, T=70, H=1)
    arrays = {n: np.broadcast_to(x, (3, *x.shape[1:])) for n, x in arrays.items()}
    y, _ = check(rule, FUNCTION[rule], arrays, "float32", what="broadcast")
    assert same_bits(y[0], y[2])


# --- promises


@both_rules
@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "beta"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_stays_where_it_belongs(rule, name, value, rng, small_segments):
    T, at = 7 * C + 3, 4 * C + 5
    arrays = problem(rng, B=3, T=T, H=4, K=8, V=8)
    y, state = FUNCTION[rule](**arrays, return_state=True)
    arrays[name][1, at, 2] = value
    bad_y, bad_state = FUNCTION[rule](**arrays, return_state=True)
    assert not np.isfinite(bad_y[1, at:, 2]).all()
    first = at // C * C
    assert same_bits(bad_y[1, :first, 2], y[1, :first, 2])
    bad_y[1, :, 2], bad_state[1, 2] = y[1, :, 2], state[1, 2]
    assert same_bits(bad_y, y)
    assert same_bits(bad_state, state)


@both_rules
def test_nan_stays_in_its_packed_sequence(rule, rng):
    ends = [0, 3, 6, 40, 41, 75, 140]
    arrays = problem(rng, T=150, H=2, state=False)
    y = FUNCTION[rule](**arrays, cu_seqlens=ends)
    for name in "qkv":
        arrays[name][:, [4, 60, 145]] = np.nan
    bad = FUNCTION[rule](**arrays, cu_seqlens=ends)
    for a, b in ((0, 3), (6, 41), (75, 140), (140, 150)):
        assert same_bits(bad[:, a:b], y[:, a:b])
    assert np.isnan(bad[:, 4:6]).all()


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 1, C // 2, C - 1, C, C + 7])
def test_gate_zero_forgets_exactly(rule, dtype, at, rng):
    arrays = problem(rng, dtype, B=2, T=2 * C, K=16, V=16)
    arrays["gate"][:, at] = 0
    y, state = FUNCTION[rule](**arrays, return_state=True)
    for name in "qkv":
        arrays[name][:, :at] = rng.standard_normal(arrays[name][:, :at].shape)
    arrays["initial_state"] += 1
    other = FUNCTION[rule](**arrays, return_state=True)
    assert np.array_equal(host(y[:, at:]), host(other[0][:, at:]))
    assert np.array_equal(state, other[1])


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [1, 5, C - 1, C, C + 1, 100])
def test_split_anywhere(rule, dtype, at, rng):
    arrays = problem(rng, dtype, B=2, T=150)
    y, state = FUNCTION[rule](**arrays, return_state=True)
    carried, parts = arrays.pop("initial_state"), []
    for some in (slice(0, at), slice(at, None)):
        piece = {n: x[:, some] for n, x in arrays.items()}
        part, carried = FUNCTION[rule](**piece, initial_state=carried, return_state=True)
        parts.append(part)
    tolerance = accuracy.TOLERANCE[rule, dtype]
    assert_close(np.concatenate(parts, 1), host(y), tolerance, "y")
    state_dtype = "float64" if dtype == "float64" else "float32"
    assert_close(carried, state, accuracy.TOLERANCE[rule, state_dtype], "state")


@both_rules
def test_same_bits_again_and_with_other_neighbours(rule, rng, small_segments, monkeypatch):
    arrays = problem(rng, B=3, T=10 * C, H=4)
    y, state = FUNCTION[rule](**arrays, return_state=True)
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        again = FUNCTION[rule](**arrays, return_state=True)
        assert same_bits(y, again[0])
        assert same_bits(state, again[1])
    for x in arrays.values():
        x[[0, 2]] = rng.standard_normal(x[[0, 2]].shape)
    other = FUNCTION[rule](**arrays, return_state=True)
    assert same_bits(y[1], other[0][1])
    assert same_bits(state[1], other[1][1])


@both_rules
def test_float16_overflow_is_silent(rule, rng):
    arrays = problem(rng, "float16", T=100, gate="one")
    arrays["v"] *= np.float16(1000)
    expected_y, expected_state = REFERENCE[rule](
        **{n: host(x) for n, x in arrays.items()}, scale=1e3
    )
    y, state = FUNCTION[rule](**arrays, return_state=True, scale=1e3)
    assert np.array_equal(np.isinf(y), np.abs(expected_y) >= 65520)
    assert_close(state, expected_state, accuracy.TOLERANCE[rule, "float32"], "state")


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_does_not_grow_with_time(rule, dtype, rng, monkeypatch):
    monkeypatch.setattr(blocks, "BYTES", 1 << 20)

    def peak(T: int) -> int:
        x = np.zeros((1, T, 4, 16), numpy_dtype(dtype))
        gate, out = np.ones((1, T, 4), np.float32), np.empty_like(x)
        tracemalloc.start()
        FUNCTION[rule](x, x, x, gate, gate, out=out)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    FUNCTION[rule](*(np.zeros((1, 9, 4, 16), numpy_dtype(dtype)) for _ in "qkv"))
    short = peak(8192)
    assert peak(65536) < 1.2 * short + 100_000


# --- gates above one


def step_loop(rule, q, k, v, gate, beta, initial_state=None):
    """One token after the other in the dtype of q, as the caller would write it."""
    repeat = v.shape[2] // q.shape[2]
    q, k = (np.repeat(x, repeat, 2) for x in (q, k))
    B, _, H, V = v.shape
    s = np.zeros((B, H, q.shape[3], V), q.dtype) if initial_state is None else initial_state.copy()
    y = np.zeros_like(v)
    with np.errstate(all="ignore"):
        for t in range(v.shape[1]):
            s *= gate[:, t, :, None, None]
            u = v[:, t]
            if rule == "delta":
                u = u - np.einsum("bhk,bhkv->bhv", k[:, t], s)
            s += (beta[:, t, :, None] * k[:, t])[..., None] * u[..., None, :]
            y[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], s)
    return y, s


def as_step_by_step(rule, arrays, what=""):
    """As the loop in the same dtype: finite in the same places, and close in every token."""
    expected = step_loop(rule, **arrays)
    got = FUNCTION[rule](**arrays, return_state=True)
    tolerance = 1e-12 if got[0].dtype == np.float64 else 1e-5
    for x, e, name, axes in zip(got, expected, ("y", "state"), (-1, (-2, -1)), strict=True):
        finite = np.isfinite(e)
        assert np.array_equal(np.isfinite(x), finite), f"{what} {name}"
        peak = np.abs(e).max(axes, keepdims=True, where=finite, initial=0)
        x, e = (np.divide(a, peak, where=finite & (peak > 0), out=a.copy()) for a in (x, e))
        assert_close(x[finite], e[finite], tolerance, f"{what} {name}")
    return got


LARGE = {
    "twice 1e20": [1e20, 1e20],
    "twice 1e20, then 0": [1e20, 1e20, 0],
    "three times 1e13, then 0": [1e13, 1e13, 1e13, 0],
    "down and up": [1e-30, 1e-30, 1e30, 1e30],
    "3e38": [3e38],
    "negative": [-1e25, -1e25, 1, -1e25],
}


@both_rules
@pytest.mark.parametrize("gates", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("T", [8, C, 3 * C + 5])
@pytest.mark.parametrize("first", [0, 3, C - 2])
def test_large_gates_on_a_state_of_zero(rule, gates, dtype, T, first):
    if dtype == "float64":  # as far beyond its range
        gates = [np.sign(g) * np.abs(g) ** 8 for g in gates]
    ones = np.ones((1, T, 1, 1), dtype)
    v, gate = ones.copy(), np.ones((1, T, 1), dtype)
    v[:, : first + 4] = 0
    gate[0, first : first + len(gates), 0] = gates[: max(0, T - first)]
    arrays = {"q": ones, "k": ones, "v": v, "gate": gate, "beta": ones[..., 0]}
    y, state = as_step_by_step(rule, arrays)
    assert np.isfinite(y).all()
    count = np.arange(1, T - first - 3)
    expected = count if rule == "linear" else np.ones_like(count)
    assert np.array_equal(y[0, first + 4 :, 0, 0], expected)
    if expected.size:
        assert state.item() == expected[-1]


def with_large_gates(rng, dtype="float32", largest=1e12, **sizes) -> dict:
    """Gates far above one here and there, and far below one or 0 after them."""
    arrays = problem(rng, dtype, **sizes)
    gate = arrays["gate"]
    T = gate.shape[1]
    for b, h in np.ndindex(gate.shape[0], gate.shape[2]):
        for t in 4 * rng.choice(T // 4, T // 8, replace=False):
            large = 10 ** rng.uniform(0, np.log10(largest), 2) * rng.choice([-1, 1], 2)
            gate[b, t : t + 4, h] = [*large, *(rng.choice([0, 1]) / large)]
    return arrays


@both_rules
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("T", "B", "H", "Hq"), [(9, 1, 2, 2), (7 * C + 3, 2, 6, 2), (90, 3, 8, 1)])
def test_random_large_gates(rule, dtype, T, B, H, Hq, rng, small_segments):
    largest = 1e12 if dtype == "float32" else 1e100
    arrays = with_large_gates(rng, dtype, largest, B=B, T=T, H=H, Hq=Hq, K=12, V=20)
    as_step_by_step(rule, arrays)
    as_step_by_step(rule, {n: x for n, x in arrays.items() if n != "initial_state"})


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_gates_against_the_reference(rule, dtype, rng):
    """Peaks of 1e4 from products of 1e36 and more, for a state that was forgotten before."""
    arrays = problem(rng, dtype, B=2, T=100, H=4, Hq=2, K=16, V=16)
    gate = arrays["gate"]
    gate[:, [5, 40, 41, 70]] = 0
    arrays["v"][:, 5:9] = 0
    gate[:, 6:9] = 1e18
    arrays["v"][:, 40:43] = 0
    gate[:, 42] = -3e38
    arrays["v"][:, 70:74] = 0
    gate[:, 71:74] = [[[1e30], [1e-30], [1e30]]]
    check(rule, FUNCTION[rule], arrays, dtype, what=dtype)


@both_rules
def test_gate_of_two_everywhere(rule, rng):
    arrays = problem(rng, T=110, H=2, K=24, V=8)
    arrays["gate"][...] = 2
    y, _ = as_step_by_step(rule, arrays)
    assert np.isfinite(y).all()
    assert np.abs(y).max() > 1e20


def test_long_keys_on_a_state_of_zero(rng):
    """The delta rule multiplies a state along a key by 1 - beta k.k, which is -99 here."""
    ones = np.ones((1, 3 * C, 1, 4), np.float32)
    v = rng.standard_normal(ones.shape).astype(np.float32)
    k = 5 * ones
    v[:, : C + 5], k[:, C + 5 :] = 0, 0.5
    arrays = {"q": ones, "k": k, "v": v, "gate": ones[..., 0], "beta": ones[..., 0]}
    y, _ = as_step_by_step("delta", arrays)
    assert np.isfinite(y).all()


@both_rules
def test_large_log_gates(rule, rng):
    """e^100 is no float32, but what it makes of a small state is."""
    arrays = problem(rng, T=70, H=2, K=8, V=8, gate="one")
    log_gate = np.log(arrays.pop("gate"))
    log_gate[:, 20:23] = [[[-70], [100], [-30]]]
    arrays["v"][:, 20:23] = 0
    arrays["q"][:, 21] = 0
    check(rule, FUNCTION[rule], arrays | {"log_gate": log_gate}, "float32", what="log gates")


@both_rules
@pytest.mark.parametrize("ends", [[0, 9, 9, 18, 60, 200], [0, 40, 80, 81, 121, 230]])
def test_large_gates_in_packed_sequences(rule, ends, rng, small_segments):
    arrays = with_large_gates(rng, T=ends[-1] + 3, H=4, Hq=2, K=8, V=12, state=False)
    y, state = FUNCTION[rule](**arrays, cu_seqlens=ends, return_state=True)
    for n, (a, b) in enumerate(itertools.pairwise(ends)):
        own_y, own_state = step_loop(rule, **{m: x[:, a:b] for m, x in arrays.items()})
        assert np.isfinite(own_y).all()
        assert_close(y[:, a:b], own_y, 5e-6, f"sequence {n} y")
        assert_close(state[n : n + 1], own_state, 5e-6, f"sequence {n} state")


@both_rules
@pytest.mark.parametrize("layout", list(layouts(np.zeros((1, 1, 1, 1)))))
def test_large_gates_and_strides(rule, layout, rng):
    arrays = with_large_gates(rng, "bfloat16", B=2, T=2 * C + 9, H=4, Hq=2, K=8, V=12)
    plain = FUNCTION[rule](**arrays, return_state=True)
    views = {name: layouts(x)[layout] for name, x in arrays.items()}
    out = layouts(np.full(arrays["v"].shape, np.nan, arrays["v"].dtype))[layout]
    y, state = FUNCTION[rule](**views, return_state=True, out=out if out.flags.writeable else None)
    assert_close(y, host(plain[0]), 4e-3, "y")
    assert_close(state, host(plain[1]), 1e-5, "state")


@both_rules
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_gates_are_nobody_elses(rule, dtype, rng, small_segments):
    """The other heads and batch entries keep their bits, whoever of them has large gates."""
    arrays = problem(rng, dtype, B=3, T=7 * C + 3, H=4, K=8, V=8)
    y, state = FUNCTION[rule](**arrays, return_state=True)
    spoiled = with_large_gates(rng, dtype, B=3, T=7 * C + 3, H=4, K=8, V=8)["gate"]
    own, before = np.zeros((3, 4), bool), None
    for more in [(1, 2), (1, 1), (0, 0), (2, 3)]:
        own[more] = True
        gate = np.where(own[:, None], spoiled, arrays["gate"])
        other_y, other_state = FUNCTION[rule](**arrays | {"gate": gate}, return_state=True)
        for b, h in np.argwhere(~own):
            assert same_bits(other_y[b, :, h], y[b, :, h])
            assert same_bits(other_state[b, h], state[b, h])
        neighbours = bits(other_y[1, :, 2], other_state[1, 2])
        assert before in (None, neighbours)
        before = neighbours


@both_rules
@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "beta"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_among_large_gates(rule, name, value, rng):
    arrays = with_large_gates(rng, B=2, T=4 * C, H=2, K=8, V=8)
    y, state = FUNCTION[rule](**arrays, return_state=True)
    arrays[name][1, 2 * C + 5, 1] = value
    bad_y, bad_state = FUNCTION[rule](**arrays, return_state=True)
    assert not np.isfinite(bad_y[1, 2 * C + 5, 1]).all()
    assert same_bits(bad_y[1, : 2 * C, 1], y[1, : 2 * C, 1])
    bad_y[1, :, 1], bad_state[1, 1] = y[1, :, 1], state[1, 1]
    assert same_bits(bad_y, y)
    assert same_bits(bad_state, state)


@both_rules
def test_only_large_gates_go_step_by_step(rule, rng, monkeypatch):
    calls = []
    loop = steps.loop
    monkeypatch.setattr(steps, "loop", lambda *x: calls.append(len(x[1])) or loop(*x))
    arrays = problem(rng, B=2, T=4 * C, H=4, K=8, V=8)
    for gates in (*accuracy.GATES, "above one"):
        gate = arrays["gate"]
        named = "one" if gates == "above one" else gates
        arrays["gate"] = accuracy.gates(named, gate.shape, rng).astype(np.float32)
        if gates == "above one":
            arrays["gate"][...] = rng.uniform(0.5, 1.5, gate.shape)
        for name in arrays:
            for value in (np.nan, np.inf):
                some = arrays | {name: arrays[name].copy()}
                some[name].flat[7] = value
                if value == np.inf and name in ("k", "gate", "beta"):
                    continue  # as large as can be
                FUNCTION[rule](**some)
        FUNCTION[rule](**arrays)
        assert not calls, gates
    arrays["gate"][1, C + 3 : C + 5, 2] = 1e20
    arrays["gate"][0, C + 3 : C + 5, 3] = 1e20
    FUNCTION[rule](**arrays)
    assert sum(calls) == 2


def test_bfloat16_rounding():
    """To nearest, ties to even, infinities kept, NaN of any payload still NaN."""
    bits = np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32)
    bits[:4] = 0x3F808000, 0x3F818000, 0x7FFFFFFF, 0x7F800001
    x = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
        got = pieces.bfloat16_bits(x.copy()).view(ml_dtypes.bfloat16)
    bad = np.isnan(x)
    assert np.array_equal(np.isnan(got), bad)
    assert same_bits(got[~bad], expected[~bad])


def test_speed_example(capsys):
    pytest.importorskip("rich")
    from examples import speed

    assert speed.main(["--shape", "1,40,2,8,4", "--repeat", "1"]) == 0
    assert "cupy_gdelta" in capsys.readouterr().out
