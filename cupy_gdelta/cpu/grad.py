"""Gradients of both rules in chunks.

Both rules write beta_j k_j e_j^T, with e_j = v_j in the linear rule and the miss v_j - k_j^T R_j in
the delta rule, and so share all but the way through e. y_i reads the state with x_i = q_i, and in
the delta rule e_i reads what is left of it before the write, with x_i = -k_i; d_i is the gradient
of what was read: scale dy_i, and that of e_i. In a chunk that starts from the state S and leaves
one with the gradient G, with D_ij = gate_{j+1} ... gate_i and sums over all reads i,

    w_j    = sum_i D_ij (x_i . k_j) d_i + D_Cj G^T k_j
    dv_j   = beta_j w_j, the gradient of e_j,     dbeta_j = e_j . w_j
    dk_j   = beta_j (sum_i D_ij (d_i . e_j) x_i + D_Cj G e_j)
    dx_i   = D_i0 S d_i + sum_j D_ij beta_j (d_i . e_j) k_j
    dS     = sum_i D_i0 x_i d_i^T + D_C0 G

where a read of y sees j <= i and one of the delta rule j < i. There w is the solution of a unit
upper triangular system, the transpose of the one that e solves. The gate's gradient is the inner
product of S_{t-1} with the gradient of gate_t S_{t-1}, both written out:

    dgate_t = sum_{i >= t} sum_{j < t} D_it M_ij D_{t-1,j}
    M_ij = beta_j (x_i . k_j) (d_i . e_j),  M_i0 = x_i S d_i,  M_{C+1,j} = beta_j k_j G e_j,  <S, G>
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from . import decay
from .blas import matmul
from .delta import unit_inverse
from .grad_steps import GradSteps
from .pieces import load
from .segment import Chunks
from .steps import Steps


@dataclass
class Forward:
    """What a stretch of chunks needs on the way forward, and for gradients as well."""

    part: Chunks
    q: np.ndarray = field(init=False)  # [M, L, 1, C, K]
    k: np.ndarray = field(init=False)
    e: np.ndarray = field(init=False)  # [M, L, R, C, V]; v until states() has been called

    def __post_init__(self) -> None:
        part, scratch = self.part, self.part.scratch
        M, L, R, C, K, V = part.shape
        self.q, self.k = part.keys("q", scaled=False), part.keys("k")
        self.e = scratch("e", M, L, R, C, V)
        part.values(self.e)
        gate = part.gates()
        self.gate = gate.astype(scratch.dtype)
        self.beta = part.betas()
        self.delta = part.problem.rule == "delta"
        gain, products = None, []
        if self.delta:
            scores = matmul(self.k, self.k.swapaxes(-1, -2), scratch("scores", M, L, 1, C, C))
            along = 1 - self.beta * np.diagonal(scores, axis1=-2, axis2=-1)
            gain = np.fmax(1, np.abs(along))
        self.steps = Steps(part, self.q, self.k, self.e, gate, self.beta, gain)
        self.decays = decay.products(gate, None, scratch)
        self.weighted = np.multiply(  # D_ij beta_j
            self.decays.between, self.beta[..., None, :], out=scratch("weighted", M, L, R, C, C)
        )
        if self.delta:
            a = np.multiply(scores, self.weighted, out=scratch("a", M, L, R, C, C))
            self.solve = unit_inverse(a.reshape(-1, C, C), scratch).reshape(a.shape)
            seen = np.multiply(self.k, -self.decays.start, out=scratch("seen", M, L, R, C, K))
            self.through = matmul(self.solve, seen, out=scratch("through", M, L, R, C, K))
            v = scratch("solved v", M, L, R, C, V)
            self.e, v = matmul(self.solve, self.e, out=v), self.e
            products = [self.solve]
        self.steps.check(self.decays.total, self.decays.between, self.decays.start, *products)

    def states(self, first: np.ndarray, drift: np.ndarray) -> np.ndarray:
        """The states between the chunks, [M + 1, L, R, K, V]; drift is updated."""
        part, scratch = self.part, self.part.scratch
        M, L, R, C, K, V = part.shape
        states = scratch("states", M + 1, L, R, K, V)
        weight = self.decays.end * self.beta[..., None]
        k_end = np.multiply(self.k, weight, out=scratch("k_end", M, L, R, C, K))
        k_end = k_end.swapaxes(-1, -2)
        if not self.delta:
            matmul(k_end, self.e, out=states[1:])
        keep = decay.rounded(self.decays.total, drift, scratch.dtype)
        kept, read = scratch("kept", L, R, K, V), scratch("read e", L, R, C, V)
        states[0] = first
        for m in range(M):
            before, after = states[m], states[m + 1]
            if self.delta:
                self.e[m] += matmul(self.through[m], before, out=read)
                matmul(k_end[m], self.e[m], out=after)
            np.multiply(before, keep[m], out=kept)
            after += kept
            self.steps.redo(m, before, after)
        return states


@dataclass
class Grad:
    """Gradients of the tokens of a stretch of chunks."""

    q: np.ndarray  # [M, L, R, C, K]
    k: np.ndarray
    v: np.ndarray  # [M, L, R, C, V]
    gate: np.ndarray  # [M, L, R, C]
    beta: np.ndarray


@dataclass
class Backward:
    """A stretch of chunks on the way back: x reads, d what came of them, see above."""

    ahead: Forward
    states: np.ndarray

    def __post_init__(self) -> None:
        ahead, part = self.ahead, self.ahead.part
        p, scratch = part.problem, part.scratch
        M, L, R, C, K, V = part.shape
        reads = 2 if ahead.delta else 1
        self.d = scratch("d", M, L, R, reads * C, V)
        dy = self.d[..., :C, :]
        if p.dy is None:
            dy.fill(0)
        else:
            load(p.dy.array[part.index], p.dy.dtype, dy)
            dy *= p.scale
        self.steps = GradSteps(ahead.steps, dy)
        self.x, self.start, between = ahead.q, ahead.decays.start, ahead.decays.between
        if ahead.delta:
            self.x = scratch("x", M, L, 1, 2 * C, K)
            self.x[..., :C, :] = ahead.q
            np.negative(ahead.k, out=self.x[..., C:, :])
            self.start = np.concatenate((self.start, self.start), axis=-2)
            both = scratch("between of reads", M, L, R, 2 * C, C)
            both[..., :C, :] = both[..., C:, :] = between
            np.einsum("...ii->...i", both[..., C:, :])[...] = 0
            between = both
        self.between = between
        self.keys = ahead.k.swapaxes(-1, -2)
        self.scores = matmul(self.x, self.keys, out=scratch("x k", M, L, 1, reads * C, C))
        weights = np.multiply(self.scores, between, out=scratch("weights", M, L, R, reads * C, C))
        self.weights = weights.swapaxes(-1, -2)
        self.x_start = np.multiply(
            self.x, self.start, out=scratch("x start", M, L, R, reads * C, K)
        ).swapaxes(-1, -2)
        self.late = scratch("state gradients", M + 1, L, R, K, V)
        matmul(self.x_start[..., :C], dy, out=self.late[:M])
        self.w = scratch("w", M, L, R, C, V)
        if ahead.delta:
            matmul(self.weights[..., :C], dy, out=self.w)

    def run(self, last: np.ndarray, drift: np.ndarray) -> np.ndarray:
        """The gradient of the first state, given that of the last; drift is updated."""
        ahead, scratch, late = self.ahead, self.ahead.part.scratch, self.late
        M, L, R, C, K, V = ahead.part.shape
        keep = decay.rounded(ahead.decays.total[::-1], drift, scratch.dtype)[::-1]
        kept, for_e = scratch("kept", L, R, K, V), scratch("read e", L, R, C, V)
        late[M] = last
        for m in reversed(range(M)):
            before, after = late[m], late[m + 1]
            if ahead.delta:
                matmul(ahead.k[m], after, out=for_e)
                for_e *= ahead.decays.end[m]
                for_e += self.w[m]
                for_e *= ahead.beta[m, ..., None]
                de = self.d[m, :, :, C:]
                matmul(ahead.solve[m].swapaxes(-1, -2), for_e, out=de)
                before += matmul(self.x_start[m, ..., C:], de, out=kept)
            np.multiply(after, keep[m], out=kept)
            before += kept
            self.steps.redo(m, self.states[m], after, before)
        return late[0]

    def gradients(self) -> Grad:
        """Those of the tokens, once run() has been called."""
        ahead, scratch = self.ahead, self.ahead.part.scratch
        M, L, R, C, K, V = ahead.part.shape
        states, late, x, d = self.states[:M], self.late[1:], self.x, self.d
        end, beta = ahead.decays.end, ahead.beta[..., None]
        e_turned = ahead.e.swapaxes(-1, -2)
        for_k = matmul(ahead.k, late, out=scratch("k G", M, L, R, C, V))
        last = np.einsum("...v,...v->...", for_k, ahead.e) * ahead.beta  # M_{C+1,j}
        for_k *= end
        w = matmul(self.weights, d, out=self.w)
        w += for_k
        agree = matmul(d, e_turned, out=scratch("d e", M, L, R, x.shape[-2], C))
        first = matmul(d, states.swapaxes(-1, -2), out=scratch("S d", M, L, R, x.shape[-2], K))
        terms = self.scores * agree  # M_ij, but for beta_j
        edge = np.einsum("...k,...k->...", x, first)  # M_i0
        agree *= self.between
        dk = matmul(agree.swapaxes(-1, -2), x, out=scratch("dk", M, L, R, C, K))
        dk += end * matmul(ahead.e, late.swapaxes(-1, -2), out=scratch("G e", M, L, R, C, K))
        dk *= beta
        agree *= ahead.beta[..., None, :]
        dx = matmul(agree, ahead.k, out=scratch("dx", M, L, R, x.shape[-2], K))
        first *= self.start
        dx += first
        if ahead.delta:
            dk -= dx[..., C:, :]
            terms, edge = terms[..., :C, :] + terms[..., C:, :], edge[..., :C] + edge[..., C:]
        terms *= ahead.beta[..., None, :]
        corner = np.einsum("...kv,...kv->...", states, late)
        dgate = _gate_gradient(ahead.decays, terms, edge, last, corner)
        dbeta = np.einsum("...v,...v->...", ahead.e, w)
        w *= beta
        found = Grad(dx[..., :C, :], dk, d[..., C:, :] if ahead.delta else w, dgate, dbeta)
        self.steps.answer(found)
        return found


def _gate_gradient(
    decays: decay.Decay,
    terms: np.ndarray,
    edge: np.ndarray,
    last: np.ndarray,
    corner: np.ndarray,
) -> np.ndarray:
    """dgate [M, L, R, C] of M_ij [..., C, C], M_i0 and M_{C+1,j} [..., C] and <S, G> [...]."""
    *lead, C, _ = terms.shape
    middle = np.empty((*lead, C + 1, C + 1), terms.dtype)
    middle[..., :C, 0], middle[..., :C, 1:] = edge, terms
    middle[..., C, 0], middle[..., C, 1:] = corner, last
    up = np.empty((*lead, C, C + 1), terms.dtype)  # D_it
    up[..., :C], up[..., C] = decays.between.swapaxes(-1, -2), decays.end[..., 0]
    down = np.zeros((*lead, C, C + 1), terms.dtype)  # D_{t-1,j}
    down[..., 0, 0] = 1
    down[..., 1:, 0], down[..., 1:, 1:] = decays.start[..., :-1, 0], decays.between[..., :-1, :]
    return np.einsum("...tj,...tj->...t", np.matmul(up, middle), down)
