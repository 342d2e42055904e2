"""The order of the work: which tokens and heads go together, and which thread takes them when."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from ..problem import Problem
from .blocks import Block, blocks
from .pieces import Scratch
from .segment import Segment, Turn

MAX_THREADS = 8  # each has a scratch of its own
WORTH_A_THREAD = 1 << 18  # numbers to be read


def run(
    problem: Problem,
    rule: Callable[[Segment], None],
    y: np.ndarray,
    state: np.ndarray | None,
) -> None:
    """Compute every segment of every block, several at a time where the machine can."""
    _untouched(problem, y, state)

    def task(block: Block, start: int, stop: int, turn: Turn) -> Task:
        def do(scratch: Scratch) -> None:
            rule(Segment(problem, block, start, stop, turn, scratch, y, state))

        return Task(turn, do)

    share(problem, (task(*item) for item in _work(problem)))


class Task(NamedTuple):
    """What one thread does at a time, and the turn that ends with it."""

    turn: Turn
    do: Callable[[Scratch], None]


def share(problem: Problem, tasks: Iterator[Task]) -> None:
    """Do every task, several at a time where the machine can; each waits only for earlier ones."""
    dtype = np.dtype(problem.state_dtype)
    lock, failed = threading.Lock(), threading.Event()

    def worker() -> None:
        scratch = Scratch(dtype)
        with np.errstate(all="ignore"):
            while not failed.is_set():
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return
                try:
                    task.do(scratch)
                except BaseException:
                    failed.set()
                    raise
                finally:
                    task.turn.after.set()

    helpers = threads(problem.B * problem.T * problem.H * (problem.K + problem.V)) - 1
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


def threads(numbers: int) -> int:
    """How many threads are worth their start: OMP_NUM_THREADS or the CPUs of this process."""
    if numbers < WORTH_A_THREAD:
        return 1
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdigit():
        return min(MAX_THREADS, int(asked))
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return min(MAX_THREADS, len(affinity(0)) if affinity else os.cpu_count() or 1)
