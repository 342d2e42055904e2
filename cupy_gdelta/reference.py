"""Both recurrences as loops over time in float64: the definition of right for every other path."""

from __future__ import annotations

import itertools

import numpy as np


def gated_linear_attention(
    q, k, v, gate=None, beta=None, *, log_gate=None, scale=1.0, initial_state=None, cu_seqlens=None
):
    """``S = gate * S + beta * k v^T; y = scale * q S``, one token after the other, in float64.

    Takes NumPy arrays of the shapes that :func:`cupy_gdelta.gated_linear_attention` takes and
    returns ``(y, state)``, both float64.
    """
    q, k, v, gate, beta, sequences, state = _widen(
        q, k, v, gate, beta, log_gate, initial_state, cu_seqlens
    )
    y = np.zeros(v.shape)
    for n, rows, start, stop in sequences:
        s = state[n]  # [B or 1, H, K, V]
        for t in range(start, stop):
            s *= gate[rows, t, :, None, None]
            s += (beta[rows, t, :, None] * k[rows, t])[..., :, None] * v[rows, t][..., None, :]
            y[rows, t] = scale * np.einsum("bhk,bhkv->bhv", q[rows, t], s)
    return y, state


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
):
    """``R = gate * S; S = R + beta * k (v - k^T R)^T; y = scale * q S``, one token after the other.

    Takes NumPy arrays of the shapes that :func:`cupy_gdelta.gated_delta_rule` takes and returns
    ``(y, state)``, both float64.
    """
    q, k, v, gate, beta, sequences, state = _widen(
        q, k, v, gate, beta, log_gate, initial_state, cu_seqlens
    )
    if qk_l2norm:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    y = np.zeros(v.shape)
    for n, rows, start, stop in sequences:
        s = state[n]  # [B or 1, H, K, V]
        for t in range(start, stop):
            s *= gate[rows, t, :, None, None]
            u = v[rows, t] - np.einsum("bhk,bhkv->bhv", k[rows, t], s)
            s += (beta[rows, t, :, None] * k[rows, t])[..., :, None] * u[..., None, :]
            y[rows, t] = scale * np.einsum("bhk,bhkv->bhv", q[rows, t], s)
    return y, state


def _widen(q, k, v, gate, beta, log_gate, initial_state, cu_seqlens):
    """float64 copies, q and k repeated to H heads; sequences as (state rows, rows, start, stop)."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    batch, time, heads = v.shape[:3]
    repeat = heads // q.shape[2] if q.shape[2] else 1
    q, k = (np.repeat(x, repeat, axis=2) for x in (q, k))
    if log_gate is not None:
        gate = np.exp(np.asarray(log_gate).astype(np.float64))
    ones = np.ones((batch, time, heads))
    gate, beta = (ones if x is None else np.asarray(x).astype(np.float64) for x in (gate, beta))
    if cu_seqlens is None:
        count, sequences = batch, [(slice(None), slice(None), 0, time)]
    else:
        ends = [int(x) for x in cu_seqlens]
        count = len(ends) - 1
        pairs = enumerate(itertools.pairwise(ends))
        sequences = [(slice(n, n + 1), slice(0, 1), a, b) for n, (a, b) in pairs]
    state = np.zeros((count, heads, q.shape[3], v.shape[3]))
    if initial_state is not None:
        state += np.asarray(initial_state).astype(np.float64)
    return q, k, v, gate, beta, sequences, state
