"""The public functions over many ranks; the docstring is the contract."""

from __future__ import annotations

from typing import Any

from . import enter


def gated_linear_attention(
    q,
    k,
    v,
    gate=None,
    beta=None,
    *,
    comm,
    log_gate=None,
    scale=1.0,
    initial_state=None,
    cu_seqlens=None,
    return_state=False,
    out=None,
    precision="highest",
) -> Any:
    """Scalar-gated linear attention over a sequence whose tokens lie on many ranks.

    The pieces of all ranks, in the order of the ranks, are one call of
    :func:`cupy_gdelta.gated_linear_attention`; each rank passes its own piece and gets its own
    piece of y, equal to that of the one call up to rounding. Every rank of ``comm`` must call.

    Parameters
    ----------
    q, k, v, gate, beta, log_gate : array
        This rank's tokens: T may differ from rank to rank and be 0, and so may whether there is a
        gate, a log_gate or neither, and a beta; everything else is the same on all ranks. Shapes
        and dtypes are those of one rank's function.
    comm : mpi4py communicator or torch.distributed process group
        The ranks. MPI takes NumPy and CuPy arrays and torch tensors; what lies on a GPU is copied
        to the host for it unless the MPI says that it reads CUDA memory. Process groups take the
        same: gloo from the CPU, nccl on the current CUDA device of each process. The first call
        with an MPI communicator duplicates it, for messages of its own; the duplicate is freed
        with it.
    initial_state : array, shape (N, H, K, V), optional
        State before the first token of each of the N sequences: on rank 0 alone, which passes the
        rows on to the ranks where those sequences start, or on all ranks, which then read their own
        rows.
    cu_seqlens : sequence of int or integer array, shape (N + 1,), optional
        Offsets of the N sequences among the tokens of all ranks, the same on all ranks: a sequence
        may start on one rank and end on another. Offsets among a rank's own tokens are wrong, and
        where they are the same on all ranks nothing refuses them: tokens past the last offset
        belong to no sequence, and their y is 0. A GPU array is copied to the host.
    return_state : bool or "all", default False
        Also return the final states: True to the last rank, "all" to every rank.
    scale, out, precision
        As in one rank's function; ``out`` is this rank's piece of y.

    Returns
    -------
    y : array, shape (B, T, H, V)
        This rank's piece.
    state : array, shape (N, H, K, V), or None
        Only with ``return_state``; None on all ranks but the last, unless it is "all".

    Raises
    ------
    TypeError, ValueError
        Before any work, the same on all ranks, naming the rank, the argument, the rule it breaks
        and the value it has: also where ranks disagree. A ``comm`` that is none, or is null, freed
        or destroyed, or a group without this rank, is refused on its rank alone.

    Notes
    -----
    Every rank runs its tokens from a state of zero; an exclusive scan over pairs (product of gates,
    state) brings it the state before them in ceil(log2(ranks)) rounds; then it adds what that state
    does to y (on the CPU, in float32 and float64) or runs the tokens that see it again. Those are
    the first ones, up to where the gates have decayed any state of its dtype to nothing: with gates
    of .95 the first 4,000. A rank that ends such a stretch does not wait for those before
    it, and passes nothing of them on, not even a NaN; a gate of 0 does it at once. Products of
    gates are formed in float64 with exponents of their own, never from logarithms: they neither
    overflow nor underflow where the state itself does not.

    Traffic is independent of T. A rank sends at most ceil(log2(ranks)) messages of
    ``B*H*K*V`` numbers in the dtype of the state and ``2*B*H`` float64 ones (B = 1 for packed
    sequences; only a sequence that lies on two ranks or more takes part), and one such message
    where decays leave nothing. Besides, all ranks gather records of 2048 bytes and of 1 byte from
    each, initial and final states travel once between the ranks that have and need them, and
    :mod:`cupy_gdelta.parallel.model` counts all of it.

    CuPy and torch CUDA arrays are computed on their library's current stream, which the host waits
    for at times. Same inputs on the same ranks give the same bits.

    torch tensors that require grad make y and the state differentiable. They must do so on all
    ranks or on none, and all ranks must then run the backward pass, whose traffic is the same.

    A rank that dies ends the others by the engine's means: run ``mpiexec -n 4 python -m mpi4py
    program.py``, for plain Python leaves them waiting after an exception; a process group fails
    within its timeout.

    Examples
    --------
    ``mpiexec -n 4 python -m mpi4py this.py``; with one rank it is the function of one rank.

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from cupy_gdelta import parallel
    >>> one = np.ones((1, 4, 1, 1), np.float32)
    >>> gate = np.array([1, 0.5, 0.5, 0], np.float32).reshape(1, 4, 1)
    >>> parallel.gated_linear_attention(one, one, one, gate, comm=MPI.COMM_SELF).ravel()
    array([1.  , 1.5 , 1.75, 1.  ], dtype=float32)
    """
    return enter.call(
        "gated_linear_attention",
        "linear",
        comm,
        q=q,
        k=k,
        v=v,
        gate=gate,
        beta=beta,
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
    comm,
    log_gate=None,
    scale=1.0,
    qk_l2norm=False,
    initial_state=None,
    cu_seqlens=None,
    return_state=False,
    out=None,
    precision="highest",
) -> Any:
    """The gated delta rule over a sequence whose tokens lie on many ranks.

    The pieces of all ranks, in the order of the ranks, are one call of
    :func:`cupy_gdelta.gated_delta_rule`; each rank passes its own piece and gets its own piece of
    y, equal to that of the one call up to rounding. Every rank of ``comm`` must call.

    Parameters
    ----------
    q, k, v, gate, beta, log_gate : array
        This rank's tokens: T may differ from rank to rank and be 0, and so may whether there is a
        gate, a log_gate or neither, and a beta; everything else is the same on all ranks. Shapes
        and dtypes are those of one rank's function.
    comm : mpi4py communicator or torch.distributed process group
        The ranks, as in :func:`gated_linear_attention`.
    initial_state : array, shape (N, H, K, V), optional
        State before the first token of each of the N sequences: on rank 0 alone, which passes the
        rows on to the ranks where those sequences start, or on all ranks, which then read their own
        rows.
    cu_seqlens : sequence of int or integer array, shape (N + 1,), optional
        Offsets of the N sequences among the tokens of all ranks, the same on all ranks: a sequence
        may start on one rank and end on another. Offsets among a rank's own tokens are wrong, and
        where they are the same on all ranks nothing refuses them: tokens past the last offset
        belong to no sequence, and their y is 0. A GPU array is copied to the host.
    return_state : bool or "all", default False
        Also return the final states: True to the last rank, "all" to every rank.
    scale, qk_l2norm, out, precision
        As in one rank's function; ``out`` is this rank's piece of y.

    Returns
    -------
    y : array, shape (B, T, H, V)
        This rank's piece.
    state : array, shape (N, H, K, V), or None
        Only with ``return_state``; None on all ranks but the last, unless it is "all".

    Raises
    ------
    TypeError, ValueError
        Before any work, the same on all ranks, as in :func:`gated_linear_attention`.

    Notes
    -----
    A piece takes the state before it to ``M S + U``, with M a K by K matrix: a run from the state
    zero gives U, one without values from the identity gives M. The exclusive scan is over pairs
    (M, U), and the tokens that see the state before them are run again from it. Where the gates
    (and ``|1 - beta k.k|`` where that is above 1) have decayed every state to nothing, there is no
    M to find or to send, and only the first tokens run twice; otherwise a piece costs three runs.
    Where gates (or ``|1 - beta k.k|``) above 1 may multiply a state by more than 2^100 (2^900 in
    float64), M is found in several parts, which takes longer.

    Traffic is independent of T: a rank sends at most ceil(log2(ranks)) messages of
    ``B*H*K*(K+V)`` numbers in the dtype of the state and ``B*H*K`` float64 ones, the exponents of
    the columns of M, and one of ``B*H*K*V`` where decays leave nothing. All else is as in
    :func:`gated_linear_attention`.

    Examples
    --------
    ``mpiexec -n 4 python -m mpi4py this.py``; with one rank it is the function of one rank.

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from cupy_gdelta import parallel
    >>> key = np.array([0.6, 0.8], np.float32).reshape(1, 1, 1, 2).repeat(2, axis=1)
    >>> value = np.array([3, 5], np.float32).reshape(1, 2, 1, 1)
    >>> parallel.gated_delta_rule(key, key, value, comm=MPI.COMM_SELF).ravel().round(5)
    array([3., 5.], dtype=float32)
    """
    return enter.call(
        "gated_delta_rule",
        "delta",
        comm,
        q=q,
        k=k,
        v=v,
        gate=gate,
        beta=beta,
        log_gate=log_gate,
        scale=scale,
        qk_l2norm=qk_l2norm,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        return_state=return_state,
        out=out,
        precision=precision,
    )
