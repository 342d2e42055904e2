"""cu_seqlens, the offsets of packed sequences: which kinds are taken, and every refusal."""

from __future__ import annotations

import array
import re

import numpy as np
import pytest

import cupy_gdelta
from cupy_gdelta import accuracy

T, H, K, V = 10, 2, 4, 3
GOOD = [0, 3, 3, 10]
ARRAY = "(NumPy, CuPy, torch or any object with __dlpack__)"


def packed(B=1):
    return {
        n: x.astype("float32")
        for n, x in accuracy.inputs(np.random.default_rng(5), B=B, T=T, H=H, K=K, V=V).items()
    }


REFUSALS = [
    # the values
    ([0, 5, 3, 10], ValueError, "must not decrease; got 5, 3 at 1"),
    ([0, -1, 10], ValueError, "must not decrease; got 0, -1 at 0"),
    ([1, 5, 10], ValueError, "must start with 0; got 1"),
    ([-1, 5, 10], ValueError, "must start with 0; got -1"),
    ([0, 5, 11], ValueError, "must end at T = 10 or before; got 11"),
    ([0, 2**70], ValueError, f"must hold 64-bit integers; got {2**70}"),
    (np.array([0, 2**63], "uint64"), ValueError, f"must end at T = 10 or before; got {2**63}"),
    # the shape
    ([], ValueError, "must have shape (N + 1,) with N >= 0; got (0,)"),
    (np.zeros(0, int), ValueError, "must have shape (N + 1,) with N >= 0; got (0,)"),
    (np.array([GOOD]), ValueError, "must have shape (N + 1,) with N >= 0; got (1, 4)"),
    (np.array(0), ValueError, "must have shape (N + 1,) with N >= 0; got ()"),
    # the kind
    ([0, 3.0, 10], TypeError, "must hold integers; got 3.0"),
    ([False, True], TypeError, "must hold integers; got False"),
    ([0, None], TypeError, "must hold integers; got None"),
    ([0, "10"], TypeError, "must hold integers; got '10'"),
    ([[0, 10]], TypeError, "must hold integers; got [0, 10]"),
    (np.array([0.0, 10.0]), TypeError, "must hold integers; got dtype float64"),
    (np.array([False, True]), TypeError, "must hold integers; got dtype bool"),
    (np.array([0, 10], object), TypeError, "must hold integers; got dtype object"),
    (np.array([0, 10], "m8[s]"), TypeError, "must hold integers; got dtype timedelta64[s]"),
    (10, TypeError, f"must be a list or an array of integers {ARRAY}; got int"),
    ({0, 10}, TypeError, f"must be a list or an array of integers {ARRAY}; got set"),
    ("0,10", TypeError, f"must be a list or an array of integers {ARRAY}; got str"),
    (np.ma.array([0, 10]), TypeError, "must be a plain array, for its mask would be ignored"),
]


@pytest.mark.parametrize(("offsets", "kind", "text"), REFUSALS)
def test_V03_refusal(offsets, kind, text):
    """Bad offsets were taken silently (flash-linear-attention-npu#641, vllm-ascend PR#14192)."""
    for name in ("gated_linear_attention", "gated_delta_rule"):
        out = np.full((1, T, H, V), 7, "float32")
        with pytest.raises(kind, match=f"^{name}: cu_seqlens {re.escape(text)}"):
            getattr(cupy_gdelta, name)(**packed(), cu_seqlens=offsets, out=out)
        assert (out == 7).all()


def test_V03_a_batch_is_refused():
    text = "cu_seqlens must come with B = 1, sequences packed along T; got B = 2"
    with pytest.raises(ValueError, match=text):
        cupy_gdelta.gated_delta_rule(**packed(B=2), cu_seqlens=GOOD)


def test_V03_one_state_for_each_sequence():
    states = np.zeros((2, H, K, V), "float32")
    text = r"initial_state .* with N, H, K, V = 3, 2, 4, 3; got \(2, 2, 4, 3\)"
    with pytest.raises(ValueError, match=text):
        cupy_gdelta.gated_delta_rule(**packed(), cu_seqlens=GOOD, initial_state=states)


def kinds():
    yield from (GOOD, tuple(GOOD), [np.int32(x) for x in GOOD], np.array(GOOD, ">i4"))
    for dtype in ("int64", "int32", "uint8", "int16", "uint64"):
        x = np.array(GOOD, dtype)
        yield from (x, np.repeat(x, 2)[::2], x[::-1].copy()[::-1])
    torch = pytest.importorskip("torch")
    yield from (torch.tensor(GOOD, dtype=x) for x in (torch.int64, torch.int32, torch.uint8))
    yield from (list(torch.tensor(GOOD)), torch.tensor(GOOD).repeat_interleave(2)[::2])
    strict = pytest.importorskip("array_api_strict")
    yield from (strict.asarray(GOOD), strict.asarray(GOOD, dtype=strict.int16))


def test_V03_every_kind_gives_one_answer():
    y, state = cupy_gdelta.gated_delta_rule(**packed(), cu_seqlens=GOOD, return_state=True)
    assert np.isfinite(y).all()
    for offsets in kinds():
        again = cupy_gdelta.gated_delta_rule(**packed(), cu_seqlens=offsets, return_state=True)
        assert np.array_equal(again[0], y), offsets
        assert np.array_equal(again[1], state), offsets


def test_a_range_gives_tokens_that_do_not_see_each_other():
    y = cupy_gdelta.gated_linear_attention(**packed(), cu_seqlens=range(T + 1))
    one = {n: np.swapaxes(x, 0, 1) for n, x in packed().items()}
    expected = np.swapaxes(cupy_gdelta.gated_linear_attention(**one), 0, 1)
    assert accuracy.error(y, expected) < accuracy.TOLERANCE["linear", "float32"]


def test_a_python_array_says_what_to_do():
    with pytest.raises(TypeError, match=r"must be a list or an array of integers .*; got array"):
        cupy_gdelta.gated_delta_rule(**packed(), cu_seqlens=array.array("q", GOOD))


@pytest.mark.gpu
def test_device_offsets_of_either_width_give_one_answer():
    import cupy

    p = {n: cupy.asarray(x) for n, x in packed().items()}
    y = cupy_gdelta.gated_delta_rule(**p, cu_seqlens=GOOD).get()
    assert np.isfinite(y).all()
    offsets = [cupy.array(GOOD, dtype) for dtype in ("int32", "int64")]
    offsets += [cupy.array(GOOD).repeat(2)[::2], np.array(GOOD, "int32"), tuple(GOOD)]
    for some in offsets:
        assert np.array_equal(cupy_gdelta.gated_delta_rule(**p, cu_seqlens=some).get(), y), some


@pytest.mark.gpu
def test_device_offsets_come_from_the_library_of_q():
    """No other library's stream is waited for."""
    import cupy

    torch = pytest.importorskip("torch")
    p = {n: cupy.asarray(x) for n, x in packed().items()}
    with pytest.raises(TypeError, match="cu_seqlens must lie on the CPU or be a CuPy array on"):
        cupy_gdelta.gated_delta_rule(**p, cu_seqlens=torch.tensor(GOOD, device="cuda"))
    p = {n: torch.from_numpy(x).cuda() for n, x in packed().items()}
    y = cupy_gdelta.gated_delta_rule(**p, cu_seqlens=torch.tensor(GOOD, device="cuda"))
    assert torch.equal(y, cupy_gdelta.gated_delta_rule(**p, cu_seqlens=torch.tensor(GOOD)))


@pytest.mark.gpu
def test_device_offsets_are_refused_by_dtype_shape_and_place():
    import cupy

    p = {n: cupy.asarray(x) for n, x in packed().items()}
    for offsets, kind, text in [
        (cupy.array(GOOD, "uint8"), TypeError, "must have dtype int32 or int64; got uint8"),
        (cupy.array(GOOD, "float32"), TypeError, "must have dtype int32 or int64; got float32"),
        (cupy.array([GOOD]), ValueError, r"must have shape \(N \+ 1,\) with N >= 0; got \(1, 4\)"),
        (cupy.array([], "int64"), ValueError, r"must have shape \(N \+ 1,\) with N >= 0; got \(0,"),
    ]:
        with pytest.raises(kind, match=f"cu_seqlens {text}"):
            cupy_gdelta.gated_delta_rule(**p, cu_seqlens=offsets)
    with pytest.raises(TypeError, match="cu_seqlens must lie on the CPU; got a CuPy array on CUDA"):
        cupy_gdelta.gated_delta_rule(**packed(), cu_seqlens=cupy.array(GOOD))
