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
    """Gated linear attention, from the first token to the last::

        S[t] = gate[t] * S[t-1] + beta[t] * k[t] v[t]^T        S is (K, V)
        y[t] = scale * q[t] S[t]                               read after the update

    Nothing is subtracted from the written value: the rule sometimes called "scalar-gated delta-rule
    linear attention" is this one, and the Gated DeltaNet is :func:`gated_delta_rule`.

    Parameters
    ----------
    q, k : array (B, T, Hq, K)
        Queries and keys in float16, bfloat16, float32 or float64; K from 1 to 256.
    v : array (B, T, H, V)
        Values in the dtype of ``q``; V from 1 to 256. H is a multiple of Hq: head ``h`` of ``v``
        goes with head ``h // (H // Hq)`` of ``q`` and ``k``.
    gate : array (B, T, H), optional
        What the state is multiplied by: 1 keeps it, 0 forgets it exactly, negative and larger
        values are legal. float32 or the dtype of ``q``; 1 where left out.
    beta : array (B, T, H), optional
        What a write is multiplied by. float32 or the dtype of ``q``; 1 where left out.
    log_gate : array (B, T, H), optional
        The natural logarithm of the gate (-inf forgets), instead of ``gate``.
    scale : number
        What y is multiplied by.
    initial_state : array (N, H, K, V), optional
        The state before the first token, in float32 (float64 for float64 inputs); zero where left
        out, and never written to. N is B, or the number of packed sequences.
    cu_seqlens : sequence or array of N + 1 integers, optional
        Offsets of N sequences packed along T, with B = 1, as in FlashAttention:
        ``cu_seqlens[n]:cu_seqlens[n + 1]`` are the tokens of sequence ``n``, and may be none. y is
        0 in tokens after the last offset. On a GPU the values of a device array are not checked.
    return_state : bool
        Return the state after the last token too.
    out : array (B, T, H, V), optional
        Where to write y. It may overlap an input: y is then computed elsewhere and copied.
    precision : {"highest", "tf32"}
        "tf32" allows a GPU to round float32 inputs to TF32 in products.

    Returns
    -------
    y : array (B, T, H, V)
        In the library, on the device and in the dtype of the inputs; ``out`` itself where given.
    state : array (N, H, K, V)
        With ``return_state``: in float32 (float64 for float64 inputs).

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument.

    Notes
    -----
    NumPy arrays are computed on the CPU, CuPy arrays and torch tensors where they lie, on the
    current stream of their library. Arrays of any other library with ``__dlpack__`` are handed back
    in that library. Any strides will do. No input is ever written to.

    A NaN or an infinity stays in its own sequence and head, and never reaches an earlier chunk of
    tokens; within its chunk it may show in earlier tokens too.
    """
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
    """Gated delta rule (Gated DeltaNet), from the first token to the last::

        R    = gate[t] * S[t-1]                                decay first; S is (K, V)
        S[t] = R + beta[t] * k[t] (v[t] - k[t]^T R)^T          write what R got wrong about v[t]
        y[t] = scale * q[t] S[t]                               read after the update

    Use :func:`gated_linear_attention` for the rule that writes ``k v^T`` and subtracts nothing,
    sometimes called "scalar-gated delta-rule linear attention". The state stays bounded for keys of
    unit length with ``beta`` from 0 to 2 and gates up to 1: see ``qk_l2norm``.

    Parameters
    ----------
    q, k, v, gate, beta, log_gate, scale, initial_state, cu_seqlens, return_state, out, precision
        As in :func:`gated_linear_attention`.
    qk_l2norm : bool
        Divide each query and key ``x`` by ``sqrt(x . x + 1e-6)`` first, in float32 (float64 for
        float64 inputs).

    Returns
    -------
    y, state
        As in :func:`gated_linear_attention`.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument.

    Notes
    -----
    As in :func:`gated_linear_attention`.
    """
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
    if p.out is not None:
        if y is not p.out:
            arrays.fill(p.out, y)
        arrays.written(p.out)
    result = arrays.give(y, p.v) if p.out is None else p.out.owner
    return result if state is None else (result, arrays.give(state, p.v))
