"""The delta rule in chunks: R = gate_t S_{t-1}, S_t = R + beta_t k_t (v_t - k_t^T R)^T.

Inside a chunk that starts from the state S, with D_ij = gate_{j+1} ... gate_i, token j writes
k_j u_j^T, and the rows u solve a unit lower triangular system (the WY form of a product of
Householder-like factors: Bischof and Van Loan, 1987; with gates: Yang, Kautz and Hatamizadeh,
"Gated Delta Networks", 2024, arXiv 2412.06464):

    (I + A) U = diag(beta) (V - diag(D_i0) K S),   A_ij = beta_i D_ij (k_i . k_j) for j < i, else 0
    y_i = scale (D_i0 q_i S + sum_{j <= i} D_ij (q_i . k_j) u_j)
    S'  = D_C0 S + sum_j D_Cj k_j u_j^T

U = U0 - W S with U0 = (I + A)^-1 diag(beta) V and W = (I + A)^-1 diag(beta D_i0) K is found for all
chunks of a segment at once; only the products with S go from chunk to chunk.
"""

from __future__ import annotations

import numpy as np

from . import decay
from .pieces import Scratch
from .walk import Segment

BASE = 8  # size of the blocks that are inverted row by row


def segment(part: Segment) -> np.ndarray:
    """y [M, L, R, C, V] of the M chunks of one segment; leaves the state after it in part.carry."""
    scratch, carry = part.scratch, part.carry
    M, L, R, C, K, V = part.shape
    q, k = part.keys("q"), part.keys("k")  # [M, L, 1, C, K]
    decays = decay.products(part.gates(), None, scratch)
    solved = _solve(part, k, decays)  # [M, L, R, C, K + V]: W beside U0
    left = scratch("left", M, L, R, C, K + C)  # what meets the state, and what meets u
    right = scratch("right", M, L, R, K + C, V)  # the state before the chunk above u
    scores = np.matmul(q, k.swapaxes(-1, -2), out=scratch("scores", M, L, 1, C, C))
    np.multiply(q, decays.start, out=left[..., :K])
    np.multiply(scores, decays.between, out=left[..., K:])
    k_end = np.multiply(k, decays.end, out=scratch("k_end", M, L, R, C, K)).swapaxes(-1, -2)
    room, write = scratch("room", L, R, K, V), scratch("write", L, R, K, V)
    seen = scratch("seen", L, R, C, V)  # W S
    states, u = right[..., :K, :], right[..., K:, :]
    with part.turn:
        states[0] = carry
        for c in range(M):
            np.matmul(solved[c, ..., :K], states[c], out=seen)
            np.subtract(solved[c, ..., K:], seen, out=u[c])
            np.matmul(k_end[c], u[c], out=write)
            after = states[c + 1] if c + 1 < M else carry
            decay.advance(states[c], decays.keep[c], decays.rest[c], write, after, room)
        part.leave()
    return np.matmul(left, right, out=scratch("y", M, L, R, C, V))


def _solve(part: Segment, k: np.ndarray, decays: decay.Decay) -> np.ndarray:
    """(I + A)^-1 diag(beta) [diag(D_i0) K, V], [M, L, R, C, K + V]."""
    scratch = part.scratch
    M, L, R, C, K, V = part.shape
    beta = part.betas()[..., None]
    scores = np.matmul(k, k.swapaxes(-1, -2), out=scratch("scores", M, L, 1, C, C))
    a = np.multiply(scores, decays.between, out=scratch("a", M, L, R, C, C))
    a *= beta
    right = scratch("right side", M, L, R, C, K + V)
    np.multiply(k, decays.start * beta, out=right[..., :K])
    part.values(right[..., K:])
    right[..., K:] *= beta
    inverse = unit_inverse(a.reshape(-1, C, C), scratch).reshape(a.shape)
    return np.matmul(inverse, right, out=scratch("solved", M, L, R, C, K + V))


def unit_inverse(a: np.ndarray, scratch: Scratch) -> np.ndarray:
    """(I + tril(a, -1))^-1 for a [n, C, C], C a power of two.

    Blocks on the diagonal by forward substitution, then joined in pairs, without a power of a:

        [P 0]^-1   [      P^-1        0  ]
        [B Q]    = [-Q^-1 B P^-1    Q^-1 ]
    """
    n, C, _ = a.shape
    size = min(BASE, C)
    x = scratch.zeroed("inverse", n, C, C)
    diagonal = decay.diagonal_blocks(x, size)
    diagonal[...] = _substitute(decay.diagonal_blocks(a, size), scratch)
    while size < C:
        pairs = decay.diagonal_blocks(x, size).reshape(n, -1, 2, size, size)
        room = scratch("inverse room", n, C // (2 * size), size, size)
        np.matmul(decay.below_diagonal(a, size), pairs[:, :, 0], out=room)
        np.negative(room, out=room)
        np.matmul(pairs[:, :, 1], room, out=decay.below_diagonal(x, size))
        size *= 2
    return x


def _substitute(blocks: np.ndarray, scratch: Scratch) -> np.ndarray:
    """(I + tril(block, -1))^-1 of small blocks [n, m, size, size], row by row for all at once."""
    n, m, size, _ = blocks.shape
    a = scratch("blocks", size, size, n, m)
    np.negative(blocks.transpose(2, 3, 0, 1), out=a)
    x = scratch.zeroed("block inverses", size, size, n, m)
    x[0, 0] = 1
    for i in range(1, size):
        np.einsum("pnm,pjnm->jnm", a[i, :i], x[:i, :i], out=x[i, :i])
        x[i, i] = 1
    return x.transpose(2, 3, 0, 1)
