"""The linear rule in chunks: S_t = gate_t S_{t-1} + beta_t k_t v_t^T, y_t = scale q_t S_t.

Inside a chunk that starts from the state S, with D_ij = gate_{j+1} ... gate_i,

    y_i = scale (D_i0 q_i S + sum_{j <= i} D_ij beta_j (q_i . k_j) v_j)
    S'  = D_C0 S + sum_j D_Cj beta_j k_j v_j^T

(Dao and Gu, "Transformers are SSMs", 2024, arXiv 2405.21060, section 6). Everything but the sum of
S' over the chunks is done for all chunks of a segment at once.
"""

from __future__ import annotations

import numpy as np

from . import decay
from .blas import matmul
from .segment import Segment
from .steps import Steps


def segment(part: Segment) -> None:
    """Compute the M chunks of one segment; leaves the state after it in part.carry."""
    scratch, carry = part.scratch, part.carry
    M, L, R, C, K, V = part.shape
    q, k = part.keys("q"), part.keys("k")  # [M, L, 1, C, K]
    read = scratch("read", M, L, R, C, K + C)  # y = read [state; v]
    right = scratch("right", M + 1, L, R, K + C, V)  # the state before the chunk above v
    states, v = right[..., :K, :], right[:M, ..., K:, :]
    part.values(v)
    gate, beta = part.gates(), part.betas()
    steps = Steps(part, q, k, v, gate, beta)
    decays = decay.products(gate, beta, scratch)
    steps.check(decays.total, decays.between, decays.start)
    scores = matmul(q, k.swapaxes(-1, -2), out=scratch("scores", M, L, 1, C, C))
    np.multiply(q, decays.start, out=read[..., :K])
    np.multiply(scores, decays.between, out=read[..., K:])
    k_end = np.multiply(k, decays.end, out=scratch("k_end", M, L, R, C, K))
    matmul(k_end.swapaxes(-1, -2), v, out=states[1:])
    kept = scratch("kept", L, R, K, V)
    with part.turn:
        keep = decay.rounded(decays.total, part.drift, carry.dtype)
        states[0] = carry
        chunks = zip(keep, states[:-1], states[1:], strict=True)
        for m, (factor, before, after) in enumerate(chunks):
            np.multiply(before, factor, out=kept)
            np.add(after, kept, out=after)
            steps.redo(m, before, after)
        carry[...] = states[M]
        part.leave()
    part.answer(read, right[:M])
    steps.answer(part)
