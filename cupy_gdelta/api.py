"""The public functions; each takes in, checks, runs and gives back."""

from __future__ import annotations

from typing import Any

from . import arrays, cpu, problem
from .problem import Problem


def gated_linear_attention(
    q,
    k,
    v,
    gate=None,
    beta=None,
    *,
    log_gate=None,
    scale=1.0,
    initial_state=None,
    cu_seqlens=None,
    return_state=False,
    out=None,
    precision="highest",
) -> Any:
    return _forward(
        problem.check(
            "gated_linear_attention",
            "linear",
            q,
            k,
            v,
            gate,
            beta,
            log_gate=log_gate,
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            return_state=return_state,
            out=out,
            precision=precision,
        )
    )


def gated_delta_rule(
    q,
    k,
    v,
    gate=None,
    beta=None,
    *,
    log_gate=None,
    scale=1.0,
    qk_l2norm=False,
    initial_state=None,
    cu_seqlens=None,
    return_state=False,
    out=None,
    precision="highest",
) -> Any:
    return _forward(
        problem.check(
            "gated_delta_rule",
            "delta",
            q,
            k,
            v,
            gate,
            beta,
            log_gate=log_gate,
            scale=scale,
            qk_l2norm=qk_l2norm,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            return_state=return_state,
            out=out,
            precision=precision,
        )
    )


def _forward(p: Problem) -> Any:
    """Run a checked problem and hand y (and the final state) back in the caller's family."""
    y = p.out
    if y is None or any(y.overlaps(x) for x in p.inputs):
        y = arrays.empty(p.v, p.v.shape, p.dtype)
    state = None
    if p.return_state:
        state = arrays.empty(p.v, (p.N, p.H, p.K, p.V), p.state_dtype)
    if p.v.device < 0:
        cpu.forward(p, y.array, None if state is None else state.array)
    else:
        from . import gpu

        gpu.forward(p, y, state)
    if p.out is not None and y is not p.out:
        arrays.fill(p.out, y)
    result = arrays.give(y, p.v) if p.out is None else p.out.owner
    return result if state is None else (result, arrays.give(state, p.v))
