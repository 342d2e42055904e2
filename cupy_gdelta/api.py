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
    """Scalar-gated linear attention: the linear rule, over whole sequences.

    For every batch entry and head, with a state ``S`` of shape (K, V)::

        S_t = gate_t * S_{t-1} + beta_t * k_t v_t^T
        y_t = scale * q_t S_t

    The state is updated before it is read. This recurrence is at times called a "scalar-gated delta
    rule", although nothing is subtracted in it; for the rule that writes the prediction error, see
    :func:`gated_delta_rule`.

    Parameters
    ----------
    q, k : array, shape (B, T, Hq, K)
        Queries and keys; float16, bfloat16, float32 or float64, K from 1 to 256. Head h of v reads
        head ``h // (H // Hq)`` of q and k; H must be a multiple of Hq.
    v : array, shape (B, T, H, V)
        Values, of the dtype of q; V from 1 to 256, independent of K.
    gate : array, shape (B, T, H), optional
        The multiplier itself, any finite value: 1 keeps, 0 forgets exactly, negative values and
        values above 1 are legal. float32 or the dtype of q; never rounded to 16 bits. None is 1.
    beta : array, shape (B, T, H), optional
        Strength of the write, any finite value; float32 or the dtype of q. None is 1.
    log_gate : array, shape (B, T, H), optional
        Natural logarithm of the gate, instead of ``gate``; ``-inf`` forgets.
    scale : float, default 1.0
        Factor of y.
    initial_state : array, shape (N, H, K, V), optional
        State before the first token, float32 (float64 for float64 inputs); never written to. N is
        B, or the number of packed sequences. None is zero.
    cu_seqlens : sequence of int or integer array, shape (N + 1,), optional
        Offsets of N sequences packed along T, with B = 1: sequence n is tokens ``cu_seqlens[n]`` to
        ``cu_seqlens[n + 1]``. Starts with 0, never decreases, ends at T or before; tokens past its
        end belong to no sequence and get y = 0. On the host it is checked. As an array of q's
        library on q's GPU it is read by the kernel alone, without a copy to the host: entries out
        of range are clipped, and the kernel is chosen as for one sequence of T tokens.
    return_state : bool, default False
        Also return the state after the last token of each sequence.
    out : array, shape (B, T, H, V), optional
        Array of y's dtype, family and device to write into; may be strided, may overlap an input.
    precision : {"highest", "tf32"}, default "highest"
        "highest" keeps float32 accuracy for float32 inputs; "tf32" allows products of inputs
        rounded to TF32 where that is faster.

    Returns
    -------
    y : array, shape (B, T, H, V)
        In the dtype, family and device of v; ``out`` itself where given.
    state : array, shape (N, H, K, V)
        Only with ``return_state``; float32, float64 for float64 inputs.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, the rule it breaks and the value it has.

    Notes
    -----
    NumPy arrays, torch CPU tensors and other CPU arrays with ``__dlpack__`` are computed on the
    CPU; CuPy arrays, torch CUDA tensors and other CUDA arrays with ``__dlpack__`` on the GPU that
    holds them, on the caller's current stream and without synchronisation. Any strides are
    accepted, and no input is written to. 16-bit inputs are summed in float32.

    torch tensors that require grad are differentiated, by :func:`gated_linear_attention_grad`:
    under ``torch.autograd``, ``torch.compile``, ``torch.utils.checkpoint`` and autocast, which
    narrows q, k and v alone. The inputs are saved for it and nothing else; ``out`` must be None.

    A NaN or Inf shows in the outputs that depend on it and reaches no other sequence, head or batch
    entry, nor an earlier chunk of its own sequence; within its chunk (at most 64 tokens) it may
    reach earlier tokens.

    On a GPU bfloat16 inputs with K up to 128 run in chunks on tensor cores, all others token by
    token. Where heads are too few to fill the GPU, chunked sequences are cut into pieces, and one
    workspace holds the states of (pieces, N, H, K, V) in float32.

    The state with a scalar gate is the recurrence of RetNet (Sun et al., 2023, arXiv:2307.08621,
    with a constant gate) and of Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060); without a gate,
    linear attention (Katharopoulos et al., 2020, arXiv:2006.16236).

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_gdelta import gated_linear_attention
    >>> one = np.ones((1, 4, 1, 1), np.float32)
    >>> gate = np.array([1, 0.5, 0.5, 0], np.float32).reshape(1, 4, 1)
    >>> gated_linear_attention(one, one, one, gate).ravel()
    array([1.  , 1.5 , 1.75, 1.  ], dtype=float32)
    """
    return _call(
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
    """The gated delta rule of Gated DeltaNet, over whole sequences.

    For every batch entry and head, with a state ``S`` of shape (K, V)::

        R_t = gate_t * S_{t-1}
        S_t = R_t + beta_t * k_t (v_t - k_t^T R_t)^T
        y_t = scale * q_t S_t

    The decay comes first, and what is written is the error of the prediction ``k_t^T R_t``; with a
    key of unit length and beta = 1 the state then returns exactly ``v_t`` for ``k_t``. Keys longer
    than ``sqrt(2 / beta)`` make the state grow. The recurrence that only adds, at times called a
    "scalar-gated delta rule" too, is :func:`gated_linear_attention`.

    Parameters
    ----------
    q, k : array, shape (B, T, Hq, K)
        Queries and keys; float16, bfloat16, float32 or float64, K from 1 to 256. Head h of v reads
        head ``h // (H // Hq)`` of q and k; H must be a multiple of Hq.
    v : array, shape (B, T, H, V)
        Values, of the dtype of q; V from 1 to 256, independent of K.
    gate : array, shape (B, T, H), optional
        The multiplier itself, any finite value: 1 keeps, 0 forgets exactly, negative values and
        values above 1 are legal. float32 or the dtype of q; never rounded to 16 bits. None is 1.
    beta : array, shape (B, T, H), optional
        Strength of the write, any finite value; float32 or the dtype of q. None is 1.
    log_gate : array, shape (B, T, H), optional
        Natural logarithm of the gate, instead of ``gate``; ``-inf`` forgets.
    scale : float, default 1.0
        Factor of y.
    qk_l2norm : bool, default False
        Bring q and k to unit length first: ``x / sqrt(sum(x * x) + 1e-6)`` in float32 (float64 for
        float64 inputs).
    initial_state : array, shape (N, H, K, V), optional
        State before the first token, float32 (float64 for float64 inputs); never written to. N is
        B, or the number of packed sequences. None is zero.
    cu_seqlens : sequence of int or integer array, shape (N + 1,), optional
        Offsets of N sequences packed along T, with B = 1: sequence n is tokens ``cu_seqlens[n]`` to
        ``cu_seqlens[n + 1]``. Starts with 0, never decreases, ends at T or before; tokens past its
        end belong to no sequence and get y = 0. On the host it is checked. As an array of q's
        library on q's GPU it is read by the kernel alone, without a copy to the host: entries out
        of range are clipped, and the kernel is chosen as for one sequence of T tokens.
    return_state : bool, default False
        Also return the state after the last token of each sequence.
    out : array, shape (B, T, H, V), optional
        Array of y's dtype, family and device to write into; may be strided, may overlap an input.
    precision : {"highest", "tf32"}, default "highest"
        "highest" keeps float32 accuracy for float32 inputs; "tf32" allows products of inputs
        rounded to TF32 where that is faster.

    Returns
    -------
    y : array, shape (B, T, H, V)
        In the dtype, family and device of v; ``out`` itself where given.
    state : array, shape (N, H, K, V)
        Only with ``return_state``; float32, float64 for float64 inputs.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, the rule it breaks and the value it has.

    Notes
    -----
    Families, devices, streams, strides and the reach of a NaN are as in
    :func:`gated_linear_attention`. On a GPU float32 inputs with K up to 128 run in chunks of 32
    tokens on tensor cores where its shared memory allows it, all others token by token.

    The rule is that of Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464), the
    linear layer of Qwen3-Next; with a gate of 1 it is DeltaNet (Schlag, Irie and Schmidhuber, 2021,
    arXiv:2102.11174), and for one column of V the normalised LMS filter (Widrow and Hoff, 1960).

    Examples
    --------
    Two values under one key: the second replaces the first.

    >>> import numpy as np
    >>> from cupy_gdelta import gated_delta_rule
    >>> key = np.array([0.6, 0.8], np.float32).reshape(1, 1, 1, 2).repeat(2, axis=1)
    >>> value = np.array([3, 5], np.float32).reshape(1, 2, 1, 1)
    >>> gated_delta_rule(key, key, value).ravel().round(5)
    array([3., 5.], dtype=float32)
    """
    return _call(
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


def _call(name: str, rule: str, q, k, v, gate, beta, **options: Any) -> Any:
    """One call of either function; torch sees it as an operator where it must."""
    others = gate, beta, options["log_gate"], options["initial_state"]
    if options["out"] is None and arrays.traced(q, k, v, *others):
        from . import autograd

        return autograd.call(name, rule, q, k, v, gate, beta, **options)
    return forward(problem.check(name, rule, q, k, v, gate, beta, **options))


def forward(p: Problem) -> Any:
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
