"""Both recurrences and their gradients as loops over time in float64: the definition of right."""

from __future__ import annotations

import itertools

import numpy as np

from .gradients import Gradients


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
        q, k = _unit(q), _unit(k)
    y = np.zeros(v.shape)
    for n, rows, start, stop in sequences:
        s = state[n]  # [B or 1, H, K, V]
        for t in range(start, stop):
            s *= gate[rows, t, :, None, None]
            u = v[rows, t] - np.einsum("bhk,bhkv->bhv", k[rows, t], s)
            s += (beta[rows, t, :, None] * k[rows, t])[..., :, None] * u[..., None, :]
            y[rows, t] = scale * np.einsum("bhk,bhkv->bhv", q[rows, t], s)
    return y, state


def gated_linear_attention_grad(
    dy, q, k, v, gate=None, beta=None, *, dstate=None, log_gate=None, **options
):
    """The gradients of :func:`gated_linear_attention`, from the last token to the first.

    ``d`` is the gradient of the state after a token, through its y and all that comes later.
    Returns :class:`Gradients` in float64, complete also where an argument is None.
    """
    scale = options.pop("scale", 1.0)
    wide = _widen(q, k, v, gate, beta, log_gate, **options)
    q_, k_, v_, gate, beta, sequences, state = wide
    dy, dstate, grad = _start(dy, dstate, *wide)
    for n, rows, start, stop in sequences:
        states = [state[n]]  # [B or 1, H, K, V]
        for t in range(start, stop):
            write = (beta[rows, t, :, None] * k_[rows, t])[..., :, None] * v_[rows, t][..., None, :]
            states.append(gate[rows, t, :, None, None] * states[-1] + write)
        d = dstate[n]
        for t in reversed(range(start, stop)):
            after, before = states.pop(), states[-1]
            grad.q[rows, t] = scale * np.einsum("bhkv,bhv->bhk", after, dy[rows, t])
            d = d + scale * q_[rows, t][..., :, None] * dy[rows, t][..., None, :]
            for_key = np.einsum("bhkv,bhv->bhk", d, v_[rows, t])
            for_value = np.einsum("bhkv,bhk->bhv", d, k_[rows, t])
            grad.k[rows, t] = beta[rows, t, :, None] * for_key
            grad.v[rows, t] = beta[rows, t, :, None] * for_value
            grad.beta[rows, t] = (k_[rows, t] * for_key).sum(-1)
            grad.gate[rows, t] = (d * before).sum((-2, -1))
            d = gate[rows, t, :, None, None] * d
        grad.initial_state[n] = d
    return _finish(grad, np.shape(q), gate, log_gate)


def gated_delta_rule_grad(
    dy,
    q,
    k,
    v,
    gate=None,
    beta=None,
    *,
    dstate=None,
    log_gate=None,
    scale=1.0,
    qk_l2norm=False,
    **options,
):
    """The gradients of :func:`gated_delta_rule`, from the last token to the first.

    ``d`` is the gradient of the state after a token, through its y and all that comes later, then
    that of the decayed state R. Returns :class:`Gradients` in float64, complete also where an
    argument is None.
    """
    wide = _widen(q, k, v, gate, beta, log_gate, **options)
    q_, k_, v_, gate, beta, sequences, state = wide
    if qk_l2norm:
        q_, k_ = _unit(q_), _unit(k_)
    dy, dstate, grad = _start(dy, dstate, *wide)
    for n, rows, start, stop in sequences:
        states, misses = [state[n]], []  # misses: v - k^T R
        for t in range(start, stop):
            r = gate[rows, t, :, None, None] * states[-1]
            misses.append(v_[rows, t] - np.einsum("bhk,bhkv->bhv", k_[rows, t], r))
            write = (beta[rows, t, :, None] * k_[rows, t])[..., :, None] * misses[-1][..., None, :]
            states.append(r + write)
        d = dstate[n]
        for t in reversed(range(start, stop)):
            after, before, miss = states.pop(), states[-1], misses.pop()
            grad.q[rows, t] = scale * np.einsum("bhkv,bhv->bhk", after, dy[rows, t])
            d = d + scale * q_[rows, t][..., :, None] * dy[rows, t][..., None, :]
            for_key = np.einsum("bhkv,bhv->bhk", d, miss)
            for_miss = beta[rows, t, :, None] * np.einsum("bhkv,bhk->bhv", d, k_[rows, t])
            d = d - k_[rows, t][..., :, None] * for_miss[..., None, :]
            r = gate[rows, t, :, None, None] * before
            read = np.einsum("bhkv,bhv->bhk", r, for_miss)
            grad.k[rows, t] = beta[rows, t, :, None] * for_key - read
            grad.v[rows, t] = for_miss
            grad.beta[rows, t] = (k_[rows, t] * for_key).sum(-1)
            grad.gate[rows, t] = (d * before).sum((-2, -1))
            d = gate[rows, t, :, None, None] * d
        grad.initial_state[n] = d
    if qk_l2norm:
        grad = grad._replace(q=_through_unit(grad.q, wide[0]), k=_through_unit(grad.k, wide[1]))
    return _finish(grad, np.shape(q), gate, log_gate)


def _start(dy, dstate, q, k, v, gate, beta, sequences, state):
    """dy and dstate in float64, None as zeros; gradients of zero for every token and value head."""
    dy, dstate = (
        np.zeros(x.shape) if d is None else np.asarray(d).astype(np.float64)
        for d, x in ((dy, v), (dstate, state))
    )
    grad = Gradients(*(np.zeros(x.shape) for x in (q, k, v, gate, beta)), dstate.copy())
    return dy, dstate, grad


def _finish(grad, q_shape, gate, log_gate):
    """q and k summed over the value heads that share a head; d log_gate = gate d gate."""
    batch, time, heads, size = q_shape
    group = grad.v.shape[2] // heads if heads else 1
    q, k = (x.reshape(batch, time, heads, group, size).sum(3) for x in grad[:2])
    return grad._replace(q=q, k=k, gate=grad.gate if log_gate is None else gate * grad.gate)


def _unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def _through_unit(d, x):
    """The gradient of x from that of x / sqrt(x . x + 1e-6)."""
    unit = _unit(x)
    return (d - unit * (unit * d).sum(-1, keepdims=True)) / np.sqrt(
        (x * x).sum(-1, keepdims=True) + 1e-6
    )


def _widen(q, k, v, gate, beta, log_gate, initial_state=None, cu_seqlens=None):
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
