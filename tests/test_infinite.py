"""An infinite number in an input shows in all that depends on it, from every chunked kernel.

Products of gates that overflow are kept at the largest number; what was infinite as given is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from compare import REFERENCE, REFERENCE_GRAD, host
from conftest import Family
from host import simt

pytest.importorskip("cupy", reason="CuPy cannot be imported")
import test_delta
import test_delta16
import test_delta32
import test_delta_grad
import test_delta_sm90
import test_linear
import test_linear32
import test_linear_grad
import test_linear_sm90
from posed import needs_compiler, random_gradients, random_inputs

from cupy_gdelta.gpu import linear_sm90, loader

SIZES = {"T": 150, "B": 1, "H": 2, "Hq": 2}
HALF = {"dtype": "float16", **SIZES}
FORWARD = [
    (test_linear, test_linear.Case(16, 64, **SIZES)),
    (test_linear32, test_linear32.Case(24, 24, **SIZES)),
    (test_linear32, test_linear32.Case(24, 24, products="kOne", **SIZES)),
    (test_linear32, test_linear32.Case(64, 64, products="kOne", **HALF)),
    (test_linear32, test_linear32.Case(24, 24, products="kMixed", **HALF)),
    (test_linear_sm90, test_linear_sm90.Case(64, 64, **SIZES)),
    (test_linear_sm90, test_linear_sm90.Case(128, 64, **SIZES)),
    (test_delta, test_delta.Case(16, 32, **SIZES)),
    (test_delta16, test_delta16.Case(24, 24, **SIZES)),
    (test_delta32, test_delta32.Case(24, 24, **SIZES)),
    (test_delta_sm90, test_delta_sm90.Case(64, 64, **SIZES)),
    (test_delta_sm90, test_delta_sm90.Case(128, 128, **SIZES)),
]
BACKWARD = [
    (test_linear_grad, test_linear_grad.Case("float32", 24, 24)),
    (test_linear_grad, test_linear_grad.Case("float16", 24, 24)),
    (test_linear_grad, test_linear_grad.Case("bfloat16", 24, 24)),
    (test_linear_grad, test_linear_grad.Case("bfloat16", 128, 16)),
    (test_linear_grad, test_linear_grad.Case("bfloat16", 24, 20, wide=False, apart=False)),
    (test_delta_grad, test_delta_grad.Case(24, 24, T=150, dtype="float32")),
    (test_delta_grad, test_delta_grad.Case(24, 24, T=150)),
    (test_delta_grad, test_delta_grad.Case(128, 16, T=150)),
]
GATES = {"half": [0.5], "zero": [0], "turning": [-1], "overflow": [1e30, 1e-30, 1]}


def on_the_cpu(tests: ModuleType, case: Any) -> Callable[[dict], Any]:
    """A way to launch the kernel of a case on NumPy arrays."""
    if tests is test_delta_grad:
        return partial(tests.run_on_host, tests.build([case]), case)
    if tests is test_linear_sm90:
        expressions = [linear_sm90.expression(case.tile)]
    else:
        expressions = list(case.expressions if hasattr(case, "expressions") else [case.expression])
    source = loader.folder() / f"{tests.__name__[5:]}.cu"
    kernels = simt.Kernels(source, expressions)
    if tests in (test_linear_sm90, test_delta_sm90):
        return partial(tests.on_this_cpu, kernels, case, grid=2)
    return partial(tests.run_on_host, kernels, case)


def on_a_gpu(tests: ModuleType, case: Any) -> Callable[[dict], Any]:
    """The same on a GPU, from NumPy arrays."""
    if tests in (test_linear_sm90, test_delta_sm90):
        if not test_linear_sm90._is_hopper():
            pytest.skip("needs a Hopper GPU")
        launch = partial(tests.launch, case)
    elif tests in (test_linear, test_delta_grad):
        launch = partial(tests.launch_on_gpu, case, case.tile)
    else:
        launch = partial(tests.launch_on_gpu, case)
    return lambda x: launch({name: Family("cupy").array(a) for name, a in x.items()})


def forward(case: Any, rng: np.random.Generator, run: Callable) -> tuple:
    """Inputs, and the kernel and the reference as functions of them that give arrays by name."""
    names = ("y", "state")
    return (
        random_inputs(case, rng, Family("numpy")),
        lambda **x: dict(zip(names, run(x), strict=True)),
        lambda **x: dict(zip(names, REFERENCE[case.rule](**x), strict=True)),
    )


def backward(case: Any, rng: np.random.Generator, run: Callable) -> tuple:
    family = Family("numpy")
    return (
        random_inputs(case, rng, family) | random_gradients(case, rng, family),
        lambda **x: run(x),
        lambda **x: REFERENCE_GRAD[case.rule](**x)._asdict(),
    )


def assert_shows(case: Any, gates: str, x: dict, run: Callable, reference: Callable) -> None:
    """In all that depends on it, and in nothing of the other head."""
    x["gate"][...] = np.resize(GATES[gates], (case.T, 1))
    x["beta"][:, -1] = 0
    tokens = (42, 70) if gates == "overflow" else (70,)  # after one that overflows, or not
    for name, t in itertools.product(x, tokens):
        bad = x | {name: x[name].copy()}
        bad[name][(0, 0, 3, 5) if "state" in name else (0, t, 0, 5)[: x[name].ndim]] = np.inf
        with np.errstate(all="ignore"):
            expected = reference(**{n: host(a) for n, a in bad.items()})
        for output, got in run(**bad).items():
            wrong = ~np.isfinite(host(got))
            assert wrong[~np.isfinite(expected[output])].all(), f"{name} in {output}"
            if gates != "overflow":  # else some pass the range of float32 by themselves
                other = np.take(wrong, 1, 1 if "state" in output else 2)
                assert not other.any(), f"{name} in {output} of the other head"


KERNELS = pytest.mark.parametrize(
    ("tests", "case", "pose"),
    [
        pytest.param(tests, case, pose, id=f"{tests.__name__[5:]}-{case}")
        for pose, kernels in ((forward, FORWARD), (backward, BACKWARD))
        for tests, case in kernels
    ],
)


@needs_compiler
@KERNELS
def test_an_infinite_number_shows(tests, case, pose, rng):
    run = on_the_cpu(tests, case)
    for gates in GATES:
        assert_shows(case, gates, *pose(case, rng, run))


@pytest.mark.gpu
@KERNELS
def test_an_infinite_number_shows_on_a_gpu(tests, case, pose, rng):
    run = on_a_gpu(tests, case)
    for gates in GATES:
        assert_shows(case, gates, *pose(case, rng, run))
