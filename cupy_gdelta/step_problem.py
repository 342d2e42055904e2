"""The arguments of a decode step -> a frozen StepProblem; its refusals, beside those of problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from . import problem
from .arrays import View
from .problem import Fail

MAX_TOKENS = 16


@dataclass(frozen=True)
class StepProblem:
    """One checked step: sizes, views of the arrays with an axis T, and what is asked for."""

    name: str  # the public function, for messages
    rule: str  # "linear" or "delta"
    B: int
    T: int
    H: int
    Hq: int
    K: int
    V: int
    P: int  # rows of the state pool
    q: View
    k: View
    v: View
    gate: View | None  # the logarithm of the gate when log_gate is set
    log_gate: bool
    beta: View | None
    state: View
    state_indices: np.ndarray | View | None  # int64 on the host, checked, or a view on the device
    states_out: View | None
    scale: float
    qk_l2norm: bool
    out: View | None
    y_shape: tuple[int, ...]  # as the caller gets it, with or without the axis T

    @property
    def dtype(self) -> str:
        return self.q.dtype

    @property
    def inputs(self) -> list[View]:
        return [x for x in (self.q, self.k, self.v, self.gate, self.beta) if x is not None]


def check(
    name: str,
    rule: str,
    q: Any,
    k: Any,
    v: Any,
    gate: Any,
    beta: Any,
    state: Any,
    *,
    log_gate: Any = None,
    scale: Any = 1.0,
    qk_l2norm: Any = False,
    state_indices: Any = None,
    states_out: Any = None,
    out: Any = None,
) -> StepProblem:
    """Refuse what breaks the contract, before any work; else describe the step."""

    def fail(kind: type[Exception], text: str) -> NoReturn:
        raise kind(f"{name}: {text}")

    arrays = {"q": q, "k": k, "v": v, **problem.one_gate(fail, gate, log_gate), "beta": beta}
    arrays |= {"state": state, "states_out": states_out, "out": out}
    why = "in a step, which computes no gradients"
    views = problem.take_all(fail, arrays, "(B, H) or (B, T, H)", why)
    lead = _lead(fail, views["q"])
    problem.check_dtypes(fail, views)
    sizes = problem.check_sizes(fail, views, lead)
    T = sizes.setdefault("T", 1)
    if T > MAX_TOKENS:
        fail(ValueError, f"q must have at most {MAX_TOKENS} tokens; got {T} in {views['q'].shape}")
    indices = _indices(fail, state_indices, views, sizes)
    _states(fail, views, sizes, lead, indices is not None)
    if "out" in views:
        form = f"({', '.join(lead)}, H, V)"
        problem.check_shape(fail, "out", views["out"], form, views["v"].shape)
        problem.check_writable(fail, "out", views["out"])
    _apart(fail, views)
    y_shape = views["v"].shape
    if len(lead) == 1:
        views = {label: x if label == "state" else with_time(x) for label, x in views.items()}
    return StepProblem(
        name=name,
        rule=rule,
        **sizes,
        P=views["state"].shape[0],
        q=views["q"],
        k=views["k"],
        v=views["v"],
        gate=views.get("gate", views.get("log_gate")),
        log_gate="log_gate" in views,
        beta=views.get("beta"),
        state=views["state"],
        state_indices=indices,
        states_out=views.get("states_out"),
        scale=problem.check_scale(fail, scale),
        qk_l2norm=problem.check_flag(fail, "qk_l2norm", qk_l2norm),
        out=views.get("out"),
        y_shape=y_shape,
    )


def _lead(fail: Fail, q: View) -> tuple[str, ...]:
    """Names of the axes before those of heads."""
    if len(q.shape) not in (3, 4):
        fail(ValueError, f"q must have shape (B, Hq, K) or (B, T, Hq, K); got {q.shape}")
    return ("B",) if len(q.shape) == 3 else ("B", "T")


def _states(
    fail: Fail, views: dict[str, View], sizes: dict[str, int], lead: tuple[str, ...], pool: bool
) -> None:
    state, B, *head = views["state"], *(sizes[n] for n in "BHKV")
    if pool:
        if len(state.shape) != 4 or state.shape[1:] != tuple(head):
            names = ", ".join(map(str, head))
            fail(
                ValueError,
                f"state must have shape (P, H, K, V) with H, K, V = {names} beside state_indices; "
                f"got {state.shape}",
            )
    else:
        problem.check_shape(fail, "state", state, "(B, H, K, V)", (B, *head))
    if "states_out" in views:
        form, want = f"({', '.join(lead)}, H, K, V)", (*(sizes[n] for n in lead), *head)
        problem.check_shape(fail, "states_out", views["states_out"], form, want)
    for label in ("state", "states_out"):
        if label in views:
            problem.check_writable(fail, label, views[label])


def _apart(fail: Fail, views: dict[str, View]) -> None:
    """Refuse arrays to write that share memory with others; y may overlap an input."""
    inputs = [label for label in views if label not in problem.WRITTEN]
    others = {"state": inputs, "states_out": [*inputs, "state"], "out": ["state", "states_out"]}
    for label, some in others.items():
        for other in some:
            if label in views and other in views and views[label].shares(views[other]):
                fail(
                    ValueError,
                    f"{label} must share no memory with {other}; got arrays that overlap",
                )


def _indices(
    fail: Fail, given: Any, views: dict[str, View], sizes: dict[str, int]
) -> np.ndarray | View | None:
    """Rows of the pool: on the host checked, on q's device a view that only kernels read."""
    if given is None:
        return None
    found = problem.take_integers(fail, "state_indices", given, views["q"])
    if found.shape != (sizes["B"],):
        B = sizes["B"]
        fail(ValueError, f"state_indices must have shape (B,) with B = {B}; got {found.shape}")
    if isinstance(found, View):
        return found
    rows = views["state"].shape[0] if views["state"].shape else 0
    used = found[found != -1] if found.dtype.kind == "i" else found
    for x in used[(used < 0) | (used >= rows)][:1]:
        fail(ValueError, f"state_indices must be -1 or from 0 to P - 1 = {rows - 1}; got {x}")
    values, counts = np.unique(used, return_counts=True)
    for x in values[counts > 1][:1]:
        fail(ValueError, f"state_indices must name each row of the pool once; got {x} twice")
    return found.astype(np.int64)


def with_time(x: View) -> View:
    """One token [B, ...] with an axis T of size 1."""
    return View(
        x.owner,
        x.family,
        x.device,
        x.array[:, None],
        (x.shape[0], 1, *x.shape[1:]),
        (x.strides[0], 0, *x.strides[1:]),
        x.dtype,
        x.ptr,
        x.needs_grad,
        x.copied,
    )
