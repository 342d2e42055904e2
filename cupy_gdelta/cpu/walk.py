"""The order of the work: which tokens and heads go together, and which thread takes them when."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import View
from ..problem import Problem
from .blocks import Block, blocks
from .pieces import Scratch, load, store

MAX_THREADS = 8  # each has a scratch of its own
WORTH_A_THREAD = 1 << 23  # multiplications of k with v


@dataclass
class Turn:
    """``with turn:`` is what must wait for the segment before; the next one waits for its end."""

    before: threading.Event
    after: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> None:
        self.before.wait()

    def __exit__(self, *error: object) -> None:
        self.after.set()


@dataclass
class Segment:
    """M chunks of C tokens of a block: L pairs of sequence and query head, R value heads each."""

    problem: Problem
    block: Block
    start: int
    stop: int
    turn: Turn
    scratch: Scratch
    y: np.ndarray
    state: np.ndarray | None

    def __post_init__(self) -> None:
        self.carry, self.drift = self.block.carry, self.block.drift
        L, R, K, V = self.carry.shape
        C = self.block.chunk
        self.shape = (-(-(self.stop - self.start) // C), L, R, C, K, V)
        self.index = self.block.tokens(self.start, self.stop)

    def keys(self, name: str) -> np.ndarray:
        """q (scaled) or k, [M, L, 1, C, K]."""
        p = self.problem
        M, L, _, C, K, _ = self.shape
        heads, repeat = self.block.heads, p.H // p.Hq
        some = slice(heads.start // repeat, (heads.stop - 1) // repeat + 1)
        x: View = getattr(p, name)
        out = self.scratch(name, M, L, 1, C, K)
        load(x.array[(*self.index[:2], some)], x.dtype, out)
        if p.qk_l2norm:
            norm = np.einsum("...k,...k->...", out, out)
            norm += out.dtype.type(1e-6)
            out /= np.sqrt(norm, out=norm)[..., None]
        if name == "q" and p.scale != 1:
            out *= p.scale
        return out

    def values(self, out: np.ndarray) -> None:
        """Write v into out [M, L, R, C, V]."""
        load(self.problem.v.array[self.index], self.problem.v.dtype, out)

    def gates(self) -> np.ndarray:
        """[M, L, R, C] in a dtype wider than the state's; 1 past the end."""
        p = self.problem
        wide = np.float64 if self.scratch.dtype == np.float32 else np.longdouble
        if not p.log_gate:
            return self._scalars("gate", p.gate, 1.0, wide)
        # float64 whatever the dtype: the error of a rounded gate would grow with time
        log = self._scalars("log gate", p.gate, 0.0, np.float64)
        return np.exp(log, out=log).astype(wide, copy=False)

    def betas(self) -> np.ndarray:
        """[M, L, R, C] in the state dtype; 0 past the end."""
        return self._scalars("beta", self.problem.beta, 0.0, self.scratch.dtype)

    def _scalars(self, name: str, x: View | None, fill: float, dtype: Any) -> np.ndarray:
        out = self.scratch(name, *self.shape[:4], dtype=dtype)
        if x is None:
            out.fill(1)
        else:
            load(x.array[self.index][..., None], x.dtype, out[..., None], fill)
        return out

    def answer(self, read: np.ndarray, content: np.ndarray) -> None:
        """y = read content, [M, L, R, C, V]."""
        M, L, R, C, _, V = self.shape
        y, whole = self.y, self.stop - self.start == M * C and isinstance(self.index[1], slice)
        rows = y.strides[1] >= V * y.itemsize and y.strides[3] == y.itemsize  # as BLAS needs them
        if whole and rows and y.dtype == read.dtype:
            y = y[self.index]
            S, G = y.shape[0], L // y.shape[0]
            y = y.reshape(S, M, C, G, R, V).transpose(1, 0, 3, 4, 2, 5)
            read, content = (x.reshape(M, S, G, R, *x.shape[3:]) for x in (read, content))
            np.matmul(read, content, out=y)
            return
        chunks = np.matmul(read, content, out=self.scratch("y", M, L, R, C, V))
        store(chunks, self.problem.dtype, y, self.index, self.stop - self.start)

    def leave(self) -> None:
        """Hand the final state over once the last segment has made it."""
        if self.state is not None and self.stop == self.block.length:
            rows = self.state[self.block.rows, self.block.heads]
            self.state[self.block.rows, self.block.heads] = self.carry.reshape(rows.shape)


def run(
    problem: Problem,
    rule: Callable[[Segment], None],
    y: np.ndarray,
    state: np.ndarray | None,
) -> None:
    """Compute every segment of every block, several at a time where the machine can."""
    dtype = np.dtype(problem.state_dtype)
    _untouched(problem, y, state)
    work = _work(problem)
    lock, failed = threading.Lock(), threading.Event()

    def worker() -> None:
        scratch = Scratch(dtype)
        with np.errstate(all="ignore"):
            while not failed.is_set():
                with lock:
                    item = next(work, None)
                if item is None:
                    return
                turn = item[-1]
                try:
                    rule(Segment(problem, *item, scratch, y, state))
                except BaseException:
                    failed.set()
                    raise
                finally:
                    turn.after.set()

    helpers = _threads(problem) - 1
    if helpers < 1:
        worker()
        return
    with ThreadPoolExecutor(helpers) as pool:
        others = [pool.submit(worker) for _ in range(helpers)]
        worker()
        for other in others:
            other.result()


def _work(problem: Problem) -> Iterator[tuple[Block, int, int, Turn]]:
    """Every segment after the one whose state it needs."""
    for block in blocks(problem):
        before = threading.Event()
        before.set()
        step = block.chunk * block.chunks
        for start in range(0, block.length, step):
            turn = Turn(before)
            yield block, start, min(start + step, block.length), turn
            before = turn.after


def _untouched(p: Problem, y: np.ndarray, state: np.ndarray | None) -> None:
    """What no segment writes: y after the last packed sequence, the state of an empty sequence."""
    empty: Any = slice(None) if p.T == 0 else slice(0)
    if isinstance(p.cu_seqlens, np.ndarray):
        y[:, p.cu_seqlens[-1] :] = 0
        empty = np.flatnonzero(np.diff(p.cu_seqlens) == 0)
    if state is not None:
        state[empty] = 0 if p.initial_state is None else p.initial_state.array[empty]


def _threads(p: Problem) -> int:
    """How many threads are worth their start: OMP_NUM_THREADS or the CPUs of this process."""
    if p.B * p.T * p.H * p.K * p.V < WORTH_A_THREAD:
        return 1
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdigit():
        return min(MAX_THREADS, int(asked))
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return min(MAX_THREADS, len(affinity(0)) if affinity else os.cpu_count() or 1)
