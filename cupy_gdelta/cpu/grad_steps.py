"""Gradients token by token, for the chunks that the way forward takes so: see steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .steps import Steps


class Tokens(NamedTuple):
    """Gradients of n stretches of t tokens, q and k [n, t, K], v [n, t, V], gate, beta [n, t]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    gate: np.ndarray
    beta: np.ndarray


class GradSteps:
    """The chunks of ``steps`` on the way back."""

    def __init__(self, steps: Steps, dy: np.ndarray) -> None:
        """dy [M, L, R, C, V] is kept where it is needed."""
        self.steps = steps
        m, l, r = steps.where
        self.dy = dy[m, l, r]
        self.found: list[tuple[np.ndarray, Tokens]] = []

    def redo(self, m: int, states: np.ndarray, after: np.ndarray, before: np.ndarray) -> None:
        """Overwrite, of the gradients [L, R, K, V] of the states before chunks m, those found."""
        steps = self.steps
        if not len(steps):
            return
        some = np.flatnonzero(steps.where[0] == m)
        if some.size:
            count = steps.count(m)
            lanes = steps.where[1][some], steps.where[2][some]
            tokens = [np.take(x, some, axis=0)[:, :count] for x in (*steps.tokens, self.dy)]
            arguments = [*tokens, states[lanes], after[lanes]]
            grads, before[lanes] = loop(steps.part.problem.rule, *arguments)
            self.found.append((some, grads))

    def answer(self, grad: Any) -> None:
        """Overwrite the gradients [M, L, R, C, ...] of the tokens of the chunks found."""
        for some, tokens in self.found:
            m, l, r = (x[some] for x in self.steps.where)
            for name, x in tokens._asdict().items():
                getattr(grad, name)[m, l, r, : x.shape[1]] = x


def loop(
    rule: str,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    gate: np.ndarray,
    beta: np.ndarray,
    dy: np.ndarray,
    state: np.ndarray,
    d: np.ndarray,
) -> tuple[Tokens, np.ndarray]:
    """Gradients of the tokens and of the first state [n, K, V], given that of the last state.

    dy [n, t, V] has the scale in it.
    """
    grad = Tokens(*(np.empty_like(x) for x in (q, k, v)), *(np.empty_like(beta) for _ in range(2)))
    delta = rule == "delta"
    columns, keys, gates = k[..., None], k[..., None, :], gate[..., None, None]
    states, wrote = [state], []
    for t in range(v.shape[1]):
        kept = (gates[:, t] * states[-1]).astype(state.dtype, copy=False)
        wrote.append(v[:, t, None] - np.matmul(keys[:, t], kept) if delta else v[:, t, None])
        states.append(kept + columns[:, t] * (beta[:, t, None, None] * wrote[-1]))
    for t in reversed(range(v.shape[1])):
        after, before, e = states.pop(), states[-1], wrote.pop()
        grad.q[:, t] = np.matmul(after, dy[:, t, :, None])[..., 0]
        d = d + q[:, t, :, None] * dy[:, t, None]
        for_key = np.matmul(d, e.swapaxes(-1, -2))[..., 0]
        for_e = beta[:, t, None, None] * np.matmul(keys[:, t], d)
        grad.k[:, t] = beta[:, t, None] * for_key
        grad.v[:, t] = for_e[:, 0]
        grad.beta[:, t] = (k[:, t] * for_key).sum(-1)
        if delta:
            kept = (gates[:, t] * before).astype(d.dtype, copy=False)
            grad.k[:, t] -= np.matmul(kept, for_e.swapaxes(-1, -2))[..., 0]
            d = d - columns[:, t] * for_e
        grad.gate[:, t] = np.einsum("nkv,nkv->n", d, before)
        d = (gates[:, t] * d).astype(before.dtype, copy=False)
    return grad, d
