"""Gates whose products overflow where nothing is written and nothing is read.

What they multiply is 0, between gates of 0: y, the state and gradients are those of gates of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compare import REFERENCE, REFERENCE_GRAD, assert_close, host
from conftest import Family

import cupy_gdelta
from cupy_gdelta import accuracy

pytest.importorskip("cupy", reason="CuPy cannot be imported")
import test_delta
from posed import needs_compiler
from test_infinite import BACKWARD, FORWARD, SIZES, on_a_gpu, on_the_cpu

FUNCTIONS = {
    "linear": (cupy_gdelta.gated_linear_attention, cupy_gdelta.gated_linear_attention_grad),
    "delta": (cupy_gdelta.gated_delta_rule, cupy_gdelta.gated_delta_rule_grad),
}
LENGTHS = [2, 3, 4, 5, 8, 16, 17, 33, 40, 64]
UNIT = test_delta.Case(40, 32, options={"qk_l2norm": True}, **SIZES)
KERNELS = pytest.mark.parametrize(
    ("tests", "case", "gradients"),
    [
        pytest.param(tests, case, gradients, id=f"{tests.__name__[5:]}-{case}")
        for gradients, kernels in ((False, [*FORWARD, (test_delta, UNIT)]), (True, BACKWARD))
        for tests, case in kernels
    ],
)


def inputs(rng: np.random.Generator, T: int, K: int, V: int, gradients: bool) -> dict:
    """A head of random numbers and another, with stretches of tokens of large and small gates."""
    x = accuracy.inputs(rng, T=T, H=2, Hq=2, K=K, V=V)
    x["initial_state"] = rng.standard_normal((1, 2, K, V))
    if gradients:
        x["dy"] = rng.standard_normal((1, T, 2, V))
        x["dstate"] = rng.standard_normal((1, 2, K, V))
    first = 0
    while True:
        first += int(rng.integers(0, 50))
        stop = first + int(rng.choice(LENGTHS))
        if stop >= T:
            return x
        x["gate"][:, [first, stop]] = 0
        written = rng.choice(["k", "v", "beta"])
        x[written][:, first:stop] = 0
        if gradients:
            x[rng.choice(["q", "dy"])][:, first:stop] = 0
        count = stop - first - 1
        powers = (
            rng.uniform(0, 30, count),
            np.full(count, rng.uniform(0, 38)),
            rng.uniform(-37, 38, count),
            np.where(rng.random(count) < 0.3, rng.uniform(10, 38, count), 0),
            np.zeros(count),
        )
        gates = 10.0 ** powers[rng.integers(len(powers))] * rng.choice([-1, 1], count)
        x["gate"][:, first + 1 : stop] = gates[:, None]
        if written != "beta":
            x["beta"][:, first:stop] = rng.choice([0.5, 2, -1, 50, 1e6])
        first = stop + 1


def verify(case: Any, gradients: bool, run: Callable, seed: int, **options: Any) -> None:
    """The outputs of ``run``, by name, beside the reference."""
    x = inputs(np.random.default_rng(seed), case.T, case.K, case.V, gradients)
    family = Family("numpy")
    narrow = {"dy": family.array(x["dy"], case.dtype)} if gradients else {}
    x = family.arrays(x, case.dtype) | narrow
    exact = {n: host(a) for n, a in x.items()}
    with np.errstate(all="ignore"):  # gates of a stretch, at most
        if gradients:
            expected = REFERENCE_GRAD[case.rule](**exact, **options)._asdict()
            tolerance = accuracy.GRADIENT_TOLERANCE[case.dtype]
        else:
            outputs = REFERENCE[case.rule](**exact, **options)
            expected = dict(zip(("y", "state"), outputs, strict=True))
            one = case.dtype == "float32" and getattr(case, "products", "") == "kOne"
            tolerance = accuracy.TOLERANCE[case.rule, "tf32" if one else case.dtype]
    for name, got in run(x).items():
        assert_close(got, expected[name], tolerance, f"{case} {options} seed {seed} {name}")


def by_name(gradients: bool, run: Callable) -> Callable:
    return run if gradients else lambda x: dict(zip(("y", "state"), run(x), strict=True))


def verify_kernel(tests: Any, case: Any, gradients: bool, launcher: Callable) -> None:
    case = replace(case, options={"scale": 5.0, **case.options})
    run = by_name(gradients, launcher(tests, case))
    for seed in range(10):
        verify(case, gradients, run, seed, **case.options)


@needs_compiler
@KERNELS
def test_what_overflows_and_is_not_there_does_not_show(tests, case, gradients):
    verify_kernel(tests, case, gradients, on_the_cpu)


@pytest.mark.gpu
@KERNELS
def test_what_overflows_and_is_not_there_does_not_show_on_a_gpu(tests, case, gradients):
    verify_kernel(tests, case, gradients, on_a_gpu)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("rule", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_overflows_and_is_not_there_does_not_show_in_numpy(dtype, rule, gradients):
    function = FUNCTIONS[rule][gradients]
    case = test_delta.Case(24, 24, rule=rule, dtype=dtype, **SIZES)

    def run(x: dict) -> dict:
        if gradients:
            return function(**x, scale=5.0)._asdict()
        return dict(zip(("y", "state"), function(**x, return_state=True, scale=5.0), strict=True))

    for seed in range(10):
        verify(case, gradients, run, seed, scale=5.0)
