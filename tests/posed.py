"""Calls of a kernel posed by hand: on NumPy arrays for the host harness, on CuPy ones for GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from compare import REFERENCE, REFERENCE_GRAD, assert_close, bits, host
from conftest import Family
from host import simt

from cupy_gdelta import accuracy, arrays, problem
from cupy_gdelta.gpu import call, loader

RUNS = int(os.environ.get("CUPY_GDELTA_RUNS", "20"))  # that must have the same bits; few for tools
needs_compiler = pytest.mark.skipif(simt.compiler() is None, reason="g++ is missing")


def random_inputs(case: Any, rng: np.random.Generator, family: Family) -> dict:
    """Arrays of a case's sizes, gate regime and dtype, with a state for each sequence."""
    sizes = {n: getattr(case, n) for n in ("B", "T", "H", "Hq", "K", "V", "gate")}
    x = accuracy.inputs(rng, **sizes)
    count = len(case.options.get("cu_seqlens", range(case.B + 1))) - 1
    x["initial_state"] = rng.standard_normal((count, case.H, case.K, case.V))
    return family.arrays(x, case.dtype)


def pose(case: Any, x: dict) -> tuple[problem.Problem, arrays.View, arrays.View]:
    """The checked call of a case with rule and options; y and the state filled with NaN."""
    inputs = {"gate": None, **x}
    p = problem.check(
        "test",
        case.rule,
        *(inputs.pop(n) for n in ("q", "k", "v", "gate", "beta")),
        return_state=True,
        **inputs,
        **case.options,
    )
    y = arrays.empty(p.v, p.v.shape, p.dtype)
    state = arrays.empty(p.v, (p.N, p.H, p.K, p.V), p.state_dtype)
    y.owner[...] = np.nan
    state.owner[...] = np.nan
    return p, y, state


class Hosted(NamedTuple):
    """A call on the CPU: the kernel's first argument, and the memory it may touch."""

    p: problem.Problem
    y: np.ndarray
    state: np.ndarray
    args: np.ndarray
    reads: dict
    writes: dict


def random_gradients(case: Any, rng: np.random.Generator, family: Family) -> dict:
    """dy and dstate of a case's sizes and dtype."""
    count = len(case.options.get("cu_seqlens", range(case.B + 1))) - 1
    x = {
        "dy": rng.standard_normal((case.B, case.T, case.H, case.V)),
        "dstate": rng.standard_normal((count, case.H, case.K, case.V)),
    }
    kinds = {"dy": case.dtype, "dstate": arrays.state_dtype(case.dtype)}
    return {name: family.array(value, kinds[name]) for name, value in x.items()}


def pose_grad(case: Any, x: dict) -> tuple[problem.Problem, dict[str, arrays.View]]:
    """The checked call of a case for gradients, and arrays of NaN for them."""
    inputs = {"gate": None, **x}
    p = problem.check(
        "test",
        case.rule,
        *(inputs.pop(n) for n in ("q", "k", "v", "gate", "beta")),
        backward=True,
        **inputs,
        **case.options,
    )
    grads = {}
    for name in ("q", "k", "v", "gate", "beta", "initial_state"):
        like = getattr(p, name)
        if like is not None:
            grads[name] = arrays.empty(p.v, like.shape, like.dtype)
            grads[name].owner[...] = np.nan
    return p, grads


def verify_grad(case: Any, x: dict, grads: dict, what: str) -> None:
    """Compare gradients with the reference, at the tolerance of the case's dtype."""
    inputs = {n: a if a is None else host(a) for n, a in x.items()}
    expected = REFERENCE_GRAD[case.rule](**inputs, **case.options)
    tolerance = accuracy.GRADIENT_TOLERANCE[case.dtype]
    for name, got in grads.items():
        assert_close(got, getattr(expected, name), tolerance, f"{case} {what} d {name}")


def on_host(case: Any, x: dict) -> Hosted:
    p, y, state = pose(case, x)
    offsets = None if p.cu_seqlens is None else arrays.take(p.cu_seqlens)
    reads = {name: view.array for name, view in vars(p).items() if isinstance(view, arrays.View)}
    if offsets is not None:
        reads["cu_seqlens"] = offsets.array
    args = call.arguments(*(addressed(a) for a in (p, y, state, offsets)))[0]
    return Hosted(p, y.owner, state.owner, args, reads, {"y": y.array, "state": state.array})


def addressed(x):
    """A view with the address that it has on the CPU; a problem with such views."""
    if isinstance(x, arrays.View):
        return replace(x, ptr=x.array.ctypes.data)
    if isinstance(x, problem.Problem):
        views = {n: v for n, v in vars(x).items() if isinstance(v, arrays.View)}
        return replace(x, **{n: addressed(v) for n, v in views.items()})
    return x


def device_offsets(p: problem.Problem) -> arrays.View | None:
    """The offsets of a packed call on the GPU."""
    if p.cu_seqlens is None:
        return None
    return arrays.take(Family("cupy").array(p.cu_seqlens))


def assert_a_gate_shows(case: Any, x: dict, bad: float, run: Callable[[], tuple]) -> None:
    """A gate that is not finite makes y so from its token on, and the state, but not before."""
    x["gate"][0, 70] = bad
    y, state = run()
    assert np.isfinite(y[0, :64]).all(), case
    assert not np.isfinite(y[0, 70:]).any(), case
    assert not np.isfinite(state).any(), case


def assert_a_query_stays(case: Any, x: dict, run: Callable[[], tuple]) -> None:
    """A query that is not a number makes y so at its own token and no other."""
    x["q"][0, 5] = np.nan
    y, state = run()
    assert np.flatnonzero(np.isnan(y).any((0, 2, 3))).tolist() == [5], case
    assert np.isfinite(state).all(), case


def where_every_lane_arrives(folder: Path) -> Path:
    """Sources of kernels as compute-sanitizer's racecheck wants them, copied into a folder."""
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, folder)
    arrive = folder / "arrive.cuh"
    arrive.write_text("#define EVERY_LANE_ARRIVES\n" + arrive.read_text())
    return folder


def verify(case: Any, x: dict, y, state, what: str) -> None:
    """Compare with the reference, at the tolerance of the case's rule and dtype."""
    inputs = {n: a if a is None else host(a) for n, a in x.items()}
    expected = REFERENCE[case.rule](**inputs, **case.options)
    tolerance = accuracy.TOLERANCE[case.rule, case.dtype]
    for name, got, want in zip(("y", "state"), (y, state), expected, strict=True):
        assert_close(got, want, tolerance, f"{case} {what} {name}")


def verify_in_every_order(
    case: Any, x: dict, run: Callable[[int], tuple], verify: Callable = verify
) -> None:
    """Compare y and the state of ``run(order)``: the same bits each time, inputs left alone."""

    def verified(order: int) -> tuple:
        results = run(order)
        verify(case, x, *results, f"order {order}")
        return results

    _same_in_every_order(x, verified)


def verify_grad_in_every_order(case: Any, x: dict, run: Callable[[int], dict]) -> None:
    """The same for gradients."""

    def verified(order: int) -> Iterable[np.ndarray]:
        grads = run(order)
        verify_grad(case, x, grads, f"order {order}")
        return grads.values()

    _same_in_every_order(x, verified)


def _same_in_every_order(x: dict, verified: Callable[[int], Iterable]) -> None:
    before = {name: bits(a) for name, a in x.items()}
    first = None
    for order in simt.ORDERS:
        found = bits(*verified(order))
        assert first in (None, found), "the order of threads shows in the result"
        first = found
    for name, a in x.items():
        assert bits(a) == before[name], f"{name} was written to"


def laid_out(x: dict, layout: str) -> dict:
    """The CuPy arrays of a call with q, k and v, or the state, as they lie in larger ones."""
    import cupy

    if layout == "heads first":
        q, k, v = (cupy.ascontiguousarray(x[n].transpose(0, 2, 1, 3)) for n in "qkv")
        return x | {n: a.transpose(0, 2, 1, 3) for n, a in zip("qkv", (q, k, v), strict=True)}
    if layout == "sliced":
        together = cupy.stack([x[n] for n in "qkv"], axis=2)
        return x | {n: together[:, :, i] for i, n in enumerate("qkv")}
    assert layout == "reversed states"
    state = cupy.ascontiguousarray(x["initial_state"][:, :, ::-1, ::-1])
    return x | {"initial_state": state[:, :, ::-1, ::-1]}
