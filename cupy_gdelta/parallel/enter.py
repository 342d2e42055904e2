"""From the caller's arrays on one rank to a call that all ranks have agreed on, and back."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

from .. import arrays, problem
from ..arrays import View
from ..problem import Problem
from .agree import agree, refusal
from .links import Link, link, on_host
from .pieces import share
from .run import Call

FAR = 1 << 62  # tokens, more than any sequence has


def call(name: str, rule: str, comm: Any, **given: Any) -> Any:
    """One call of a public function, on this rank."""
    found = agreed(name, rule, link(name, comm), given)
    if found.differentiable:
        from . import autograd

        y, state = autograd.apply(found, given)
    else:
        y, state = run(found)
    return (y, state) if found.p.return_state else y


def run(found: Call) -> tuple[Any, Any]:
    """y and the final states, None where they are not given, in the caller's library."""
    p = found.p
    y = p.out
    if y is None or any(y.overlaps(x) for x in p.inputs):
        y = arrays.empty(p.v, p.v.shape, p.dtype)
    with found.space.current():
        state = found.forward(y)
    if p.out is not None:
        if y is not p.out:
            arrays.fill(p.out, y)
        arrays.written(p.out)
    return y.owner if p.out is None else p.out.owner, None if state is None else state.owner


def agreed(name: str, rule: str, ends: Link, given: dict[str, Any]) -> Call:
    """The call, once all ranks have found it right; the same error on all ranks otherwise."""
    p, own, differentiable = None, (0, 0), False
    try:
        p = _check(name, rule, ends, given)
        differentiable = any(_needs_grad(x) for x in given.values())
        if differentiable and p.out is not None:
            wanted = "out must be None where an input requires grad"
            raise ValueError(f"{name}: {wanted}; got {p.out.kind}")
        same = _common(p, given["return_state"]) | {"differentiable": differentiable}
        own = p.T, int(p.initial_state is not None)
    except Exception as error:  # of any kind, for the other ranks are waiting
        same = refusal(error)
    numbers = agree(ends, name, same, own)
    assert p is not None
    offsets, lengths = p.cu_seqlens, numbers[:, 0]
    assert not isinstance(offsets, View)
    if offsets is not None and offsets[-1] > lengths.sum():
        raise ValueError(
            f"{name}: cu_seqlens must end at T = {lengths.sum()}, the tokens of all ranks, or "
            f"before; got {offsets[-1]}"
        )
    having = np.flatnonzero(numbers[:, 1]).tolist()
    if having not in ([], [0], list(range(ends.size))):
        raise ValueError(
            f"{name}: initial_state must be given on rank 0, on all ranks or on none; "
            f"got it on {_listed(having)} of {ends.size}"
        )
    pieces = share(lengths, p.B, offsets)
    spread = having == [0] and bool((pieces.last > pieces.first)[1:].any())
    return Call(ends, p, pieces, spread, given["return_state"] == "all", differentiable)


def _listed(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(r) for r in ranks)


def _check(name: str, rule: str, ends: Link, given: dict[str, Any]) -> Problem:
    """What this rank alone can refuse."""
    everywhere = given["return_state"]
    if isinstance(everywhere, str):
        if everywhere != "all":
            raise ValueError(
                f'{name}: return_state must be True, False or "all"; got {everywhere!r}'
            )
        everywhere = True
    inputs = {label: _constant(x) for label, x in given.items() if label != "out"}
    inputs["cu_seqlens"] = _host(given["cu_seqlens"])
    inputs["return_state"] = everywhere
    p = problem.check(name, rule, **inputs, out=given["out"], whole=FAR)
    if p.v.family == "dlpack":
        raise TypeError(
            f"{name}: q must be a NumPy array, a CuPy array or a torch tensor; got {p.q.kind}"
        )
    wanted = ends.refuses(p.v)
    if wanted:
        raise TypeError(f"{name}: q must lie {wanted}; got {p.q.kind}")
    return p


def _needs_grad(x: Any) -> bool:
    if getattr(x, "requires_grad", False) is not True:
        return False
    return sys.modules["torch"].is_grad_enabled()


def _constant(x: Any) -> Any:
    """A tensor without its gradient."""
    return x.detach() if getattr(x, "requires_grad", False) is True else x


def _host(offsets: Any) -> Any:
    """cu_seqlens on a GPU, copied to the host: every rank needs to know who holds what."""
    if not hasattr(offsets, "__dlpack__") or isinstance(offsets, np.ndarray):
        return offsets
    try:
        view = arrays.take(offsets)
    except TypeError:
        return offsets  # and refused where all others are
    return offsets if view.device < 0 else on_host(view.array)


def _common(p: Problem, return_state: Any) -> dict[str, Any]:
    """What must be the same on all ranks; see agree.SAME."""
    return {
        "function": p.name,
        "dtype": p.dtype,
        "B": p.B,
        "Hq": p.Hq,
        "H": p.H,
        "K": p.K,
        "V": p.V,
        "cu_seqlens": _summary(p.cu_seqlens),
        "scale": p.scale,
        "qk_l2norm": p.qk_l2norm,
        "precision": p.precision,
        "return_state": return_state if isinstance(return_state, str) else bool(return_state),
    }


def _summary(offsets: Any) -> str:
    if offsets is None:
        return "None"
    if len(offsets) <= 9:
        return str(offsets.tolist())
    digest = hashlib.sha256(offsets.tobytes()).hexdigest()[:16]
    return f"{len(offsets)} offsets to {offsets[-1]} (SHA-256 {digest})"
