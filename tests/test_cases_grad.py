"""Reported faults (see test_cases.py): gradients."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from compare import assert_close, check_grad, host

import cupy_gdelta
from cupy_gdelta import accuracy, reference
from cupy_gdelta.cpu import blocks

NAMES = {"linear": "gated_linear_attention", "delta": "gated_delta_rule"}
FUNCTIONS = {rule: getattr(cupy_gdelta, f"{name}_grad") for rule, name in NAMES.items()}
RULES = pytest.mark.parametrize("rule", NAMES)
SMALL = {"K": 3, "V": 2, "H": 2}


def ones(T, gate, beta=1.0):
    """q = k = v = 1 and K = V = 1: the state is a number."""
    x = np.ones((1, T, 1, 1))
    gate = np.broadcast_to(gate, (T,)).reshape(1, T, 1)
    return {"q": x, "k": x, "v": x, "gate": gate, "beta": np.full((1, T, 1), beta)}


def differences(rule, x, dy, dstate, **options) -> dict:
    """Central differences of sum(y dy) + sum(state dstate) in float64."""
    loop, found = getattr(reference, NAMES[rule]), {}
    for name, value in x.items():
        found[name] = np.empty(value.shape)
        for at in np.ndindex(*value.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = value.astype(np.float64)
                moved[at] += step
                y, state = loop(**x | {name: moved}, **options)
                ends.append((y * dy).sum() + (state * dstate).sum())
            found[name][at] = (ends[0] - ends[1]) / 2e-6
    return found


def against_differences(rule, backend, x, dy, dstate, **options):
    expected = differences(
        rule, x, 0 if dy is None else dy, 0 if dstate is None else dstate, **options
    )
    given = {n: backend.array(a, "float64") for n, a in x.items()}
    starts = [a if a is None else backend.array(a, "float64") for a in (dy, dstate)]
    got = FUNCTIONS[rule](starts[0], **given, dstate=starts[1], **options)
    for name, want in expected.items():
        assert_close(getattr(got, name), want, 1e-5, name)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_G01_the_gradient_of_a_gate_of_zero_and_of_one(backend, dtype):
    """Gate gradients were wrong at gate 1, and 0 / 0 at gate 0 (fla#889, #891, fla PR#463)."""
    p = backend.arrays(ones(4, [1, 1, 0, 1]), dtype)
    dy = backend.array(np.ones((1, 4, 1, 1)), dtype)
    got = FUNCTIONS["linear"](dy, **p)
    assert host(got.gate).ravel().tolist() == [0, 1, 4, 1]
    log = {"log_gate": backend.array(np.array([0, 0, -np.inf, 0]).reshape(1, 4, 1), "float32")}
    p.pop("gate")
    assert host(FUNCTIONS["linear"](dy, **p, **log).gate).ravel().tolist() == [0, 1, 0, 1]


@RULES
@pytest.mark.parametrize("gate", [[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [-1, 2, 0, 1e-37]])
def test_G01_gates_against_differences(backend, rule, gate, rng):
    x = accuracy.inputs(rng, T=4, **SMALL)
    x["gate"] = np.repeat(np.array(gate, np.float64).reshape(1, 4, 1), 2, 2)
    x["initial_state"] = rng.standard_normal((1, 2, 3, 2))
    dstate = rng.standard_normal((1, 2, 3, 2))
    against_differences(rule, backend, x, rng.standard_normal((1, 4, 2, 2)), dstate)


@RULES
@pytest.mark.parametrize("form", ["gate", "log_gate"])
@pytest.mark.parametrize("T", [1, 40])
def test_G01_gradients_too_small_for_normal_numbers(backend, rule, form, T, rng):
    """Kernels are compiled to flush denormal numbers to 0, of which there are many in 1e-37 d."""
    x = accuracy.inputs(rng, T=T, gate="1e-37")
    shape = (1, 2, 24, 24)
    dy, dstate, x["initial_state"] = (rng.standard_normal(s) for s in (x["v"].shape, shape, shape))
    x["log_gate"] = np.log(x["gate"])
    del x["gate" if form == "log_gate" else "log_gate"]
    dy, dstate = (backend.array(a, "float32") for a in (dy, dstate))
    check_grad(rule, FUNCTIONS[rule], dy, dstate, backend.arrays(x, "float32"), "float32")


@RULES
@pytest.mark.parametrize("T", [1, blocks.CHUNK + 1])
@pytest.mark.parametrize("part", ["state", "y"])
def test_G03_the_way_through_the_final_state(backend, rule, T, part, rng):
    """Gate gradients left out what comes through the state, or the last chunk (fla PR#459)."""
    x = accuracy.inputs(rng, T=T, K=2, V=2, H=1)
    x["initial_state"] = rng.standard_normal((1, 1, 2, 2))
    dy, dstate = (np.ones(x[name].shape) for name in ("v", "initial_state"))
    dy, dstate = (None, dstate) if part == "state" else (dy, None)
    against_differences(rule, backend, x, dy, dstate)
    del x["gate"]
    against_differences(rule, backend, x, dy, dstate)


@RULES
@pytest.mark.parametrize("gates", [(0.01, 0.5), (0.01, 0.02)])
def test_G04_gates_under_strong_decay(backend, rule, gates, rng):
    """A bfloat16 temporary lost the gate's gradient; the first was not 0 (FlashQLA PR#28)."""
    x = accuracy.inputs(rng, T=128)
    x["gate"] = rng.uniform(*gates, x["gate"].shape)
    p = backend.arrays(x, "bfloat16")
    dy = backend.array(rng.standard_normal(x["v"].shape), "bfloat16")
    got = check_grad(rule, FUNCTIONS[rule], dy, None, p, "bfloat16")
    expected = getattr(reference, f"{NAMES[rule]}_grad")(
        host(dy), **{n: host(a) for n, a in p.items()}
    )
    # chunks on a GPU multiply numbers of 16 bits
    assert_close(got.gate, expected.gate, 5e-3 if backend.on_gpu else 1e-3, "gate")
    assert not host(got.gate)[:, 0].any()
    zeros = backend.array(np.zeros((1, 2, 24, 24)), "float32")
    same = FUNCTIONS[rule](dy, **p, initial_state=zeros)
    for name in ("q", "k", "v", "gate", "beta"):
        assert np.array_equal(host(getattr(same, name)), host(getattr(got, name))), name


@RULES
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_G06_a_scale_other_than_one(backend, rule, scale, rng):
    """Gradients were right for the default scale alone (fla#47)."""
    x = accuracy.inputs(rng, T=65, K=2, V=1, H=1)
    against_differences(rule, backend, x, rng.standard_normal(x["v"].shape), None, scale=scale)


@RULES
@pytest.mark.parametrize("C", [8, 16, 32, 64])
def test_G07_every_chunk_length(rule, C, rng, monkeypatch):
    """Backward took another chunk length than forward (mlstm_kernels PR#10, fla PR#641)."""
    monkeypatch.setattr(blocks, "CHUNK", C)
    x = accuracy.inputs(rng, T=2 * C + 3, B=2)
    dy = rng.standard_normal(x["v"].shape)
    check_grad(rule, FUNCTIONS[rule], dy, None, x, "float64")


@RULES
@pytest.mark.parametrize("starts", [[0, 0, 128, 128, 256, 256], [0], [0, 0]])
@pytest.mark.parametrize("with_state", [False, True])
def test_V01_gradients_of_empty_sequences(backend, rule, starts, with_state, rng):
    """The gradient of an empty sequence's first state is that of its last (fla#103)."""
    x = accuracy.inputs(rng, T=256 if len(starts) > 2 else 3)
    shape = (len(starts) - 1, 2, 24, 24)
    dy = backend.array(rng.standard_normal(x["v"].shape), "float32")
    dstate = backend.array(rng.standard_normal(shape), "float32")
    if with_state:
        x["initial_state"] = rng.standard_normal(shape)
    p = backend.arrays(x, "float32")
    got = check_grad(rule, FUNCTIONS[rule], dy, dstate, p, "float32", cu_seqlens=starts)
    for n, (a, b) in enumerate(pairwise(starts)):
        if a == b and with_state:
            assert np.array_equal(host(got.initial_state)[n], host(dstate)[n])


@RULES
@pytest.mark.parametrize(("B", "H"), [(65537, 1), (2050, 32)])
def test_L01_gradients_of_many_heads(backend, rule, B, H, rng):
    """A grid's second axis ends at 65535 (fla#172, #64)."""
    x = {n: rng.standard_normal((B, 1, H, 4)).astype(np.float32) for n in ("q", "k", "v", "dy")}
    x = {n: backend.array(a) for n, a in x.items()}
    got = FUNCTIONS[rule](**x)
    last = FUNCTIONS[rule](**{n: a[-1:] for n, a in x.items()})
    for name in ("q", "k", "v"):
        assert_close(getattr(got, name)[-1:], host(getattr(last, name)), 1e-6, name)


@RULES
@pytest.mark.parametrize(("K", "V"), [(1, 8), (3, 9), (9, 24), (24, 9), (40, 80), (96, 17)])
def test_H01_gradients_within_guard_rows(backend, rule, K, V, rng):
    """Tiles past the head dim read the next head, or wrote into it (mamba PR#1046, fla#552)."""
    x = accuracy.inputs(rng, T=63, H=3, K=K, V=V)
    x["dy"] = rng.standard_normal(x["v"].shape)
    inside = {}
    for name, a in x.items():
        wide = backend.array(np.full([n + 2 for n in a.shape], 1e30), "float32")
        middle = wide[tuple(slice(1, -1) for _ in a.shape)]
        middle[...] = backend.array(a, "float32")
        inside[name] = middle
    dy = inside.pop("dy")
    check_grad(rule, FUNCTIONS[rule], dy, None, inside, "float32")


@RULES
@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"H": 0}, {"T": 0, "H": 0}])
def test_Z01_gradients_of_nothing(backend, rule, sizes, rng):
    """A grid of size 0 aborts (sglang#31350, triton-ascend PR#1221)."""
    x = accuracy.inputs(rng, **{"B": 2, "T": 5, "H": 2, "K": 4, "V": 3} | sizes)
    B, _, H, V = x["v"].shape
    x["initial_state"] = rng.standard_normal((B, H, 4, V))
    dstate = rng.standard_normal(x["initial_state"].shape)
    dy, dstate = (backend.array(a, "float32") for a in (np.ones(x["v"].shape), dstate))
    got = check_grad(rule, FUNCTIONS[rule], dy, dstate, backend.arrays(x, "float32"), "float32")
    assert tuple(got.q.shape) == x["q"].shape
