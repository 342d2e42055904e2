"""Decode steps equal the sequence, in every family: views, pools, padding, several tokens."""

from __future__ import annotations

import doctest
import itertools

import numpy as np
import pytest
from compare import REFERENCE, assert_close, bits, host
from conftest import GPU_FAMILIES, python

import cupy_gdelta
from cupy_gdelta import accuracy, cpu, step
from cupy_gdelta import step_problem as sp

STEPS = {
    "linear": cupy_gdelta.gated_linear_attention_step,
    "delta": cupy_gdelta.gated_delta_rule_step,
}
SEQUENCES = {
    "linear": cupy_gdelta.gated_linear_attention,
    "delta": cupy_gdelta.gated_delta_rule,
}
RULES = pytest.mark.parametrize("rule", STEPS)
# Error that rounding the state of order 1 to its own dtype after each of some tokens may add.
ROUNDED = {"float32": 0.0, "float64": 0.0, "float16": 2e-3, "bfloat16": 1.5e-2}


def problem(rng, **sizes):
    return accuracy.inputs(rng, **{"B": 3, "T": 12, "H": 4, "Hq": 2, "K": 24, "V": 16} | sizes)


def states(rng, p, rows=None):
    (B, _, H, V), K = p["v"].shape, p["q"].shape[-1]
    return rng.standard_normal((B if rows is None else rows, H, K, V))


def token(x, t):
    return {n: None if a is None else a[:, t] for n, a in x.items()}


def reference(rule, x, state, **options):
    p = {n: None if a is None else host(a) for n, a in x.items()}
    y, end = REFERENCE[rule](**p, initial_state=host(state), **options)
    assert np.abs(y).max(initial=0) < 1e4, "void reference"
    return y, end


def wide(dtype):
    return "float64" if dtype == "float64" else "float32"


def compare(rule, dtype, kept, y, state, expected, what=""):
    tolerance = accuracy.TOLERANCE[rule, dtype] + ROUNDED[kept]
    assert_close(y, expected[0], tolerance, f"{what} y")
    assert_close(state, expected[1], tolerance, f"{what} state")


@RULES
@pytest.mark.parametrize("gate", accuracy.GATES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_steps_equal_the_sequence(family, rule, gate, dtype, rng):
    p = problem(rng, gate=gate)
    x = family.arrays(p, dtype)
    state = family.array(states(rng, p), wide(dtype))
    expected = reference(rule, x, state, scale=0.5)
    ys = []
    for t in range(12):
        y = STEPS[rule](**token(x, t), state=state, scale=0.5)
        assert type(y) is type(x["v"])
        assert (y.dtype, tuple(y.shape)) == (x["v"].dtype, (3, 4, 16))
        ys.append(host(y))
    compare(rule, dtype, wide(dtype), np.stack(ys, 1), state, expected)


@RULES
@pytest.mark.parametrize("T", [0, 1, 2, 5, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_few_tokens_at_once_and_the_state_after_each(family, rule, T, dtype, rng):
    p = problem(rng, T=T)
    x = family.arrays(p, dtype)
    before = states(rng, p)
    state = family.array(before, wide(dtype))
    expected = reference(rule, x, state)
    seen = family.array(np.full((3, T, 4, 24, 16), np.nan), wide(dtype))
    out = family.array(np.full((3, T, 4, 16), np.nan), dtype)
    y = STEPS[rule](**x, state=state, states_out=seen, out=out)
    assert y is out
    compare(rule, dtype, wide(dtype), y, state, expected)
    for t in range(T):
        part = {n: a[:, : t + 1] for n, a in x.items()}
        after = reference(rule, part, family.array(before, wide(dtype)))[1]
        assert_close(seen[:, t], after, accuracy.TOLERANCE[rule, dtype], f"after token {t}")
    if T:
        assert np.array_equal(host(seen[:, -1]), host(state))
        alone = family.array(before, wide(dtype))
        one = STEPS[rule](**token(x, 0), state=alone)
        assert_close(one, host(y)[:, 0], accuracy.TOLERANCE[rule, dtype], "first token alone")


@RULES
def test_a_rejected_draft_is_taken_back(backend, rule, rng):
    p = problem(rng, T=5)
    x = backend.arrays(p, "float32")
    before = states(rng, p)
    state, seen = (
        backend.array(before, "float32"),
        backend.array(np.zeros((3, 5, 4, 24, 16)), "float32"),
    )
    STEPS[rule](**x, state=state, states_out=seen)
    state[...] = seen[:, 1]  # the first two are accepted
    rest = {n: a[:, 2:] for n, a in x.items()}
    y = STEPS[rule](**rest, state=state)
    expected = reference(rule, x, backend.array(before, "float32"))
    compare(rule, "float32", "float32", y, state, (expected[0][:, 2:], expected[1]))


@RULES
def test_prefill_then_steps(family, rule, rng):
    p = problem(rng, B=1, T=70)
    x = family.arrays(p, "float32")
    starts = [0, 20, 20, 60]
    head = {n: a[:, :60] for n, a in x.items()}
    _, state = SEQUENCES[rule](**head, cu_seqlens=starts, return_state=True)
    tails = {n: host(a)[0, 61:70].reshape(3, 3, *a.shape[2:]) for n, a in x.items()}
    kinds = {n: "float32" for n in tails}
    tails = {n: family.array(a, kinds[n]) for n, a in tails.items()}
    y = STEPS[rule](**tails, state=state)
    for n, (a, b) in enumerate(itertools.pairwise(starts)):
        whole = {
            name: np.concatenate([host(v)[:, a:b], host(tails[name])[n : n + 1]], 1)
            for name, v in x.items()
        }
        expected = REFERENCE[rule](**whole)
        assert_close(
            y[n : n + 1], expected[0][:, b - a :], accuracy.TOLERANCE[rule, "float32"], "y"
        )
        assert_close(state[n : n + 1], expected[1], accuracy.TOLERANCE[rule, "float32"], "state")


@RULES
@pytest.mark.parametrize("kept", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_states_of_16_bits(family, rule, kept, dtype, rng):
    """float32 arithmetic, rounded once a call: four tokens at once err less than four calls."""
    p = problem(rng, T=4)
    x = family.arrays(p, dtype)
    before = states(rng, p)
    start = host(family.array(before, kept))
    expected = reference(rule, x, start)
    state = family.array(before, kept)
    y = STEPS[rule](**x, state=state)
    assert_close(y, expected[0], accuracy.TOLERANCE[rule, dtype], "y")
    assert np.array_equal(host(state), host(family.array(host(state), kept)))
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[kept]
    assert (np.abs(host(state) - expected[1]) <= rounding * np.abs(expected[1]) + 1e-5).all()
    state = family.array(before, kept)
    ys = [host(STEPS[rule](**token(x, t), state=state)) for t in range(4)]
    compare(rule, dtype, kept, np.stack(ys, 1), state, expected)


@RULES
@pytest.mark.parametrize("kind", ["int32", "int64", "list", "host"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pool_with_padding(family, rule, kind, dtype, rng):
    p = problem(rng, T=2, B=5)
    x = family.arrays(p, dtype)
    rows = [6, -1, 0, 3, -1]
    live = [0, 2, 3]
    kept = "bfloat16" if dtype == "bfloat16" else "float32"
    pool = family.array(states(rng, p, 8), kept)
    before = host(pool)
    indices = {"list": rows, "host": np.array(rows)}.get(kind)
    if indices is None:
        indices = family.array(np.array(rows, kind))
    seen = family.array(np.full((5, 2, 4, 24, 16), 9.0), kept)
    y = STEPS[rule](**x, state=pool, state_indices=indices, states_out=seen)
    some = {n: host(a)[live] for n, a in x.items()}
    expected = reference(rule, some, before[[6, 0, 3]])
    compare(rule, dtype, kept, host(y)[live], host(pool)[[6, 0, 3]], expected)
    assert not host(y)[[1, 4]].any()
    assert np.array_equal(host(pool)[[1, 2, 4, 5, 7]], before[[1, 2, 4, 5, 7]])
    assert (host(seen)[[1, 4]] == 9).all()
    assert np.array_equal(host(seen)[live, -1], host(pool)[[6, 0, 3]])


@RULES
def test_nothing_but_padding(backend, rule, rng):
    p = problem(rng)
    x = backend.arrays({n: a[:, 0] for n, a in p.items()}, "float32")
    pool = backend.array(states(rng, p, 2), "float32")
    before = host(pool)
    y = STEPS[rule](**x, state=pool, state_indices=[-1, -1, -1])
    assert not host(y).any()
    assert np.array_equal(host(pool), before)
    none = backend.array(np.zeros((0, 4, 24, 16)), "float32")
    assert not host(STEPS[rule](**x, state=none, state_indices=[-1] * 3)).any()


LAYOUTS = {
    "slice of a larger pool": lambda s: (s, np.s_[1:7:2, ::2, 3:27, 2:18]),
    "heads before entries": lambda s: (s.swapaxes(0, 1), None),
    "rows last": lambda s: (s.swapaxes(2, 3), None),
    "all reversed": lambda s: (s, np.s_[::-1, ::-1, ::-1, ::-1]),
    "one layer of many": lambda s: (np.stack([s, s + 1], 1), np.s_[:, 1]),
}


@RULES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_states_are_updated_in_the_callers_memory(family, rule, layout, kept, rng):
    if "reversed" in layout and family.name.startswith("torch"):
        pytest.skip("torch has no negative strides")
    p = problem(rng, T=2)
    x = family.arrays(p, "float32")
    shape = (7, 8, 30, 20) if "slice" in layout else (3, 4, 24, 16)
    made, cut = LAYOUTS[layout](rng.standard_normal(shape))
    parent = family.array(np.ascontiguousarray(made), kept)
    axes = {"heads before entries": (1, 0, 2, 3), "rows last": (0, 1, 3, 2)}.get(layout)
    if axes:
        state = parent.permute(*axes) if hasattr(parent, "permute") else parent.transpose(axes)
    else:
        state = parent[cut]
    before, around = host(state), host(parent)
    STEPS[rule](**x, state=state)
    expected = reference(rule, x, before)
    assert_close(state, expected[1], accuracy.TOLERANCE[rule, "float32"] + ROUNDED[kept], "state")
    back = host(parent)
    if cut is not None:
        back[cut] = around[cut]
        assert np.array_equal(back, around), "written beside the state"
    plain = family.array(before, kept)
    STEPS[rule](**x, state=plain)
    assert_close(plain, host(state), 1e-6 if kept == "float32" else 8e-3, "another layout")


@RULES
def test_options(backend, rule, rng):
    p = problem(rng, T=3)
    x = backend.arrays(p, "float32")
    before = states(rng, p)

    def run(**changes):
        state = backend.array(before, "float32")
        scale = changes.pop("scale", 1.0)
        options = {n: changes.pop(n) for n in ("qk_l2norm",) if n in changes}
        y = STEPS[rule](**x | changes, state=state, scale=scale, **options)
        known = x | {n: a for n, a in changes.items()}
        return y, state, reference(rule, known, before, scale=scale, **options)

    for changes in (
        {"gate": None},
        {"beta": None},
        {"gate": None, "beta": None, "scale": -3},
        {"gate": None, "log_gate": backend.array(np.log(p["gate"]), "float32")},
        {"gate": None, "log_gate": backend.array(np.full((3, 3, 4), -np.inf), "float32")},
        *([{"qk_l2norm": True, "q": 3 * x["q"], "k": 5 * x["k"]}] if rule == "delta" else []),
    ):
        y, state, expected = run(**changes)
        compare(rule, "float32", "float32", y, state, expected, str(list(changes)))
    assert_close(run(scale=np.float64(0.5))[0], host(run()[0]) / 2, 1e-7, "scale")


@RULES
@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"H": 0, "Hq": 0}], ids=str)
def test_nothing_to_do(family, rule, sizes, rng):
    p = problem(rng, **{"T": 2} | sizes)
    state = family.array(states(rng, p), "float32")
    before = host(state)
    y = STEPS[rule](**family.arrays(p, "float32"), state=state)
    assert tuple(y.shape) == p["v"].shape
    assert np.array_equal(host(state), before)
    if "B" in sizes:
        pool = family.array(states(rng, p, 3), "float32")
        STEPS[rule](**family.arrays(p, "float32"), state=pool, state_indices=[])


@RULES
def test_out_may_overlap_an_input(backend, rule, rng):
    p = problem(rng, T=2, K=16)
    before = states(rng, p)
    x = backend.arrays(p, "float32")
    expected = reference(rule, x, before)
    for out in (x["v"], x["v"][..., ::-1]):
        v = backend.array(host(x["v"]), "float32")
        state = backend.array(before, "float32")
        y = STEPS[rule](**x | {"v": x["v"]}, state=state, out=out)
        assert y is out
        compare(rule, "float32", "float32", y, state, expected)
        x["v"][...] = v


@RULES
def test_a_nan_stays_in_its_entry_and_head(backend, rule, rng):
    p = problem(rng, T=2)
    x = backend.arrays(p, "float32")
    before = states(rng, p)
    clean = backend.array(before, "float32")
    y = STEPS[rule](**x, state=clean)
    before[1, 2] = np.nan
    state = backend.array(before, "float32")
    bad = STEPS[rule](**x, state=state)
    assert np.isnan(host(bad)[1, :, 2]).all()
    for a, b in ((host(y), host(bad)), (host(clean)[:, None], host(state)[:, None])):
        a[1, :, 2] = b[1, :, 2] = 0
        assert np.array_equal(a, b)


def test_dlpack_states_are_updated_in_place(rng):
    array_api_strict = pytest.importorskip("array_api_strict")
    p = problem(rng, T=2)
    x = {n: array_api_strict.asarray(a.astype("float32")) for n, a in p.items()}
    before = states(rng, p).astype("float32")
    state = array_api_strict.asarray(before.copy())
    y = cupy_gdelta.gated_delta_rule_step(**x, state=state)
    assert type(y) is type(state)
    compare("delta", "float32", "float32", y, state, reference("delta", x, before))


def test_torch_is_told_what_was_written(rng):
    torch = pytest.importorskip("torch")
    p = problem(rng, T=1)
    x = {n: torch.tensor(a[:, 0], dtype=torch.float32) for n, a in p.items()}
    state = torch.zeros(3, 4, 24, 16)
    weight = torch.ones(3, 4, 24, 16, requires_grad=True)
    loss = (weight * state).sum()
    cupy_gdelta.gated_delta_rule_step(**x, state=state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["numpy", "torch", *GPU_FAMILIES])
def test_large_blocks_are_split_and_shared_by_threads(name, rng, monkeypatch):
    """Blocks of some entries, of some heads, and threads give what one block gives."""
    from conftest import _family

    family = _family(name)
    p = problem(rng, B=9, T=2, H=6, Hq=3, K=20, V=24)
    x = family.arrays(p, "float32")
    before = states(rng, p)
    plain = family.array(before, "float32")
    expected = host(cupy_gdelta.gated_delta_rule_step(**x, state=plain))
    for block in (20 * 24, 20 * 24 * 6, 20 * 24 * 13):
        monkeypatch.setattr(cpu.step, "BLOCK", block)
        monkeypatch.setattr(cpu.walk, "WORTH_A_THREAD", 1)
        for rows in (None, list(range(8, -1, -1))):
            some = before if rows is None else before[::-1]
            state = family.array(np.ascontiguousarray(some), "float32")
            y = cupy_gdelta.gated_delta_rule_step(**x, state=state, state_indices=rows)
            assert np.array_equal(host(y), expected)
            after = host(state) if rows is None else host(state)[::-1]
            assert np.array_equal(after, host(plain))


def test_the_docstrings_are_true():
    assert doctest.testmod(step).attempted >= 8
    assert doctest.testmod(step).failed == 0


def test_importing_touches_no_other_library():
    python("""
        import sys
        import numpy as np
        import cupy_gdelta
        x = np.ones((1, 1, 2), np.float32)
        state = np.zeros((1, 1, 2, 2), np.float32)
        cupy_gdelta.gated_linear_attention_step(x, x, x, None, None, state)
        assert (state == 1).all()
        assert not {"cupy", "torch"} & set(sys.modules)
    """)


def test_read_only_inputs(rng):
    p = problem(rng, T=1)
    x = {n: a[:, 0].astype("float32") for n, a in p.items()}
    for a in x.values():
        a.flags.writeable = False
    cupy_gdelta.gated_delta_rule_step(**x, state=np.zeros((3, 4, 24, 16), np.float32))


# refusals


def good():
    x = np.ones((2, 4, 5), np.float32)
    v = np.ones((2, 4, 3), np.float32)
    return {
        "q": x,
        "k": x.copy(),
        "v": v,
        "gate": v[..., 0].copy(),
        "beta": v[..., 0].copy(),
        "state": np.zeros((2, 4, 5, 3), np.float32),
    }


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def read_only(*shape):
    x = zeros(*shape)
    x.flags.writeable = False
    return x


SHARED = np.zeros((2, 2, 4, 5, 3), np.float32)
REFUSED = [
    ({"q": zeros(4, 5)}, "q must have shape (B, Hq, K) or (B, T, Hq, K); got (4, 5)"),
    ({"q": zeros(2, 1, 4, 5)}, "k must have the shape of q, (B, T, Hq, K) = (2, 1, 4, 5)"),
    ({"k": zeros(2, 4, 6)}, "k must have the shape of q, (B, Hq, K) = (2, 4, 5); got (2, 4, 6)"),
    ({"v": zeros(3, 4, 3)}, "v must have shape (B, H, V) with B = 2 from q; got (3, 4, 3)"),
    ({"v": zeros(2, 6, 3)}, "v must have a multiple of the 4 heads of q and k; got 6 heads in"),
    ({"v": zeros(2, 4, 257)}, "v must have a last axis V of 1 to 256; got 257"),
    ({"gate": zeros(2, 1, 4)}, "gate must have shape (B, H) with B, H = 2, 4; got (2, 1, 4)"),
    ({"gate": 0.5}, "gate must be an array of shape (B, H) or (B, T, H), not a number; got float"),
    ({"log_gate": zeros(2, 4)}, "gate must be given in one form, as gate or as log_gate; got both"),
    ({"beta": zeros(2, 4, dtype="float16")}, "beta must have dtype float32 for q of float32"),
    ({"state": None}, "state must be an array (NumPy, CuPy, torch or any object with __dlpack__)"),
    (
        {"state": zeros(2, 4, 3, 5)},
        "state must have shape (B, H, K, V) with B, H, K, V = 2, 4, 5, 3",
    ),
    (
        {"state": zeros(3, 4, 5, 3)},
        "state must have shape (B, H, K, V) with B, H, K, V = 2, 4, 5, 3",
    ),
    (
        {"state": zeros(2, 4, 5, 3, dtype="float64")},
        "state must have dtype float32 or bfloat16 or float16 for q of float32 (convert it: "
        'state.astype("float32")); got float64',
    ),
    ({"state": read_only(2, 4, 5, 3)}, "state must be writable; got a read-only array"),
    (
        {"state": np.broadcast_to(zeros(1, 4, 5, 3), (2, 4, 5, 3))},
        "state must be writable; got a read-only array",
    ),
    (
        {"state": np.lib.stride_tricks.as_strided(zeros(99), (2, 4, 5, 3), (0, 60, 12, 4))},
        "state must have memory of its own for each element; got strides (0, 15, 3, 1)",
    ),
    (
        {"state": zeros(2, 4, 5, 3, dtype=">f4")},
        "state must be aligned and in native byte order; got one that is not",
    ),
    (
        {"state": zeros(9, 4, 5, 2), "state_indices": [0, 1]},
        "state must have shape (P, H, K, V) with H, K, V = 4, 5, 3 beside state_indices",
    ),
    ({"state_indices": [0]}, "state_indices must have shape (B,) with B = 2; got (1,)"),
    ({"state_indices": [[0, 1]]}, "state_indices must hold integers; got [0, 1]"),
    ({"state_indices": [0.0, 1.0]}, "state_indices must hold integers; got 0.0"),
    ({"state_indices": zeros(2)}, "state_indices must hold integers; got dtype float32"),
    ({"state_indices": 3}, "state_indices must be a list or an array of integers"),
    ({"state_indices": [0, 2]}, "state_indices must be -1 or from 0 to P - 1 = 1; got 2"),
    ({"state_indices": [0, -2]}, "state_indices must be -1 or from 0 to P - 1 = 1; got -2"),
    (
        {"state_indices": np.array([0, 2**64 - 1], np.uint64)},
        "state_indices must be -1 or from 0 to P - 1 = 1; got 18446744073709551615",
    ),
    ({"state_indices": [1, 1]}, "state_indices must name each row of the pool once; got 1 twice"),
    (
        {"states_out": zeros(2, 1, 4, 5, 3)},
        "states_out must have shape (B, H, K, V) with B, H, K, V = 2, 4, 5, 3; got (2, 1, 4, 5, 3)",
    ),
    (
        {"states_out": zeros(2, 4, 5, 3, dtype="float16")},
        "states_out must have dtype float32 for q of float32",
    ),
    ({"states_out": read_only(2, 4, 5, 3)}, "states_out must be writable; got a read-only array"),
    (
        {"state": SHARED[0], "states_out": SHARED[0]},
        "states_out must share no memory with state; got arrays that overlap",
    ),
    (
        {"out": zeros(2, 4, 5)},
        "out must have shape (B, H, V) with B, H, V = 2, 4, 3; got (2, 4, 5)",
    ),
    ({"out": read_only(2, 4, 3)}, "out must be writable; got a read-only array"),
    (
        {"state": SHARED[0], "out": SHARED[0, :, :, 0]},
        "out must share no memory with state; got arrays that overlap",
    ),
    (
        {"state": SHARED[0], "v": SHARED[0, :, :, 0]},
        "state must share no memory with v; got arrays that overlap",
    ),
    ({"scale": True}, "scale must be a real number; got bool"),
    ({"scale": float("inf")}, "scale must be finite; got inf"),
]


@RULES
@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[t[:60] for _, t in REFUSED])
def test_refusals_come_before_any_work(rule, changes, text):
    arguments = good() | changes
    written = [a for n, a in arguments.items() if n in ("state", "states_out", "out")]
    before = bits(*written)
    with pytest.raises((TypeError, ValueError)) as caught:
        STEPS[rule](**arguments)
    assert str(caught.value).startswith(f"{STEPS[rule].__name__}: {text}")
    assert bits(*written) == before


def test_too_many_tokens():
    x = zeros(1, 17, 1, 2)
    with pytest.raises(ValueError, match="q must have at most 16 tokens; got 17 in"):
        cupy_gdelta.gated_delta_rule_step(x, x, x, None, None, zeros(1, 1, 2, 2))
    assert sp.MAX_TOKENS == 16


def test_qk_l2norm_is_a_flag():
    with pytest.raises(TypeError, match="qk_l2norm must be True or False; got int"):
        cupy_gdelta.gated_delta_rule_step(**good(), qk_l2norm=1)


def test_states_between_each_other_share_nothing(rng):
    """Slots of one pool for the state and the states after each token: no element is shared."""
    pool = rng.standard_normal((3, 4, 4, 24, 16)).astype("float32")  # 1 + T slots a row
    p = problem(rng)
    x = {n: a[:, :3].astype("float32") for n, a in p.items()}
    before = pool[:, 0].copy()
    y = cupy_gdelta.gated_delta_rule_step(**x, state=pool[:, 0], states_out=pool[:, 1:])
    compare("delta", "float32", "float32", y, pool[:, 0], reference("delta", x, before))
    assert np.array_equal(pool[:, 0], pool[:, 3])


def test_a_tensor_that_requires_grad():
    torch = pytest.importorskip("torch")
    x = {n: torch.from_numpy(a) for n, a in good().items()}
    for name, text in (
        ("v", r"v must not require grad in a step, .*v.detach\(\)"),
        ("state", "state must not require grad; got"),
    ):
        some = x | {name: x[name].clone().requires_grad_()}
        with pytest.raises((TypeError, ValueError), match=text):
            cupy_gdelta.gated_delta_rule_step(**some)
        with torch.no_grad():
            cupy_gdelta.gated_delta_rule_step(**some)


def test_families_do_not_mix():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="state must be a NumPy array on the CPU, as q is; got a"):
        cupy_gdelta.gated_delta_rule_step(**good() | {"state": torch.zeros(2, 4, 5, 3)})
