"""Decode: the public functions for a few tokens at a time, the states updated in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import arrays, cpu, step_problem
from .step_problem import StepProblem

_repeat: dict[type, Callable] = {}  # who may know a call already, by the type of q


def gated_linear_attention_step(
    q,
    k,
    v,
    gate,
    beta,
    state,
    *,
    log_gate=None,
    scale=1.0,
    state_indices=None,
    states_out=None,
    out=None,
) -> Any:
    """Scalar-gated linear attention, one token or a few at a time: the linear rule for decoding.

    For every batch entry and head, with a state ``S`` of shape (K, V) that is updated in place::

        S <- gate * S + beta * k v^T
        y = scale * q S

    This recurrence is at times called a "scalar-gated delta rule", although nothing is subtracted
    in it; for the rule that writes the prediction error, see :func:`gated_delta_rule_step`. Steps
    continue a sequence from the state that :func:`gated_linear_attention` returns, and equal the
    same tokens in one sequence to rounding.

    Parameters
    ----------
    q, k : array, shape (B, Hq, K) or (B, T, Hq, K)
        Queries and keys of one token, or of T tokens, at most 16; float16, bfloat16, float32 or
        float64, K from 1 to 256. Head h of v reads head ``h // (H // Hq)`` of q and k.
    v : array, shape (B, H, V) or (B, T, H, V)
        Values, of the dtype of q; V from 1 to 256, independent of K.
    gate : array, shape (B, H) or (B, T, H), or None
        The multiplier itself, any finite value; float32 or the dtype of q. None is 1.
    beta : array, shape (B, H) or (B, T, H), or None
        Strength of the write, any finite value; float32 or the dtype of q. None is 1.
    state : array, shape (B, H, K, V) or (P, H, K, V)
        The states, updated in place: that of batch entry b is row b, or with ``state_indices`` row
        ``state_indices[b]`` of a pool of P. float32, bfloat16 or float16, for float64 inputs
        float64; all arithmetic is in float32 (float64), and a state of 16 bits is rounded once a
        call. May be a slice or any other view with memory of its own for each element; fastest
        where its last axis is contiguous.
    log_gate : array, shape (B, H) or (B, T, H), optional
        Natural logarithm of the gate, instead of ``gate``; ``-inf`` forgets.
    scale : float, default 1.0
        Factor of y.
    state_indices : sequence of int or integer array, shape (B,), optional
        The row of ``state`` that each batch entry owns; -1 is padding: the entry is skipped and its
        y is 0. No row may be named twice. On the host that and the range are checked. As an array
        (int32 or int64) of q's library on q's GPU it is read by the kernel alone: a row out of
        range counts as padding, and a row named twice ends up with some mixture of the two updates.
    states_out : array, shape (B, H, K, V) or (B, T, H, K, V), optional
        Array of the state's dtype, family and device to write the state after each token into;
        that of padding is left as it is.
    out : array, shape (B, H, V) or (B, T, H, V), optional
        Array of y's dtype, family and device to write into; may be strided, may overlap an input.

    Returns
    -------
    y : array, shape (B, H, V) or (B, T, H, V)
        In the dtype, family and device of v; ``out`` itself where given.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, the rule it breaks and the value it has.

    Notes
    -----
    Families, devices and streams are as in :func:`gated_linear_attention`. A NaN reaches no other
    batch entry or head. On a GPU each element of the state is read once and written once a call,
    whatever T is, in one launch that a CUDA graph can capture. Calls that differ from an earlier
    one in nothing but where their arrays lie are checked no more and launched at once.

    To verify T drafted tokens, pass them together with ``states_out``; if only the first n of them
    (n >= 1) are accepted, go back with ``state[...] = states_out[:, n - 1]``, in a pool with
    ``state[rows] = states_out[entries, n - 1]``. Pass at least one token that is sure, or keep a
    copy of the state, to go back to before the first.

    The recurrence is that of RetNet (Sun et al., 2023, arXiv:2307.08621) and Mamba-2 (Dao and Gu,
    2024, arXiv:2405.21060).

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_gdelta import gated_linear_attention_step
    >>> one, half = np.ones((1, 1, 1), np.float32), np.full((1, 1), 0.5, np.float32)
    >>> state = np.zeros((1, 1, 1, 1), np.float32)
    >>> for _ in range(3):
    ...     y = gated_linear_attention_step(one, one, one, half, None, state)
    >>> y.item(), state.item()
    (1.75, 1.75)
    """
    step = "linear", scale, False, log_gate, state_indices, states_out, out
    return _step("gated_linear_attention_step", q, k, v, gate, beta, state, *step)


def gated_delta_rule_step(
    q,
    k,
    v,
    gate,
    beta,
    state,
    *,
    log_gate=None,
    scale=1.0,
    qk_l2norm=False,
    state_indices=None,
    states_out=None,
    out=None,
) -> Any:
    """The gated delta rule, one token or a few at a time, for decoding.

    For every batch entry and head, with a state ``S`` of shape (K, V) that is updated in place::

        R = gate * S
        S <- R + beta * k (v - k^T R)^T
        y = scale * q S

    Steps continue a sequence from the state that :func:`gated_delta_rule` returns, and equal the
    same tokens in one sequence to rounding. The recurrence that only adds, at times called a
    "scalar-gated delta rule" too, is :func:`gated_linear_attention_step`.

    Parameters
    ----------
    q, k : array, shape (B, Hq, K) or (B, T, Hq, K)
        Queries and keys of one token, or of T tokens, at most 16; float16, bfloat16, float32 or
        float64, K from 1 to 256. Head h of v reads head ``h // (H // Hq)`` of q and k.
    v : array, shape (B, H, V) or (B, T, H, V)
        Values, of the dtype of q; V from 1 to 256, independent of K.
    gate : array, shape (B, H) or (B, T, H), or None
        The multiplier itself, any finite value; float32 or the dtype of q. None is 1.
    beta : array, shape (B, H) or (B, T, H), or None
        Strength of the write, any finite value; float32 or the dtype of q. None is 1.
    state : array, shape (B, H, K, V) or (P, H, K, V)
        The states, updated in place: that of batch entry b is row b, or with ``state_indices`` row
        ``state_indices[b]`` of a pool of P. float32, bfloat16 or float16, for float64 inputs
        float64; all arithmetic is in float32 (float64), and a state of 16 bits is rounded once a
        call. May be a slice or any other view with memory of its own for each element; fastest
        where its last axis is contiguous.
    log_gate : array, shape (B, H) or (B, T, H), optional
        Natural logarithm of the gate, instead of ``gate``; ``-inf`` forgets.
    scale : float, default 1.0
        Factor of y.
    qk_l2norm : bool, default False
        Bring q and k to unit length first: ``x / sqrt(sum(x * x) + 1e-6)`` in float32 (float64 for
        float64 inputs).
    state_indices : sequence of int or integer array, shape (B,), optional
        The row of ``state`` that each batch entry owns; -1 is padding: the entry is skipped and its
        y is 0. No row may be named twice. On the host that and the range are checked. As an array
        (int32 or int64) of q's library on q's GPU it is read by the kernel alone: a row out of
        range counts as padding, and a row named twice ends up with some mixture of the two updates.
    states_out : array, shape (B, H, K, V) or (B, T, H, K, V), optional
        Array of the state's dtype, family and device to write the state after each token into;
        that of padding is left as it is.
    out : array, shape (B, H, V) or (B, T, H, V), optional
        Array of y's dtype, family and device to write into; may be strided, may overlap an input.

    Returns
    -------
    y : array, shape (B, H, V) or (B, T, H, V)
        In the dtype, family and device of v; ``out`` itself where given.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, the rule it breaks and the value it has.

    Notes
    -----
    Families, devices, streams, graphs and how to take back tokens that were not accepted are as in
    :func:`gated_linear_attention_step`.

    The rule is that of Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464); for
    one column of V, without a gate and with keys of unit length, it is the normalised LMS filter
    (Widrow and Hoff, 1960).

    Examples
    --------
    Two values under one key: the second replaces the first.

    >>> import numpy as np
    >>> from cupy_gdelta import gated_delta_rule_step
    >>> key = np.array([0.6, 0.8], np.float32).reshape(1, 1, 2)
    >>> state = np.zeros((1, 1, 2, 1), np.float32)
    >>> for value in (3, 5):
    ...     v = np.full((1, 1, 1), value, np.float32)
    ...     print(gated_delta_rule_step(key, key, v, None, None, state).round(5).item())
    3.0
    5.0
    """
    step = "delta", scale, qk_l2norm, log_gate, state_indices, states_out, out
    return _step("gated_delta_rule_step", q, k, v, gate, beta, state, *step)


def _step(
    name: str,
    q: Any,
    k: Any,
    v: Any,
    gate: Any,
    beta: Any,
    state: Any,
    rule: str,
    scale: Any,
    qk_l2norm: Any,
    log_gate: Any,
    state_indices: Any,
    states_out: Any,
    out: Any,
) -> Any:
    """One call of either rule: as an earlier one of its form if there was one, else checked."""
    again = _repeat.get(q.__class__)
    if again is not None and (gate is None or log_gate is None):
        one = gate if log_gate is None else log_gate
        given = (q, k, v, one, beta, state_indices, out, state, states_out)
        y = again(rule, log_gate is not None, scale, qk_l2norm, given)
        if y is not None:
            return y
    p = step_problem.check(
        name,
        rule,
        q,
        k,
        v,
        gate,
        beta,
        state,
        log_gate=log_gate,
        scale=scale,
        qk_l2norm=qk_l2norm,
        state_indices=state_indices,
        states_out=states_out,
        out=out,
    )
    return _run(p)


def _run(p: StepProblem) -> Any:
    """Run a checked step and hand y back in the caller's family."""
    y = p.out
    if y is None or any(y.overlaps(x) for x in p.inputs):
        y = arrays.empty(p.v, p.y_shape, p.dtype)
        if len(p.y_shape) == 3:
            y = step_problem.with_time(y)
    if p.B and p.T and p.H:
        if p.v.device < 0:
            cpu.advance(p, y.array)
        else:
            from . import gpu

            again = gpu.advance(p, y)
            if again is not None:
                _repeat[p.v.owner.__class__] = again
        for x in (p.state, p.states_out):
            if x is not None:
                arrays.written(x)
    if p.out is not None:
        if y is not p.out:
            arrays.fill(p.out, y)
        arrays.written(p.out)
    return arrays.give(y, p.v) if p.out is None else p.out.owner
