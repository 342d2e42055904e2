"""Token by token: for chunks whose products could overflow where the state itself need not.

A gate may be any finite value. Two gates of 1e20 leave a state of zero as it is, and a gate of 0
after them ends whatever they did; their product is infinite all the same, and infinity times zero
is NaN. Whether a chunk goes this way depends on its own sequence and head alone.
"""

from __future__ import annotations

import numpy as np

from .pieces import bfloat16_bits
from .segment import Chunks, Segment

LIMIT = 2.0**32  # of products in a chunk: the numbers that they meet may be large as well
NOWHERE = tuple(np.empty((3, 0), np.intp))


class Steps:
    """n chunks of a segment to be done token by token, in the order of time."""

    def __init__(
        self,
        part: Chunks,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        gate: np.ndarray,
        beta: np.ndarray,
        gain: np.ndarray | None = None,
    ) -> None:
        """Find the chunks whose products may pass LIMIT, and keep what will be overwritten.

        gain [M, L, R, C] is what a token may multiply a state by besides its gate. A NaN is not
        large.
        """
        self.part, self.where = part, NOWHERE
        growth = np.abs(gate)
        if gain is not None:
            growth *= gain
        if growth.max() <= 1:
            return
        np.fmax(growth, 1, out=growth)  # NaN counts as 1
        self.where = np.nonzero(growth.prod(-1) > LIMIT)
        if len(self):
            m, l, r = self.where
            self.tokens = [q[m, l, 0], k[m, l, 0], v[m, l, r], gate[m, l, r], beta[m, l, r]]
            if not part.problem.log_gate:
                self.tokens[3] = self.tokens[3].astype(v.dtype)  # exact, as it came

    def __len__(self) -> int:
        return len(self.where[0])

    def check(self, total: np.ndarray, *products: np.ndarray) -> None:
        """Leave out the chunks in which no product [M, L, R, C, ...] passes LIMIT after all.

        The total [M, L, R] of the others is not used, and must not spoil the rounding of the rest.
        """
        if len(self):
            peaks = [np.abs(x[self.where]).max((1, 2)) for x in products]
            passed = ~(np.max(peaks, axis=0) <= LIMIT)
            self.where = tuple(x[passed] for x in self.where)
            self.tokens = [x[passed] for x in self.tokens]
            self.y = np.full_like(self.tokens[2], np.nan)
            total[self.where] = 1

    def redo(self, m: int, before: np.ndarray, after: np.ndarray) -> None:
        """Overwrite, of the states [L, R, K, V] after chunks m, those of the chunks found."""
        if not len(self):
            return
        some = np.flatnonzero(self.where[0] == m)
        lanes = before[self.where[1][some], self.where[2][some]]
        alive = np.isfinite(lanes).any((1, 2))  # else there is nothing left to save
        some = some[alive]
        if some.size:
            count = self.count(m)
            state = np.array(lanes[alive], order="C")
            q, k, v, gate, beta = (np.take(x, some, axis=0)[:, :count] for x in self.tokens)
            rule = self.part.problem.rule
            self.y[some, :count] = loop(rule, q, k, v, gate, beta, state)
            after[self.where[1][some], self.where[2][some]] = state

    def answer(self, part: Segment) -> None:
        """Overwrite y of the chunks found."""
        R, C = part.shape[2:4]
        batch, time, heads = part.index
        groups = (heads.stop - heads.start) // R
        for m, l, r, y in zip(*self.where, self.y if len(self) else (), strict=True):
            row = l // groups
            first = m * C + (time.start if isinstance(time, slice) else time[row, 0])
            y = y[: self.count(m)]
            if part.problem.dtype == "bfloat16":
                y = bfloat16_bits(y)
            entry = batch.start + row if isinstance(batch, slice) else batch
            part.y[entry, first : first + len(y), heads.start + l % groups * R + r] = y

    def count(self, m: int) -> int:
        """How many tokens chunks m have."""
        C = self.part.shape[3]
        return min(C, self.part.stop - self.part.start - m * C)


def loop(
    rule: str,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    gate: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
) -> np.ndarray:
    """y [n, t, V] of q, k [n, t, K], v [n, t, V], gate, beta [n, t]; state [n, K, V] is updated.

    In the state dtype, except that a gate is used as wide as it comes.
    """
    y, write = np.empty_like(v), np.empty_like(state)
    columns = (beta[..., None] * k)[..., None]  # [n, t, K, 1]
    for t in range(v.shape[1]):
        np.multiply(state, gate[:, t, None, None], out=state, casting="same_kind")
        u = v[:, t, None]  # [n, 1, V]
        if rule == "delta":
            u = u - np.matmul(k[:, t, None], state)
        np.multiply(columns[:, t], u, out=write)
        state += write
        np.matmul(q[:, t, None], state, out=y[:, t, None])
    return y
