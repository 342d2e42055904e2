"""The order of the work for gradients: forward through the segments of a block, then back.

A segment is computed twice: forward for the state after it, which is kept, and backward, from the
state before it, for its chunk states and its gradients. The last one needs no first pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..problem import Problem
from .blocks import Block, blocks
from .grad import Backward, Forward
from .pieces import Scratch, store
from .segment import Chunks, Turn
from .walk import Task, share

Arrays = dict[str, np.ndarray]  # gradients by the name of their argument


def run(problem: Problem, out: Arrays) -> None:
    """Write the gradients asked for, each in the shape of its argument."""
    _untouched(problem, out)
    share(problem, _tasks(problem, out))


def _tasks(problem: Problem, out: Arrays) -> Iterator[Task]:
    for block in blocks(problem, backward=True):
        step = block.chunk * block.chunks
        starts = range(0, block.length, step)
        path = _Path(problem, block, len(starts), out)
        for i, start in enumerate(starts[:-1]):
            yield path.forward(i, start, start + step)
        for i, start in reversed(list(enumerate(starts))):
            yield path.backward(i, start, min(start + step, block.length))


class _Path:
    """Both ways through one block."""

    def __init__(self, problem: Problem, block: Block, segments: int, out: Arrays) -> None:
        self.problem, self.block, self.out = problem, block, out
        self.before = [(block.carry, block.drift)] + [(block.carry, block.drift)] * (segments - 1)
        self.known = [threading.Event() for _ in range(segments)]  # the state before
        self.known[0].set()
        self.done = self.known[0]  # the turn before the next one
        self.carry, self.drift = _last_gradient(problem, block), np.zeros(block.drift.shape)

    def forward(self, i: int, start: int, stop: int) -> Task:
        turn = Turn(self.known[i], self.known[i + 1])

        def do(scratch: Scratch) -> None:
            ahead = Forward(Chunks(self.problem, self.block, start, stop, turn, scratch))
            with turn:
                state, drift = self.before[i]
                drift = drift.copy()
                self.before[i + 1] = ahead.states(state, drift)[-1].copy(), drift

        self.done = turn.after
        return Task(turn, do)

    def backward(self, i: int, start: int, stop: int) -> Task:
        turn = Turn(self.done)

        def do(scratch: Scratch) -> None:
            part = Chunks(self.problem, self.block, start, stop, turn, scratch)
            ahead = Forward(part)
            self.known[i].wait()
            state, drift = self.before[i]
            back = Backward(ahead, ahead.states(state, drift.copy()))
            with turn:
                self.carry = back.run(self.carry, self.drift).copy()
                if i == 0:
                    self._leave()
            _store(part, back, self.out)

        self.done = turn.after
        return Task(turn, do)

    def _leave(self) -> None:
        out = self.out.get("initial_state")
        if out is not None:
            where = self.block.rows, self.block.heads
            out[where] = self.carry.reshape(out[where].shape)


def _last_gradient(p: Problem, block: Block) -> np.ndarray:
    if p.dstate is None:
        return np.zeros_like(block.carry)
    d = np.array(p.dstate.array[block.rows, block.heads], order="C")
    return d.reshape(block.carry.shape)


def _store(part: Chunks, back: Backward, out: Arrays) -> None:
    """Gradients of the tokens into the caller's layout and dtype."""
    p, grad, count = part.problem, back.gradients(), part.stop - part.start
    for name in ("q", "k"):
        d = getattr(grad, name).sum(axis=2, keepdims=True)  # over the heads of a group
        if p.qk_l2norm:
            _through_length(d, back.ahead.q if name == "q" else back.ahead.k, part.lengths[name])
        store(d, p.dtype, out[name], part.key_index, count)
    store(np.ascontiguousarray(grad.v), p.dtype, out["v"], part.index, count)
    if p.log_gate:
        grad.gate *= back.ahead.gate
    for name, view in (("gate", p.gate), ("beta", p.beta)):
        if view is not None:
            d = np.ascontiguousarray(getattr(grad, name))[..., None]
            store(d, view.dtype, out[name][..., None], part.index, count)


def _through_length(d: np.ndarray, unit: np.ndarray, length: np.ndarray) -> None:
    """The gradient of x from that of unit = x / length, in place."""
    d -= unit * np.einsum("...k,...k->...", unit, d)[..., None]
    d /= length[..., None]


def _untouched(p: Problem, out: Arrays) -> None:
    """What no segment writes: tokens after the last packed sequence, states of empty sequences."""
    empty: Any = slice(None) if p.T == 0 else slice(0)
    if isinstance(p.cu_seqlens, np.ndarray):
        for name, x in out.items():
            if name != "initial_state":
                x[:, p.cu_seqlens[-1] :] = 0
        empty = np.flatnonzero(np.diff(p.cu_seqlens) == 0)
    if p.H == 0:  # q and k may have heads that nothing reads
        for x in out.values():
            x[...] = 0
    if "initial_state" in out:
        out["initial_state"][empty] = 0 if p.dstate is None else p.dstate.array[empty]
