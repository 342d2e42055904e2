"""The public gradients; each takes in, checks, runs and gives back."""

from __future__ import annotations

from . import arrays, cpu, problem
from .gradients import Gradients
from .problem import Problem


def gated_linear_attention_grad(
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
    initial_state=None,
    cu_seqlens=None,
    precision="highest",
) -> Gradients:
    """The gradients of :func:`gated_linear_attention`: what a loss changes by with each argument.

    With G the gradient of the state, taken back through time from ``dstate``::

        G = G + scale * q_t dy_t^T
        dq_t = scale * S_t dy_t                 dbeta_t = k_t^T G v_t
        dk_t = beta_t * G v_t                   dgate_t = <G, S_{t-1}>
        dv_t = beta_t * G^T k_t                 G = gate_t * G

    Parameters
    ----------
    dy : array, shape (B, T, H, V), or None
        Gradient of the loss with respect to y, of the dtype of q; any strides. None is zero.
    q, k, v, gate, beta, log_gate, scale, initial_state, cu_seqlens, precision
        As in the call of :func:`gated_linear_attention` that computed y.
    dstate : array, shape (N, H, K, V), optional
        Gradient with respect to the final state, float32 (float64 for float64 inputs). None is
        zero; one of dy and dstate must be given.

    Returns
    -------
    Gradients
        A named tuple of q, k, v, gate, beta and initial_state, each of the shape, dtype, family and
        device of that argument, None where it was None. ``gate`` is the gradient of ``log_gate``
        where the gate was given so. Heads that share a query head are summed in q and k.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, the rule it breaks and the value it has.

    Notes
    -----
    The gate's gradient is formed as the inner product above, from products of gates and never by
    dividing by one: it is right at a gate of 0, negative or 1e-37, and after strong decay. That of
    ``log_gate`` is ``gate * dgate``, 0 at ``-inf``.

    Families, devices, streams and strides are as in :func:`gated_linear_attention`. A NaN or Inf
    reaches gradients of tokens before it, by the nature of gradients, and of its chunk.

    Memory besides the results: on the CPU a segment of tokens for each thread, and the state
    between two segments, one of (K, V) for each head every 32 tokens or more. On a GPU the linear
    rule of at least 64 tokens with K and V up to 128, as far as shared memory holds a chunk, keeps
    two states for each head every 64 tokens, bfloat16 for bfloat16 inputs and float32 otherwise,
    and where heads share q and k their gradients for each of H heads in float32. All else keeps a
    state for each head before every block of 4 to 32 tokens (as many as shared memory holds states
    for, every fourth one), and the gradients of q and k, one for each of H heads and for each block
    of columns of V; the delta rule also keeps the misses, (B, T, H, V). These are float32, or
    float64 where sums are: for float64 inputs, and for float32 inputs of more than 1024 tokens.

    Those chunks multiply float32 and float16 numbers as the sum of two bfloat16 ones each, with
    errors of 2^-17 and 2^-16 at most and a tenth of that as a rule. Float32 ones are rounded so
    that the errors of equal numbers, which have one sign, do not add up.

    Nothing is added up by atomic operations: the same inputs give the same bits.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_gdelta import gated_linear_attention_grad
    >>> one = np.ones((1, 4, 1, 1), np.float32)
    >>> gate = np.array([1, 1, 0, 1], np.float32).reshape(1, 4, 1)
    >>> gated_linear_attention_grad(one, one, one, one, gate).gate.ravel()
    array([0., 1., 4., 1.], dtype=float32)
    """
    return backward(
        problem.check(
            "gated_linear_attention_grad",
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
            precision=precision,
            backward=True,
            dy=dy,
            dstate=dstate,
        )
    )


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
    initial_state=None,
    cu_seqlens=None,
    precision="highest",
) -> Gradients:
    """The gradients of :func:`gated_delta_rule`: what a loss changes by with each argument.

    With G the gradient of the state, taken back through time from ``dstate``, the decayed state
    ``R = gate_t * S_{t-1}`` and the miss ``e = v_t - k_t^T R``::

        G = G + scale * q_t dy_t^T
        dq_t = scale * S_t dy_t                 dbeta_t = k_t^T G e
        dv_t = beta_t * G^T k_t                 dk_t = beta_t * G e - R dv_t
        G = G - k_t dv_t^T
        dgate_t = <G, S_{t-1}>                  G = gate_t * G

    Parameters
    ----------
    dy : array, shape (B, T, H, V), or None
        Gradient of the loss with respect to y, of the dtype of q; any strides. None is zero.
    q, k, v, gate, beta, log_gate, scale, qk_l2norm, initial_state, cu_seqlens, precision
        As in the call of :func:`gated_delta_rule` that computed y.
    dstate : array, shape (N, H, K, V), optional
        Gradient with respect to the final state, float32 (float64 for float64 inputs). None is
        zero; one of dy and dstate must be given.

    Returns
    -------
    Gradients
        A named tuple of q, k, v, gate, beta and initial_state, each of the shape, dtype, family and
        device of that argument, None where it was None. ``gate`` is the gradient of ``log_gate``
        where the gate was given so. Heads that share a query head are summed in q and k, whose
        gradients are those of q and k as given, also with ``qk_l2norm``.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, the rule it breaks and the value it has.

    Notes
    -----
    What is said of the gate's gradient, of families, devices and memory in
    :func:`gated_linear_attention_grad` holds here.

    On a GPU sequences of at least 64 tokens run in chunks on tensor cores: bfloat16 with K from 16
    to 128 and V up to 128, and float32 with K from 16 to 64 and V up to 64; all others go token by
    token. Chunks have a workspace: with bfloat16, for each 64 tokens of a head two states of (K, V)
    and (64, V) in bfloat16 and 26 KB; with float32, for each 32 tokens two states and (32, V) in
    float32 and 9 KB. Grouped heads and ``qk_l2norm`` add dq and dk of every head in float32. No sum
    is made by atomics. In bfloat16, where one key is written again and again, states cancel:
    gradients of gate may err by 2.3e-2 then, and those of beta by 1.7e-2 (1.8e-2 with a beta of 2).
    Gates whose product passes 2^60 inside a chunk are allowed for: a gradient that float32 cannot
    hold leaves the others as they are, as long as float32 holds the states.

    Examples
    --------
    The second value under a key replaces the first, so that only it has a gradient in the last y:

    >>> import numpy as np
    >>> from cupy_gdelta import gated_delta_rule_grad
    >>> key = np.array([1, 0], np.float32).reshape(1, 1, 1, 2).repeat(2, axis=1)
    >>> value = np.array([3, 5], np.float32).reshape(1, 2, 1, 1)
    >>> dy = np.array([0, 1], np.float32).reshape(1, 2, 1, 1)
    >>> gated_delta_rule_grad(dy, key, key, value).v.ravel()
    array([0., 1.], dtype=float32)
    """
    return backward(
        problem.check(
            "gated_delta_rule_grad",
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
            precision=precision,
            backward=True,
            dy=dy,
            dstate=dstate,
        )
    )


def backward(p: Problem) -> Gradients:
    """Run a checked problem and hand the gradients back in the caller's family."""
    given = {name: getattr(p, name) for name in Gradients._fields}
    grads = {
        name: arrays.empty(p.v, x.shape, x.dtype) for name, x in given.items() if x is not None
    }
    if p.v.device < 0:
        cpu.backward(p, {name: x.array for name, x in grads.items()})
    else:
        from . import gpu

        gpu.backward(p, grads)
    return Gradients(*(arrays.give(grads[name], p.v) if name in grads else None for name in given))
