"""The delta rule in chunks: R = gate_t S_{t-1}, S_t = R + beta_t k_t (v_t - k_t^T R)^T.

Inside a chunk that starts from the state S, with D_ij = gate_{j+1} ... gate_i, token j writes
k_j u_j^T, and the rows u solve a unit lower triangular system (the WY form of a product of
Householder-like factors: Bischof and Van Loan, 1987; with gates: Yang, Kautz and Hatamizadeh,
"Gated Delta Networks", 2024, arXiv 2412.06464):

    (I + A) U = diag(beta) (V - diag(D_i0) K S),   A_ij = beta_i D_ij (k_i . k_j) for j < i, else 0
    y_i = scale (D_i0 q_i S + sum_{j <= i} D_ij (q_i . k_j) u_j)
    S'  = D_C0 S + sum_j D_Cj k_j u_j^T

(I + A)^-1 and its product with diag(beta D_i0) K are found for all chunks of a segment at once;
only the products with S and U go from chunk to chunk.
"""

from __future__ import annotations

import numpy as np

from . import decay
from .blas import matmul
from .pieces import Scratch
from .segment import Segment
from .steps import Steps

BASE = 8  # size of the blocks that are inverted row by row


def segment(part: Segment) -> None:
    """Compute the M chunks of one segment; leaves the state after it in part.carry."""
    scratch, carry = part.scratch, part.carry
    M, L, R, C, K, V = part.shape
    q, k = part.keys("q"), part.keys("k")  # [M, L, 1, C, K]
    gate, beta = part.gates(), part.betas()
    right = scratch("right", M + 1, L, R, C + K + C, V)  # beta v, the state before the chunk, u
    v, states, u = right[:M, ..., :C, :], right[..., C : C + K, :], right[:M, ..., C + K :, :]
    part.values(v)
    scores = matmul(k, k.swapaxes(-1, -2), out=scratch("scores", M, L, 1, C, C))
    along = 1 - beta * np.diagonal(scores, axis1=-2, axis2=-1)  # factor of the state along a key
    steps = Steps(part, q, k, v, gate, beta, np.fmax(1, np.abs(along)))
    decays = decay.products(gate, None, scratch)
    beta = beta[..., None]
    v *= beta
    solve = _solve(k, scores, beta, decays, scratch)  # u = solve [beta v; state]
    steps.check(decays.total, decays.between, decays.start, solve)
    read = scratch("read", M, L, R, C, K + C)  # y = read [state; u]
    scores = matmul(q, k.swapaxes(-1, -2), out=scratch("scores", M, L, 1, C, C))
    np.multiply(q, decays.start, out=read[..., :K])
    np.multiply(scores, decays.between, out=read[..., K:])
    k_end = np.multiply(k, decays.end, out=scratch("k_end", M, L, R, C, K)).swapaxes(-1, -2)
    known, kept = right[:M, ..., : C + K, :], scratch("kept", L, R, K, V)
    with part.turn:
        keep = decay.rounded(decays.total, part.drift, carry.dtype)
        states[0] = carry
        chunks = zip(solve, known, u, k_end, states[:-1], keep, states[1:], strict=True)
        for m, (solve_c, known_c, u_c, k_c, before, factor, after) in enumerate(chunks):
            matmul(solve_c, known_c, out=u_c)
            matmul(k_c, u_c, out=after)
            np.multiply(before, factor, out=kept)
            np.add(after, kept, out=after)
            steps.redo(m, before, after)
        carry[...] = states[M]
        part.leave()
    part.answer(read, right[:M, ..., C:, :])
    steps.answer(part)


def _solve(
    k: np.ndarray, scores: np.ndarray, beta: np.ndarray, decays: decay.Decay, scratch: Scratch
) -> np.ndarray:
    """[(I + A)^-1, -(I + A)^-1 diag(beta D_i0) K], [M, L, R, C, C + K]."""
    (M, L, R, C, _), K = beta.shape, k.shape[-1]
    a = np.multiply(scores, decays.between, out=scratch("a", M, L, R, C, C))
    a *= beta
    solve = scratch("solve", M, L, R, C, C + K)
    solve[..., :C] = unit_inverse(a.reshape(-1, C, C), scratch).reshape(a.shape)
    seen = np.multiply(k, -decays.start * beta, out=scratch("seen", M, L, R, C, K))
    matmul(solve[..., :C], seen, out=solve[..., C:])
    return solve


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
        matmul(decay.below_diagonal(a, size), pairs[:, :, 0], out=room)
        np.negative(room, out=room)
        matmul(pairs[:, :, 1], room, out=decay.below_diagonal(x, size))
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
