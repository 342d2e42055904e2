"""What one rank does with its own tokens, by the functions of one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import api, arrays, grad
from ..arrays import View
from ..gradients import Gradients
from ..problem import Problem
from .scan import balanced
from .spaces import Space
from .transition import bounded, lifted, parts

FUNCTIONS = {"linear": api.gated_linear_attention, "delta": api.gated_delta_rule}
GRADIENTS = {
    "linear": grad.gated_linear_attention_grad,
    "delta": grad.gated_delta_rule_grad,
}
NUMBERS = 1 << 24  # in the output that a transition computes and nobody reads, at a time
LARGEST = float(np.finfo(np.float64).max)
BLOCK = 1 << 18  # numbers of y that are added to at a time


@dataclass(frozen=True)
class Local:
    """The tokens of one rank, and the arrays that they are in."""

    p: Problem
    space: Space

    @property
    def adds(self) -> bool:
        """Whether what y owes to the state before a piece can be added to it afterwards.

        That takes less time than the rule from that state. In 16 bits it would round y twice, and
        on a GPU it has nearly as much memory to read and write.
        """
        p = self.p
        return p.rule == "linear" and p.v.device < 0 and p.dtype == p.state_dtype

    def run(
        self, start: int, stop: int, state: View | None, y: View, offsets: np.ndarray | None = None
    ) -> View:
        """Write y of some tokens; the state after them."""
        some = slice(start, stop)
        v, out = plain(self.p.v)[:, some], plain(y)[:, some]
        return self._call(some, v, state, out, cu_seqlens=offsets, scale=self.p.scale)

    def transition(self, stop: int) -> Any:
        """What the first tokens do to a state, [B, H, K, K], and the exponents of its columns.

        It is the rule without values, from I, in parts within which no number can overflow.
        """
        p, space = self.p, self.space
        state = space.zeros((p.B, p.H, p.K, p.K), p.state_dtype)
        state.array.reshape(-1, p.K * p.K)[:, :: p.K + 1] = 1
        e = space.zeros((p.B, p.H, p.K), "float64").array
        longest = max(1, min(stop, NUMBERS // max(1, p.B * p.H * p.K)))
        none = space.zeros((p.B, longest, p.H, p.K), p.dtype)
        out = arrays.empty(p.v, (p.B, longest, p.H, p.K), p.dtype)
        for some in parts(p, space, stop, longest):
            gate, shift = lifted(p, space, some)
            v, unread = (plain(x)[:, : some.stop - some.start] for x in (none, out))
            after = self._call(some, v, state, unread, **gate).array
            with np.errstate(all="ignore"):
                after, more = balanced(space, bounded(space, space.wide(after)))
            e = e + shift[..., None] + more
            state.array[...] = after
        return state.array, e

    def add(self, stop: int, state: np.ndarray, y: View) -> None:
        """Add scale * gate_1 ... gate_t * q_t S to y of the first tokens, for S [B, H, K, V]."""
        p = self.p
        repeat = p.H // p.Hq if p.Hq else 1
        columns = state.reshape(p.B, p.Hq, repeat, p.K, p.V).transpose(0, 1, 3, 2, 4)
        columns = columns.reshape(p.B, p.Hq, p.K, repeat * p.V)
        step = max(1, BLOCK // max(1, p.B * p.H * p.V))
        left: Any = np.full((p.B, 1, p.H), p.scale)
        with np.errstate(all="ignore"):
            for at in range(0, stop, step):
                some = slice(at, min(at + step, stop))
                weight = self._products(some) * left
                left = _finite(weight[:, -1:])
                read = np.matmul(p.q.array[:, some].transpose(0, 2, 1, 3), columns)
                read = read.transpose(0, 2, 1, 3).reshape(p.B, -1, p.H, p.V)
                part = y.array[:, some]
                np.add(part, _product(read, weight), out=part, casting="same_kind")
                if not left.any():
                    return

    def read_by(self, dy: View, stop: int) -> Any:
        """The gradient of the state before the first tokens, from dy of these; linear rule.

        It is the sum over t of scale * gate_1 ... gate_t * q_t dy_t^T, [B, H, K, V].
        """
        p, space = self.p, self.space
        total = space.wide(space.zeros((p.B, p.H, p.K, p.V), p.state_dtype).array)
        left: Any = p.scale
        step = max(1, 8 * BLOCK // max(1, p.B * p.H * max(p.K, p.V)))
        with np.errstate(all="ignore"):
            for at in range(0, stop, step):
                some = slice(at, min(at + step, stop))
                weight = self._products(some) * left
                left = space.xp.clip(weight[:, -1:], -LARGEST, LARGEST)
                q, d = (space.wide(space.widened(x, some.start, some.stop)) for x in (p.q, dy))
                q = q[:, :, :, None] * weight.reshape(*q.shape[:3], -1, 1)
                q = q.reshape(p.B, -1, p.H, p.K).swapaxes(1, 2).swapaxes(2, 3)
                total = total + space.xp.matmul(q, d.swapaxes(1, 2))
        return total

    def _products(self, some: slice) -> Any:
        """Of the gates of some tokens, from the first of them on, [B, t, H], wider than y."""
        p, space = self.p, self.space
        if p.gate is None:
            return space.zeros((p.B, some.stop - some.start, p.H), "float64").array + 1
        gate, xp = space.longer(space.widened(p.gate, some.start, some.stop)), space.xp
        found = xp.exp(xp.cumsum(gate, 1)) if p.log_gate else xp.cumprod(gate, 1)
        forgotten = xp.cumsum(gate == (-math.inf if p.log_gate else 0), 1) > 0
        return xp.where(forgotten, 0.0, found)  # also where it has overflowed before

    def grad(
        self,
        start: int,
        stop: int,
        dy: View,
        state: View | None,
        dstate: View | None,
        offsets: np.ndarray | None = None,
    ) -> Gradients:
        """Gradients of what run computes."""
        p, some = self.p, slice(start, stop)
        options = self._options(some) | {"cu_seqlens": offsets, "scale": p.scale}
        return GRADIENTS[p.rule](
            plain(dy)[:, some],
            plain(p.q)[:, some],
            plain(p.k)[:, some],
            plain(p.v)[:, some],
            initial_state=None if state is None else plain(state),
            dstate=None if dstate is None else plain(dstate),
            **options,
        )

    def _call(self, some: slice, v: Any, state: View | None, out: Any, **options: Any) -> View:
        p = self.p
        _, after = FUNCTIONS[p.rule](
            plain(p.q)[:, some],
            plain(p.k)[:, some],
            v,
            initial_state=None if state is None else plain(state),
            return_state=True,
            out=out,
            **(self._options(some) | options),
        )
        return arrays.take(after)

    def _options(self, some: slice) -> dict[str, Any]:
        p = self.p
        gate, beta = (None if x is None else plain(x)[:, some] for x in (p.gate, p.beta))
        options = {"log_gate" if p.log_gate else "gate": gate, "beta": beta}
        if p.rule == "delta":
            options["qk_l2norm"] = p.qk_l2norm
        return options | {"precision": p.precision}


def plain(x: View) -> Any:
    """The array of the caller's library, without a gradient."""
    return x.owner.detach() if x.family == "torch" else x.owner


def _finite(weight: np.ndarray) -> np.ndarray:
    """With infinities as the largest numbers of its dtype, of which a later gate of 0 makes 0."""
    largest = np.finfo(weight.dtype).max
    return weight.clip(-largest, largest)


def _product(read: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """In the dtype of ``read``; as wide as float64 for entries and heads beyond its range.

    What one entry gets does not depend on the weights of others.
    """
    size, limits = np.abs(weight), np.finfo(np.float32)
    far = ((size > limits.max) | ((size < limits.tiny) & (size > 0))).any(1)  # [B, H]
    near = read * weight[..., None].astype(read.dtype)
    if not far.any():
        return near
    wide = read * weight[..., None].clip(-LARGEST, LARGEST).astype(np.float64)
    return np.where(far[:, None, :, None], wide, near)
