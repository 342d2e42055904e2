"""The public functions against the float64 reference, for every family of arrays and both rules."""

from __future__ import annotations

import numpy as np
import pytest
from compare import check, host

import cupy_gdelta
from cupy_gdelta import accuracy

FUNCTIONS = {
    "linear": cupy_gdelta.gated_linear_attention,
    "delta": cupy_gdelta.gated_delta_rule,
}
DTYPES = ("float16", "bfloat16", "float32", "float64")
RULES = pytest.mark.parametrize("rule", FUNCTIONS)


def problem(rng, **sizes):
    return accuracy.inputs(rng, **{"B": 2, "T": 70, "H": 2, "K": 24, "V": 24} | sizes)


def states(rng, p, N=None):
    """One initial state for each sequence."""
    (B, _, H, V), K = p["v"].shape, p["q"].shape[-1]
    return rng.standard_normal((B if N is None else N, H, K, V))


def check_all(rule, p, dtype, **options):
    return check(rule, FUNCTIONS[rule], p, dtype, **options)


# values


@RULES
@pytest.mark.parametrize("gate", accuracy.GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_in_every_gate_regime(family, rule, dtype, gate, rng):
    p = problem(rng, T=130, gate=gate)
    p["initial_state"] = states(rng, p)
    check_all(rule, family.arrays(p, dtype), dtype, what=gate)


@RULES
@pytest.mark.parametrize("T", [0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 200])
def test_every_length(backend, rule, T, rng):
    for dtype in ("float32", "bfloat16"):
        p = problem(rng, T=T, B=1, K=16, V=16)
        p["initial_state"] = states(rng, p)
        check_all(rule, backend.arrays(p, dtype), dtype, what=f"T={T} {dtype}")


SIZES = (1, 3, 8, 9, 24, 40, 64, 80, 96, 128, 192, 256)
PAIRS = [(n, n) for n in SIZES] + [(9, 24), (24, 9), (1, 256), (256, 1), (64, 128), (192, 40)]


@RULES
@pytest.mark.parametrize(("K", "V"), PAIRS)
def test_every_head_size(backend, rule, K, V, rng):
    for dtype in ("float32", "float16"):
        p = problem(rng, H=16 if K * V < 64 else 2, T=66, K=K, V=V)
        p["initial_state"] = states(rng, p)
        check_all(rule, backend.arrays(p, dtype), dtype, what=dtype)


@RULES
@pytest.mark.parametrize(("H", "Hq"), [(1, 1), (4, 2), (6, 1), (6, 3), (20, 20)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_heads(backend, rule, H, Hq, dtype, rng):
    p = problem(rng, H=H, Hq=Hq, K=8, V=6)
    p["initial_state"] = states(rng, p)
    check_all(rule, backend.arrays(p, dtype), dtype)


@RULES
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_nearly_repeat(backend, rule, dtype, rng):
    p = problem(rng, T=130, gate="0.9995", correlated=True)
    tolerance = accuracy.CORRELATED.get((rule, dtype))
    check_all(rule, backend.arrays(p, dtype), dtype, tolerance=tolerance)


@RULES
@pytest.mark.parametrize("scale", [0.3, -2, 0])
def test_scale(family, rule, scale, rng):
    p = family.arrays(problem(rng), "float32")
    check_all(rule, p, "float32", scale=scale)


@RULES
@pytest.mark.parametrize("precision", ["highest", "tf32"])
def test_precision(family, rule, precision, rng):
    p = family.arrays(problem(rng, T=200, K=64, V=64), "float32")
    kind = "tf32" if precision == "tf32" else "float32"
    check_all(rule, p, "float32", precision=precision, tolerance=accuracy.TOLERANCE[rule, kind])


@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_l2norm(family, dtype, rng):
    p = problem(rng)
    p |= {"q": p["q"] * 9, "k": p["k"] * 7}
    p["k"][0, 3] = 0  # the root must not divide by zero
    check_all("delta", family.arrays(p, dtype), dtype, qk_l2norm=True)


@RULES
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_gate(family, rule, dtype, rng):
    p = problem(rng, T=130, gate="zeros among")
    with np.errstate(divide="ignore"):
        p["log_gate"] = np.log(p.pop("gate"))
    p["log_gate"][0, 5, 1] = 0.3  # a gate above 1
    check_all(rule, family.arrays(p, dtype), dtype)


@RULES
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_beta_in_the_dtype_of_q(family, rule, dtype, rng):
    p = problem(rng)
    check_all(rule, {n: family.array(x, dtype) for n, x in p.items()}, dtype)


@RULES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_sequences(family, rule, dtype, rng):
    p = problem(rng, B=1, T=200, H=4, Hq=2, K=8, V=6)
    for starts in ([0, 5, 70, 71, 200], [0, 64, 128, 192], [0, 0, 200, 200], [0, 3], [0], [0, 0]):
        p["initial_state"] = states(rng, p, len(starts) - 1)
        y, _ = check_all(rule, family.arrays(p, dtype), dtype, cu_seqlens=starts, what=f"{starts}")
        assert not host(y)[:, starts[-1] :].any()


@RULES
def test_a_chunked_form_agrees_with_a_split_at_any_token(backend, rule, rng):
    p = problem(rng, B=1, T=130)
    whole = backend.arrays(p, "float32")
    y, end = FUNCTIONS[rule](**whole, return_state=True)
    for cut in (1, 63, 64, 100, 129):
        head = {n: x[:, :cut] for n, x in whole.items()}
        tail = {n: x[:, cut:] for n, x in whole.items()}
        first, state = FUNCTIONS[rule](**head, return_state=True)
        second, state = FUNCTIONS[rule](**tail, initial_state=state, return_state=True)
        joined = np.concatenate([host(first), host(second)], 1)
        assert accuracy.error(joined, host(y)) < accuracy.TOLERANCE[rule, "float32"]
        assert accuracy.error(host(state), host(end)) < accuracy.TOLERANCE[rule, "float32"]


# what is left out


def equal(a, b):
    return np.array_equal(host(a), host(b))


@RULES
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_left_out_is_one_or_zero_bit_for_bit(family, rule, dtype, rng):
    p = problem(rng, T=70)
    p |= {"one": np.ones((2, 70, 2)), "zero": np.zeros((2, 2, 24, 24))}
    p, function = family.arrays(p, dtype), FUNCTIONS[rule]
    one, zero = p.pop("one"), p.pop("zero")
    y, state = function(**p, return_state=True)
    assert equal(function(**p), y)
    from_zero = function(**p, initial_state=zero, return_state=True)
    for a, b in zip(from_zero, (y, state), strict=True):
        assert equal(a, b)
    for name in ("gate", "beta"):
        assert equal(function(**p | {name: None}), function(**p | {name: one}))


def test_the_users_own_case(backend, rng):
    """float32, 24 by 24, four heads, arguments by position, y alone."""
    p = backend.arrays(problem(rng, B=2, T=100, H=4), "float32")
    y = cupy_gdelta.gated_linear_attention(p["q"], p["k"], p["v"], p["gate"], p["beta"])
    assert y.dtype == np.float32
    expected = check_all("linear", p, "float32")[0]
    assert equal(y, expected)


# out


@RULES
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_filled_and_comes_back(family, rule, dtype, rng):
    p = family.arrays(problem(rng), dtype)
    expected, end = FUNCTIONS[rule](**p, return_state=True)
    nan = np.full((2, 70, 2, 24), np.nan)
    contiguous = family.array(nan, dtype)
    swapped = family.array(nan.swapaxes(1, 2), dtype).swapaxes(1, 2)
    wide = family.array(np.full((2, 70, 2, 64), np.nan), dtype)
    shifted = family.array(np.full(nan.size + 1, np.nan), dtype)[1:].reshape(nan.shape)
    for out in (contiguous, swapped, wide[..., 8:56:2], shifted):
        assert FUNCTIONS[rule](**p, out=out) is out
        assert equal(out, expected)
    y, state = FUNCTIONS[rule](**p, out=contiguous, return_state=True)
    assert y is contiguous
    assert equal(state, end)
    around = np.delete(host(wide), np.s_[8:56:2], axis=-1)
    assert np.isnan(around).all(), "written beside out"


@RULES
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_may_be_an_input(family, rule, name, rng):
    """y is computed elsewhere and copied, so that nothing is read after it was written."""
    p = problem(rng, T=3000)  # more than is read at once
    expected = FUNCTIONS[rule](**family.arrays(p, "float32"))
    p = family.arrays(p, "float32")
    assert FUNCTIONS[rule](**p, out=p[name]) is p[name]
    assert equal(p[name], expected)


@RULES
def test_out_may_overlap_an_input(family, rule, rng):
    p = problem(rng, T=3000)
    size, shape = p["v"].size, p["v"].shape
    expected = FUNCTIONS[rule](**family.arrays(p, "float32"))
    for at, to in ((0, 24), (24, 0)):
        values = np.zeros(size + 24)
        values[at : at + size] = p["v"].ravel()
        buffer = family.array(values, "float32")
        v, out = (buffer[i : i + size].reshape(shape) for i in (at, to))
        arrays = family.arrays(p, "float32") | {"v": v}
        assert FUNCTIONS[rule](**arrays, out=out) is out
        assert equal(out, expected)


# inputs


def layouts(family, x, dtype):
    """``x`` in the memory layouts that callers have: (name, array)."""
    axes = tuple(range(x.ndim))[::-1]
    reverse = family.array(x.transpose(axes), dtype)
    transpose = reverse.permute if family.name.startswith("torch") else reverse.transpose
    yield "Fortran", transpose(axes)
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 3))
    wide[..., 1:-2:2] = x
    yield "every second of wider rows", family.array(wide, dtype)[..., 1:-2:2]
    parent = np.zeros((*x.shape[:-1], x.shape[-1] + 8))
    parent[..., : x.shape[-1]] = x
    yield "the head of wider rows", family.array(parent, dtype)[..., : x.shape[-1]]
    heads = np.ascontiguousarray(x.swapaxes(1, 2))
    yield "heads before time", family.array(heads, dtype).swapaxes(1, 2)
    flat = np.concatenate([[0], x.ravel()])
    yield "one element off", family.array(flat, dtype)[1:].reshape(x.shape)
    if not family.name.startswith("torch"):
        yield "time backwards", family.array(x[:, ::-1].copy(), dtype)[:, ::-1]
        yield "last axis backwards", family.array(x[..., ::-1].copy(), dtype)[..., ::-1]


@RULES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_layout_of_every_argument(family, rule, dtype, rng):
    p = problem(rng, K=9, V=12)
    p["initial_state"] = states(rng, p)
    plain = family.arrays(p, dtype)
    expected = check_all(rule, plain, dtype)
    for name, x in p.items():
        kind = dtype if name in ("q", "k", "v") else "float32"
        for layout, array in layouts(family, x, kind):
            before = host(array).copy()
            got = FUNCTIONS[rule](**plain | {name: array}, return_state=True)
            for a, b in zip(got, expected, strict=True):
                assert equal(a, b), f"{name}: {layout}"
            assert np.array_equal(host(array), before), f"{name}: {layout} was written"


@RULES
def test_broadcast_inputs(family, rule, rng):
    """S02: stride 0 along any axis, and axes of size 1 with odd strides."""
    p = problem(rng, K=8, V=8)
    full = {n: x.shape for n, x in p.items()} | {"initial_state": (2, 2, 8, 8)}
    small = {
        "q": p["q"][:, :, :1],
        "k": p["k"][:1],
        "v": p["v"][:, :, :1],
        "gate": p["gate"][:1, :, :1],
        "beta": p["beta"][:1, :1, :1],
        "initial_state": np.full((1, 1, 8, 1), 0.5),
    }
    thin = family.arrays(small, "float32")
    thick = family.arrays(
        {n: np.broadcast_to(x, full[n]).copy() for n, x in small.items()}, "float32"
    )
    if family.name.startswith("torch"):
        thin = {n: x.expand(*full[n]) for n, x in thin.items()}
    else:
        library = pytest.importorskip("cupy") if family.on_gpu else np
        thin = {n: library.broadcast_to(x, full[n]) for n, x in thin.items()}
    expected = check_all(rule, thick, "float32")
    for a, b in zip(FUNCTIONS[rule](**thin, return_state=True), expected, strict=True):
        assert equal(a, b)


@RULES
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_never_written(family, rule, dtype, rng):
    p = problem(rng, H=4, Hq=2)
    p["initial_state"] = states(rng, p)
    p = family.arrays(p, dtype)
    before = {n: host(x).copy() for n, x in p.items()}
    FUNCTIONS[rule](**p, scale=0.5, return_state=True)
    for name, x in p.items():
        assert np.array_equal(host(x), before[name]), name


@RULES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_every_time(backend, rule, dtype, rng):
    p = backend.arrays(problem(rng, B=3, T=130, H=4, K=64, V=64), dtype)
    first = FUNCTIONS[rule](**p, return_state=True)
    assert np.isfinite(host(first[0])).all()
    for _ in range(20):
        again = FUNCTIONS[rule](**p, return_state=True)
        assert equal(again[0], first[0])
        assert equal(again[1], first[1])


# NaN and Inf


@RULES
@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "beta", "initial_state"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_nan_stays_in_its_sequence_and_head(backend, rule, name, bad, dtype, rng):
    """It shows in what depends on it, and reaches nobody else nor an earlier chunk."""
    p = problem(rng, B=3, T=200, H=3, K=8, V=8)
    p["initial_state"] = states(rng, p)
    clean = FUNCTIONS[rule](**backend.arrays(p, dtype), return_state=True)
    spoiled = {n: x.copy() for n, x in p.items()}
    spoiled[name][(1, 150, 2) if name != "initial_state" else (1, 2)] = bad
    got = FUNCTIONS[rule](**backend.arrays(spoiled, dtype), return_state=True)
    (y, state), (other_y, other_state) = ([host(x) for x in pair] for pair in (got, clean))
    mine = np.zeros((3, 200, 3), bool)
    mine[1, 0 if name == "initial_state" else 128 :, 2] = True
    assert np.array_equal(y[~mine], other_y[~mine])
    rows = np.ones((3, 3), bool)
    rows[1, 2] = False
    assert np.array_equal(state[rows], other_state[rows])
    t = 0 if name == "initial_state" else 150
    assert not np.isfinite(y[1, t, 2]).all()
    if name == "q":
        assert np.array_equal(state, other_state)
    else:
        assert not np.isfinite(state[1, 2]).all()
        assert not np.isfinite(y[1, -1, 2]).all()


@RULES
def test_a_nan_stays_in_its_packed_sequence(backend, rule, rng):
    p = problem(rng, B=1, T=200, K=8, V=8)
    starts = [0, 50, 100, 101, 200]
    clean = FUNCTIONS[rule](**backend.arrays(p, "float32"), cu_seqlens=starts, return_state=True)
    for n in (1, 2):
        spoiled = p | {"v": p["v"].copy()}
        spoiled["v"][:, starts[n] : starts[n + 1]] = np.nan
        arrays = backend.arrays(spoiled, "float32")
        y, state = FUNCTIONS[rule](**arrays, cu_seqlens=starts, return_state=True)
        others = np.r_[0 : starts[n], starts[n + 1] : 200]
        assert np.array_equal(host(y)[:, others], host(clean[0])[:, others])
        assert np.array_equal(np.delete(host(state), n, 0), np.delete(host(clean[1]), n, 0))
        assert np.isnan(host(y)[:, starts[n]]).all()


@RULES
@pytest.mark.parametrize("gate", ["one", "0.9995", "log"])
def test_errors_of_data_of_one_sign_do_not_add_up(backend, rule, gate, rng):
    """Roundings of equal numbers are equal, and their sum grows with T instead of its root."""
    T = 4096
    ones = np.ones((1, T, 1, 4))
    p = {"q": ones / 4, "k": ones / 2, "v": ones / 3, "beta": np.full((1, T, 1), 0.3)}
    if rule == "delta":
        p["beta"] = p["beta"] / 300  # so slow that the state keeps what it sums
    if gate == "log":
        p["log_gate"] = np.full((1, T, 1), -5e-4)
    else:
        p["gate"] = accuracy.gates(gate, (1, T, 1), rng)
    check_all(rule, backend.arrays(p, "float32"), "float32")
