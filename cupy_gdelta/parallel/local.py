"""What one rank does with its own tokens, by the functions of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import api, arrays
from ..arrays import View
from ..problem import Problem
from .spaces import Space

FUNCTIONS = {"linear": api.gated_linear_attention, "delta": api.gated_delta_rule}
NUMBERS = 1 << 24  # in the output that a transition computes and nobody reads, at a time
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
        """What the first tokens do to a state, [B, H, K, K]: the rule without values, from I."""
        p = self.p
        state = self.space.zeros((p.B, p.H, p.K, p.K), p.state_dtype)
        state.array[..., range(p.K), range(p.K)] = 1
        step = max(1, min(stop, NUMBERS // max(1, p.B * p.H * p.K)))
        none = self.space.zeros((p.B, step, p.H, p.K), p.dtype)
        out = arrays.empty(p.v, (p.B, step, p.H, p.K), p.dtype)
        for at in range(0, stop, step):
            some = slice(at, min(at + step, stop))
            v, unread = (plain(x)[:, : some.stop - at] for x in (none, out))
            state = self._call(some, v, state, unread)
        return state.array

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
                left = weight[:, -1:]
                read = np.matmul(p.q.array[:, some].transpose(0, 2, 1, 3), columns)
                read = read.transpose(0, 2, 1, 3).reshape(p.B, -1, p.H, p.V)
                part = y.array[:, some]
                np.add(
                    part, read * _near(weight[..., None], part.dtype), out=part, casting="same_kind"
                )
                if not left.any():
                    return

    def _products(self, some: slice) -> Any:
        """Of the gates of some tokens, from the first of them on, [B, t, H], wider than y."""
        p = self.p
        if p.gate is None:
            return np.ones((p.B, some.stop - some.start, p.H))
        gate = self.space.widened(p.gate, some.start, some.stop)
        if p.log_gate:
            return np.exp(np.cumsum(gate, 1, dtype=np.float64))
        return np.cumprod(gate, 1, dtype=np.longdouble if p.dtype == "float64" else np.float64)

    def _call(self, some: slice, v: Any, state: View | None, out: Any, **options: Any) -> View:
        p = self.p
        gate, beta = (None if x is None else plain(x)[:, some] for x in (p.gate, p.beta))
        options["log_gate" if p.log_gate else "gate"] = gate
        if p.rule == "delta":
            options["qk_l2norm"] = p.qk_l2norm
        _, after = FUNCTIONS[p.rule](
            plain(p.q)[:, some],
            plain(p.k)[:, some],
            v,
            beta=beta,
            initial_state=None if state is None else plain(state),
            return_state=True,
            out=out,
            precision=p.precision,
            **options,
        )
        return arrays.take(after)


def plain(x: View) -> Any:
    """The array of the caller's library, without a gradient."""
    return x.owner.detach() if x.family == "torch" else x.owner


def _near(weight: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """In ``dtype`` where all are in its range, else as wide as float64."""
    size, limits = np.abs(weight), np.finfo(np.float32)
    fits = not ((size > limits.max) | ((size < limits.tiny) & (size > 0))).any()
    largest = np.finfo(np.float64).max
    return weight.astype(dtype) if fits else weight.clip(-largest, largest).astype(np.float64)
