"""One sequence over many ranks."""

from __future__ import annotations

from typing import Any

from . import enter


def gated_linear_attention(
    q, k, v, gate=None, beta=None, *, comm, log_gate=None, scale=1.0, initial_state=None,
    cu_seqlens=None, return_state=False, out=None, precision="highest",
) -> Any:
    return enter.call(
        "gated_linear_attention", "linear", comm, q=q, k=k, v=v, gate=gate, beta=beta,
        log_gate=log_gate, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        return_state=return_state, out=out, precision=precision,
    )


def gated_delta_rule(
    q, k, v, gate=None, beta=None, *, comm, log_gate=None, scale=1.0, qk_l2norm=False,
    initial_state=None, cu_seqlens=None, return_state=False, out=None, precision="highest",
) -> Any:
    return enter.call(
        "gated_delta_rule", "delta", comm, q=q, k=k, v=v, gate=gate, beta=beta,
        log_gate=log_gate, scale=scale, qk_l2norm=qk_l2norm, initial_state=initial_state,
        cu_seqlens=cu_seqlens, return_state=return_state, out=out, precision=precision,
    )
