"""The float64 loops, the definition of right, against hand-worked cases and other formulations."""

from __future__ import annotations

import inspect
from itertools import pairwise

import numpy as np
import pytest

from cupy_gdelta import accuracy, reference
from cupy_gdelta.reference import gated_delta_rule, gated_linear_attention

BOTH = pytest.mark.parametrize("loop", [gated_linear_attention, gated_delta_rule])
EXACT = 1e-13


def ones(T, gate=1.0, beta=1.0):
    """q = k = v = 1 with K = V = 1: the state is a number."""
    x = np.ones((1, T, 1, 1))
    return {
        "q": x,
        "k": x,
        "v": x,
        "gate": np.broadcast_to(gate, (T,)).reshape(1, T, 1),
        "beta": np.full((1, T, 1), beta),
    }


def close(a, b, tolerance=EXACT):
    assert np.isfinite(b).all()
    assert accuracy.error(a, b) <= tolerance


def test_linear_by_hand():
    y, state = gated_linear_attention(**ones(4, gate=0.5))
    assert y.ravel().tolist() == [1, 1.5, 1.75, 1.875]
    assert state.ravel().tolist() == [1.875]


def test_linear_by_hand_with_a_gate_that_forgets_and_one_that_turns_the_sign():
    y, _ = gated_linear_attention(**ones(4, gate=[0.5, 1, 0, -2], beta=2))
    assert y.ravel().tolist() == [2, 4, 2, -2]


def test_delta_by_hand_decays_before_it_compares():
    y, state = gated_delta_rule(**ones(2, gate=0.5, beta=0.5))
    assert y.ravel().tolist() == [0.5, 0.625]
    assert state.ravel().tolist() == [0.625]


def test_a_gate_of_zero_forgets_exactly():
    gate = np.full(64, 0.9)
    gate[20] = 0
    y, _ = gated_linear_attention(**ones(64, gate=gate))
    assert y[0, 20, 0, 0] == 1
    assert y[0, 21, 0, 0] == 1.9


def test_each_axis_by_hand():
    """K = 2, V = 3: rows of the state belong to k and q, columns to v."""
    q, k = np.array([[2.0, 0.0], [1.0, 10.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    v = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    arrays = {"q": q[None, :, None], "k": k[None, :, None], "v": v[None, :, None]}
    for loop in (gated_linear_attention, gated_delta_rule):  # the keys are orthonormal
        y, state = loop(**arrays)
        assert state[0, 0].tolist() == v.tolist()
        assert y[0, :, 0].tolist() == [[2, 4, 6], [41, 52, 63]]


def test_delta_forgets_what_the_key_held():
    """One unit key again and again with beta = gate = 1: only the last value is left."""
    rng = np.random.default_rng(1)
    k = np.zeros((1, 64, 1, 8))
    k[..., 3] = 1
    q, v = rng.standard_normal((1, 64, 1, 8)), rng.standard_normal((1, 64, 1, 5))
    y, state = gated_delta_rule(q, k, v)
    close(y, q[..., 3:4] * v)
    close(state[0, 0], k[0, -1, 0, :, None] * v[0, -1, 0])


@BOTH
def test_one_token(loop, rng):
    p = accuracy.inputs(rng, T=1, H=3, K=5, V=4)
    s = rng.standard_normal((1, 3, 5, 4))
    y, state = loop(**p, initial_state=s, scale=0.3)
    decayed = p["gate"][0, 0, :, None, None] * s
    k, v = p["k"][0, 0], p["v"][0, 0]
    if loop is gated_delta_rule:
        v = v - (k[:, :, None] * decayed[0]).sum(1)
    expected = decayed[0] + p["beta"][0, 0, :, None, None] * k[:, :, None] * v[:, None, :]
    close(state[0], expected)
    close(y[0, 0], 0.3 * (p["q"][0, 0, :, :, None] * expected).sum(1))


@BOTH
@pytest.mark.parametrize("gate", accuracy.GATES)
def test_sum_over_all_earlier_tokens(loop, gate, rng):
    """y[t] = q[t] sum over j of A[t] ... A[j+1] beta[j] k[j] v[j]^T, and A[t] ... A[1] S[0].

    A = gate I for the linear rule and gate (I - beta k k^T) for the delta rule.
    """
    p = accuracy.inputs(rng, T=24, H=1, K=6, V=5, gate=gate)
    start = rng.standard_normal((1, 1, 6, 5))
    y, state = loop(**p, initial_state=start)
    q, k, v, g, b = (p[name][0, :, 0] for name in ("q", "k", "v", "gate", "beta"))
    step = [x * np.eye(6) for x in g]
    if loop is gated_delta_rule:
        step = [a - a @ (x * np.outer(w, w)) for a, x, w in zip(step, b, k, strict=True)]
    for t in range(24):
        total = np.linalg.multi_dot([*step[t::-1], start[0, 0]]) if t else step[0] @ start[0, 0]
        for j in range(t + 1):
            term = b[j] * np.outer(k[j], v[j])
            total = total + np.linalg.multi_dot(
                [*step[t:j:-1], term] if t > j else [term, np.eye(5)]
            )
        close(y[0, t, 0], q[t] @ total, 1e-12)
    close(state[0, 0], total, 1e-12)


def test_delta_with_beta_zero_only_decays(rng):
    p = accuracy.inputs(rng, T=9, K=4, V=3) | {"beta": np.zeros((1, 9, 2))}
    start = rng.standard_normal((1, 2, 4, 3))
    _, state = gated_delta_rule(**p, initial_state=start)
    close(state, p["gate"].prod(1)[:, :, None, None] * start)


def test_orthonormal_keys_make_the_rules_agree(rng):
    p = accuracy.inputs(rng, T=8, H=2, K=8, V=3)
    keys = [np.linalg.qr(rng.standard_normal((8, 8)))[0] for _ in range(2)]
    p["k"] = np.stack(keys, 1)[None]
    linear, delta = gated_linear_attention(**p), gated_delta_rule(**p)
    close(delta[0], linear[0], 1e-12)
    close(delta[1], linear[1], 1e-12)


@BOTH
@pytest.mark.parametrize("cut", [0, 1, 13, 29, 30])
def test_a_split_with_the_state_carried_over_changes_nothing(loop, cut, rng):
    p = accuracy.inputs(rng, B=2, T=30, K=5, V=4)
    y, state = loop(**p)
    head, middle = loop(**{n: x[:, :cut] for n, x in p.items()})
    tail, end = loop(**{n: x[:, cut:] for n, x in p.items()}, initial_state=middle)
    assert np.array_equal(np.concatenate([head, tail], 1), y)
    assert np.array_equal(end, state)


@BOTH
def test_scale_multiplies_y_and_leaves_the_state(loop, rng):
    p = accuracy.inputs(rng, T=12, K=4, V=4)
    (y, state), (scaled, same) = loop(**p), loop(**p, scale=-0.25)
    assert np.array_equal(scaled, -0.25 * y)
    assert np.array_equal(same, state)


@BOTH
@pytest.mark.parametrize("starts", [[0, 5, 5, 17, 20], [0, 0, 20], [0], [0, 0], [0, 7]])
def test_packed_sequences_are_separate_calls(loop, starts, rng):
    p = accuracy.inputs(rng, T=20, K=4, V=3)
    states = rng.standard_normal((len(starts) - 1, 2, 4, 3))
    y, end = loop(**p, initial_state=states, cu_seqlens=starts)
    assert end.shape == states.shape
    for n, (a, b) in enumerate(pairwise(starts)):
        one = {name: x[:, a:b] for name, x in p.items()}
        alone, last = loop(**one, initial_state=states[n : n + 1])
        assert np.array_equal(y[:, a:b], alone)
        assert np.array_equal(end[n : n + 1], last)
    assert not y[:, starts[-1] :].any()


@BOTH
def test_grouped_heads_are_repeated_heads(loop, rng):
    p = accuracy.inputs(rng, T=10, H=6, Hq=2, K=4, V=3)
    wide = p | {name: np.repeat(p[name], 3, axis=2) for name in ("q", "k")}
    for a, b in zip(loop(**p), loop(**wide), strict=True):
        assert np.array_equal(a, b)


@BOTH
def test_log_gate_is_the_logarithm_of_the_gate(loop, rng):
    p = accuracy.inputs(rng, T=10, K=4, V=3, gate="zeros among")
    with np.errstate(divide="ignore"):
        log = {"log_gate": np.log(p.pop("gate"))}
    gate = {"gate": np.exp(log["log_gate"])}
    for a, b in zip(loop(**p, **log), loop(**p, **gate), strict=True):
        assert np.array_equal(a, b)


@BOTH
def test_gate_and_beta_are_one_where_left_out(loop, rng):
    p = accuracy.inputs(rng, T=10, K=4, V=3, gate="one") | {"beta": np.ones((1, 10, 2))}
    for a, b in zip(loop(**p), loop(p["q"], p["k"], p["v"]), strict=True):
        assert np.array_equal(a, b)


def test_qk_l2norm_divides_by_the_length(rng):
    p = accuracy.inputs(rng, T=10, K=4, V=3)
    length = {n: np.sqrt((p[n] ** 2).sum(-1, keepdims=True) + 1e-6) for n in ("q", "k")}
    unit = p | {n: p[n] / length[n] for n in ("q", "k")}
    close(gated_delta_rule(**p, qk_l2norm=True)[0], gated_delta_rule(**unit)[0])


@BOTH
def test_neither_inputs_nor_initial_state_are_written(loop, rng):
    p = accuracy.inputs(rng, T=10, K=4, V=3) | {"initial_state": np.ones((1, 2, 4, 3))}
    before = {name: x.copy() for name, x in p.items()}
    loop(**p)
    for name, x in p.items():
        assert np.array_equal(x, before[name]), name


@pytest.mark.parametrize("name", ["gated_linear_attention", "gated_delta_rule"])
def test_a_loop_is_short_enough_to_be_read(name):
    assert len(inspect.getsource(getattr(reference, name)).splitlines()) <= 40


def test_error_is_relative_and_sees_what_is_no_number():
    assert accuracy.error([3.0, 4.0], [3.0, 4.5]) == pytest.approx(0.5 / np.hypot(3, 4.5))
    assert accuracy.error([0.0], [0.0]) == 0
    assert accuracy.error([np.nan, 1], [1.0, 1]) == np.inf
    assert accuracy.error([np.nan, 1], [np.nan, 1]) == 0
    assert accuracy.error([np.inf, 1], [1.0, 1]) == np.inf
    assert accuracy.error([np.inf, 1], [np.inf, 1]) == 0
    assert accuracy.error([np.inf, 1], [-np.inf, 1]) == np.inf
    assert accuracy.error([1.0], [1.0, 1.0]) == np.inf


def test_gate_regimes_are_what_they_are_called(rng):
    assert set(accuracy.gates("zeros among", (1000,), rng)) > {0.0}
    assert accuracy.gates("negative", (1000,), rng).min() < -0.5
    assert accuracy.gates("1e-37", (3,), rng).tolist() == [1e-37] * 3
    with pytest.raises(ValueError, match="no gate regime called 'half'"):
        accuracy.gates("half", (1,), rng)
