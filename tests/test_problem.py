"""Every refusal: its kind, its text, and that it comes before any work."""

from __future__ import annotations

import decimal
import fractions
import re

import numpy as np
import pytest

import cupy_gdelta
from cupy_gdelta import problem

B, T, H, HQ, K, V = 2, 6, 4, 2, 5, 3
NAMES = ("gated_linear_attention", "gated_delta_rule")
FORM = re.compile(r"(gated_linear_attention|gated_delta_rule): \w+ must .+; got .+")


def good(dtype="float32") -> dict:
    """Arguments that are accepted; each case below spoils one of them."""
    q = np.ones((B, T, HQ, K), dtype)
    v = np.ones((B, T, H, V), dtype)
    return {"q": q, "k": q.copy(), "v": v, "gate": v[..., 0].copy(), "beta": v[..., 0].copy()}


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def one_entry() -> dict:
    """The same with B = 1."""
    return {name: x[:1] for name, x in good().items()} | {"out": None}


def strided(shape, strides):
    buffer = np.zeros(1000, np.float32)
    return np.lib.stride_tricks.as_strided(buffer, shape, [4 * s for s in strides])


def unaligned(*shape):
    return zeros(4 * int(np.prod(shape)) + 1, dtype="uint8")[1:].view("float32").reshape(shape)


SHAPES = [
    ({"q": zeros(T, HQ, K)}, "q must have shape (B, T, Hq, K); got (6, 2, 5)"),
    ({"q": zeros()}, "q must have shape (B, T, Hq, K); got ()"),
    (
        {"k": zeros(B, T, HQ, K + 1)},
        "k must have the shape of q, (B, T, Hq, K) = (2, 6, 2, 5); got (2, 6, 2, 6)",
    ),
    (
        {"k": zeros(B, T, H, K)},
        "k must have the shape of q, (B, T, Hq, K) = (2, 6, 2, 5); got (2, 6, 4, 5)",
    ),
    (
        {"v": zeros(B, T - 1, H, V)},
        "v must have shape (B, T, H, V) with B, T = 2, 6 from q; got (2, 5, 4, 3)",
    ),
    (
        {"v": zeros(T, H, V)},
        "v must have shape (B, T, H, V) with B, T = 2, 6 from q; got (6, 4, 3)",
    ),
    (
        {"v": zeros(B, T, 3, V)},
        "v must have a multiple of the 2 heads of q and k; got 3 heads in (2, 6, 3, 3)",
    ),
    (
        {"v": zeros(B, T, 1, V)},
        "v must have a multiple of the 2 heads of q and k; got 1 heads in (2, 6, 1, 3)",
    ),
    (
        {"q": zeros(B, T, 0, K), "k": zeros(B, T, 0, K)},
        "v must have a multiple of the 0 heads of q and k; got 4 heads in (2, 6, 4, 3)",
    ),
    # H02: a head too wide for the kernels, or no head at all
    (
        {"q": zeros(B, T, HQ, 257), "k": zeros(B, T, HQ, 257)},
        "q must have a last axis K of 1 to 256; got 257",
    ),
    (
        {"q": zeros(B, T, HQ, 0), "k": zeros(B, T, HQ, 0)},
        "q must have a last axis K of 1 to 256; got 0",
    ),
    ({"v": zeros(B, T, H, 300)}, "v must have a last axis V of 1 to 256; got 300"),
    ({"v": zeros(B, T, H, 0)}, "v must have a last axis V of 1 to 256; got 0"),
    # Z02: gates of another rank, or with the axes in another order
    *(
        (
            {label: zeros(*shape)},
            f"{label} must have shape (B, T, H) with B, T, H = 2, 6, 4; got {shape}",
        )
        for label in ("gate", "beta")
        for shape in [(B, T), (B, T, 1), (T, H), (B, H, T), (B, T, H, 1), (1, T, H), (B, T, HQ)]
    ),
    (
        {"gate": None, "log_gate": zeros(B, T)},
        "log_gate must have shape (B, T, H) with B, T, H = 2, 6, 4; got (2, 6)",
    ),
    *(
        (
            {"initial_state": zeros(*shape)},
            f"initial_state must have shape (N, H, K, V) with N, H, K, V = 2, 4, 5, 3; got {shape}",
        )
        for shape in [(1, H, K, V), (B, HQ, K, V), (B, H, V, K), (H, K, V)]
    ),
    *(
        (
            {"out": zeros(*shape)},
            f"out must have shape (B, T, H, V) with B, T, H, V = 2, 6, 4, 3; got {shape}",
        )
        for shape in [(B, T, HQ, V), (B, H, T, V), (B, T, H * V)]
    ),
]

DTYPES = [
    *(
        (
            {"q": zeros(B, T, HQ, K, dtype=dtype)},
            f"q must have dtype float16, bfloat16, float32 or float64; got {dtype}",
        )
        for dtype in ("int64", "uint8", "bool", "complex64", "object")
    ),
    (
        {"q": zeros(B, T, HQ, K, dtype="longdouble")},
        "q must have dtype float16, bfloat16, float32 or float64; "
        f"got {np.dtype('longdouble').name}",
    ),
    (
        {"q": zeros(B, T, HQ, K, dtype=[("a", "f4"), ("b", "f4")])},
        "q must have dtype float16, bfloat16, float32 or float64; got void64",
    ),
    (
        {"k": zeros(B, T, HQ, K, dtype="float64")},
        "k must have dtype float32 for q of float32; got float64",
    ),
    (
        {"v": zeros(B, T, H, V, dtype="float16")},
        "v must have dtype float32 for q of float32; got float16",
    ),
    *(
        (
            {"gate": None, label: zeros(B, T, H, dtype=dtype)},
            f"{label} must have dtype float32 for q of float32 "
            f'(convert it: {label}.astype("float32")); got {dtype}',
        )
        for label in ("gate", "log_gate", "beta")
        for dtype in ("float64", "float16", "int32")
    ),
    (
        {"initial_state": zeros(B, H, K, V, dtype="float64")},
        "initial_state must have dtype float32 for q of float32 "
        '(convert it: initial_state.astype("float32")); got float64',
    ),
    (
        {"out": zeros(B, T, H, V, dtype="float64")},
        "out must have dtype float32 for q of float32; got float64",
    ),
]

KINDS = [
    *(
        (
            {label: value},
            f"{label} must be an array (NumPy, CuPy, torch or any object with __dlpack__); "
            f"got {kind}",
        )
        for label in ("q", "k", "v")
        for value, kind in [(None, "NoneType"), ([[[[1.0]]]], "list"), (1.0, "float")]
    ),
    *(
        (
            {"gate": None, label: value},
            f"{label} must be an array of shape (B, T, H), not a number; got {kind}",
        )
        for label in ("gate", "log_gate", "beta")
        for value, kind in [(0.9, "float"), (1, "int"), (np.float32(0.9), "float32")]
    ),
    (
        {"gate": [[[0.9]]]},
        "gate must be an array (NumPy, CuPy, torch or any object with __dlpack__); got list",
    ),
    (
        {"initial_state": np.float32(0)},
        "initial_state must be an array (NumPy, CuPy, torch or any object with __dlpack__); "
        "got float32",
    ),
    (
        {"q": np.ma.masked_array(zeros(B, T, HQ, K), True)},
        "q must be a plain array, for its mask would be ignored; got MaskedArray",
    ),
]

OUT = [
    (
        {"out": np.broadcast_to(zeros(1, 1, 1, V), (B, T, H, V))},
        "out must be writable; got a read-only array",
    ),
    (
        {"out": strided((B, T, H, V), (0, 12, 3, 1))},
        "out must have memory of its own for each element; "
        "got strides (0, 12, 3, 1) for shape (2, 6, 4, 3)",
    ),
    (
        {"out": strided((B, T, H, V), (72, 3, 3, 1))},
        "out must have memory of its own for each element; "
        "got strides (72, 3, 3, 1) for shape (2, 6, 4, 3)",
    ),
    (
        {"out": zeros(B, T, H, V, dtype=">f4")},
        "out must be aligned and in native byte order; got one that is not",
    ),
    ({"out": unaligned(B, T, H, V)}, "out must be aligned and in native byte order; got one"),
]

FLAGS = [
    *(
        ({"precision": value}, f"precision must be one of highest, tf32; got {kind}")
        for value, kind in [(None, "NoneType"), (32, "int"), (np.array([1, 2]), "ndarray")]
    ),
    *(
        ({"return_state": value}, f"return_state must be True or False; got {kind}")
        for value, kind in [
            (None, "NoneType"),
            (1, "int"),
            ("no", "str"),
            (np.array([1, 2]), "ndarray"),
            (np.array(True), "ndarray"),
        ]
    ),
]

OPTIONS = [
    (
        {"log_gate": zeros(B, T, H)},
        "gate must be given in one form, as gate or as log_gate; got both",
    ),
    ({"precision": "TF32"}, "precision must be one of highest, tf32; got 'TF32'"),
    *(
        ({"scale": scale}, f"scale must be finite as a float; got {kind} beyond its range")
        for scale, kind in [(10**400, "int"), (fractions.Fraction(-(10**400), 3), "Fraction")]
    ),
    (
        {"cu_seqlens": np.array([0, 2**63 + 5], np.uint64), **one_entry()},
        f"cu_seqlens must end at T = 6 or before; got {2**63 + 5}",
    ),
    (
        {"cu_seqlens": np.array([0, 2**63 + 5, 3], np.uint64), **one_entry()},
        f"cu_seqlens must not decrease; got {2**63 + 5}, 3 at 1",
    ),
    *(
        ({"scale": scale}, f"scale must be a real number; got {text}")
        for scale, text in [
            (None, "NoneType"),
            ("0.5", "str"),
            (b"1", "bytes"),
            (bytearray(b"1"), "bytearray"),
            (True, "bool"),
            (np.True_, type(np.True_).__name__),
            (1j, "complex"),
            (np.complex64(1), "complex64"),
            (np.array(True), "ndarray of bool"),
            (np.array("1"), "ndarray of str"),
            (np.array([0.5]), "ndarray"),
            ([0.5], "list"),
            (decimal.Decimal(1), "Decimal"),
        ]
    ),
    *(
        ({"scale": scale}, f"scale must be finite; got {float(scale)}")
        for scale in (float("nan"), float("inf"), -np.inf, np.float32("nan"), np.array(np.inf))
    ),
]

CASES = [
    *((ValueError, *case) for case in SHAPES),
    *((TypeError, *case) for case in [*DTYPES, *KINDS, *FLAGS]),
    *((ValueError, *case) for case in [*OUT, *OPTIONS]),
]


def label(value):
    return value.__name__ if isinstance(value, type) else None


@pytest.mark.parametrize(("kind", "spoiled", "text"), CASES, ids=label)
def test_refusal(kind, spoiled, text):
    if "a real number" in text:
        kind = TypeError
    arguments = good() | {"out": np.full((B, T, H, V), 7, "float32")} | spoiled
    out = arguments["out"]
    before = None if out is None else out.copy()
    for name in NAMES:
        with pytest.raises(kind) as caught:
            getattr(cupy_gdelta, name)(**arguments)
        assert type(caught.value) is kind
        assert str(caught.value).startswith(f"{name}: {text}")
        assert FORM.fullmatch(str(caught.value))
        assert np.array_equal(out, before), "out was written"


def test_what_the_cases_spoil_is_accepted():
    for name in NAMES:
        y = getattr(cupy_gdelta, name)(**good())
        assert np.isfinite(y).all()


@pytest.mark.parametrize("size", [1, 256])
def test_the_smallest_and_the_largest_head_are_accepted(size):
    x = np.ones((1, 2, 1, size), np.float32) / size
    for name in NAMES:
        assert getattr(cupy_gdelta, name)(x, x, x).shape == (1, 2, 1, size)


def test_qk_l2norm_belongs_to_the_delta_rule():
    with pytest.raises(TypeError, match="qk_l2norm"):
        cupy_gdelta.gated_linear_attention(**good(), qk_l2norm=True)


@pytest.mark.parametrize("value", ["no", 1, None, np.array([1, 2])])
def test_a_flag_is_a_bool(value):
    text = f"qk_l2norm must be True or False; got {type(value).__name__}"
    with pytest.raises(TypeError, match=text):
        cupy_gdelta.gated_delta_rule(**good(), qk_l2norm=value)


def test_a_flag_may_be_a_bool_of_numpy():
    for value in (True, np.True_):
        got = cupy_gdelta.gated_delta_rule(**good(), qk_l2norm=value, return_state=value)
        assert len(got) == 2
        assert isinstance(
            cupy_gdelta.gated_delta_rule(**good(), qk_l2norm=np.False_, return_state=np.False_),
            np.ndarray,
        )


def test_how_to_convert_a_tensor():
    torch = pytest.importorskip("torch")
    p = {n: torch.from_numpy(x) for n, x in good().items()}
    text = (
        r"beta must have dtype float32 .* \(convert it: beta\.to\(torch\.float32\)\); got float64"
    )
    with pytest.raises(TypeError, match=text):
        cupy_gdelta.gated_delta_rule(**p | {"beta": p["beta"].double()})


def test_options_are_given_by_name():
    p = good()
    with pytest.raises(TypeError, match="positional"):
        cupy_gdelta.gated_delta_rule(p["q"], p["k"], p["v"], p["gate"], p["beta"], 0.5)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_gates_come_in_the_dtype_of_q_or_in_float32(dtype):
    p = good(dtype)
    for other in (dtype, "float32"):
        p["gate"], p["beta"] = (np.ones((B, T, H), other) for _ in range(2))
        cupy_gdelta.gated_delta_rule(**p)
    wrong = "float32" if dtype == "float16" else "float16"
    with pytest.raises(TypeError, match=f"v must have dtype {dtype} for q of {dtype}; got {wrong}"):
        cupy_gdelta.gated_delta_rule(**p | {"v": p["v"].astype(wrong)})
    p["beta"] = p["beta"].astype("int32")
    expected = f"beta must have dtype float32 or {dtype} for q of {dtype} .*; got int32"
    with pytest.raises(TypeError, match=expected):
        cupy_gdelta.gated_delta_rule(**p)


def test_families_are_not_mixed():
    torch = pytest.importorskip("torch")
    strict = pytest.importorskip("array_api_strict")
    for name in NAMES:
        for argument in ("k", "v", "gate", "beta"):
            p = good()
            p[argument] = torch.from_numpy(p[argument])
            text = (
                f"{name}: {argument} must be a NumPy array on the CPU, as q is; got a torch tensor"
            )
            with pytest.raises(TypeError, match=text):
                getattr(cupy_gdelta, name)(**p)
    p = {n: torch.from_numpy(x) for n, x in good().items()}
    for other, kind in [
        (np.zeros((B, T, H, V), np.float32), "a NumPy array on the CPU"),
        (
            strict.zeros((B, T, H, V), dtype=strict.float32),
            "an array of array_api_strict on the CPU",
        ),
    ]:
        text = f"out must be a torch tensor on the CPU, as q is; got {kind}"
        with pytest.raises(TypeError, match=text):
            cupy_gdelta.gated_delta_rule(**p, out=other)


@pytest.mark.gpu
def test_devices_are_not_mixed():
    import cupy

    with pytest.raises(
        TypeError, match="k must be a CuPy array on CUDA device 0, as q is; got a N"
    ):
        cupy_gdelta.gated_delta_rule(**good() | {"q": cupy.asarray(good()["q"])})
    torch = pytest.importorskip("torch")
    p = {n: torch.from_numpy(x) for n, x in good().items()}
    text = "gate must be a torch tensor on the CPU, as q is; got a torch tensor on CUDA device 0"
    with pytest.raises(TypeError, match=text):
        cupy_gdelta.gated_delta_rule(**p | {"gate": p["gate"].cuda()})
    p = {n: x.cuda() for n, x in p.items()}
    with pytest.raises(TypeError, match="out must be a torch tensor on CUDA device 0, as q is"):
        cupy_gdelta.gated_delta_rule(**p, out=cupy.zeros((B, T, H, V), "float32"))


def scales():
    yield from (0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), np.longdouble(0.5))
    yield from (np.array(0.5), np.array(0.5, ">f8"))
    torch, strict = pytest.importorskip("torch"), pytest.importorskip("array_api_strict")
    yield from (torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16), strict.asarray(0.5))


def test_every_kind_of_scale_gives_one_answer():
    p = good()
    expected = cupy_gdelta.gated_delta_rule(**p, scale=0.5)
    assert np.array_equal(expected, cupy_gdelta.gated_delta_rule(**p) * np.float32(0.5))
    for scale in scales():
        assert np.array_equal(cupy_gdelta.gated_delta_rule(**p, scale=scale), expected), scale
    for scale in (2, np.int8(2), np.uint64(2), np.array(2)):
        assert np.array_equal(cupy_gdelta.gated_delta_rule(**p, scale=scale), 4 * expected), scale


def test_a_scale_that_requires_grad_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"scale must be a number .*; got one that requires grad"):
        cupy_gdelta.gated_delta_rule(**good(), scale=torch.ones((), requires_grad=True))


def test_problem_knows_its_sizes_and_its_state():
    p = good("float16")
    x = problem.check("f", "delta", *p.values(), return_state=np.True_)
    assert (x.B, x.T, x.H, x.Hq, x.K, x.V, x.N) == (B, T, H, HQ, K, V, B)
    assert (x.dtype, x.state_dtype, x.return_state, x.scale) == ("float16", "float32", True, 1.0)
    assert x.inputs == [x.q, x.k, x.v, x.gate, x.beta]
    assert problem.check("f", "delta", *good("float64").values()).state_dtype == "float64"
