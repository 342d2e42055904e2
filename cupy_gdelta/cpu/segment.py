"""One segment of a block: its inputs as chunks, its turn, and where its results go."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import View
from ..problem import Problem
from .blas import matmul, takes
from .blocks import Block
from .pieces import Scratch, in_chunks, load, store


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
class Chunks:
    """M chunks of C tokens of a block: L pairs of sequence and query head, R value heads each."""

    problem: Problem
    block: Block
    start: int
    stop: int
    turn: Turn
    scratch: Scratch

    def __post_init__(self) -> None:
        self.carry, self.drift = self.block.carry, self.block.drift
        L, R, K, V = self.carry.shape
        C = self.block.chunk
        self.shape = (-(-(self.stop - self.start) // C), L, R, C, K, V)
        self.index = self.block.tokens(self.start, self.stop)
        slices = isinstance(self.index[1], slice)
        self.whole = slices and self.stop - self.start == self.shape[0] * C  # seen without a copy
        self.lengths: dict[str, np.ndarray] = {}  # of q and k before they were normalised

    @property
    def key_index(self) -> tuple[Any, Any, slice]:
        """Index of these tokens and heads in q and k."""
        heads, repeat = self.block.heads, self.problem.H // self.problem.Hq
        some = slice(heads.start // repeat, (heads.stop - 1) // repeat + 1)
        return *self.index[:2], some

    def keys(self, name: str, scaled: bool = True) -> np.ndarray:
        """q (scaled) or k, [M, L, 1, C, K]."""
        p = self.problem
        M, L, _, C, K, _ = self.shape
        view: View = p.q if name == "q" else p.k
        x, scale = view.array[self.key_index], p.scale if scaled and name == "q" else 1
        plain = scale == 1 and not p.qk_l2norm and x.dtype == self.scratch.dtype
        if plain and self.whole and takes(x) and 1 in (x.shape[0], x.shape[2]):
            return in_chunks(x, C, 1).reshape(M, L, 1, C, K)  # no copy
        out = self.scratch(name, M, L, 1, C, K)
        load(x, view.dtype, out)
        if p.qk_l2norm:
            norm = np.einsum("...k,...k->...", out, out)
            norm += out.dtype.type(1e-6)
            out /= np.sqrt(norm, out=norm)[..., None]
            self.lengths[name] = norm
        if scale != 1:
            out *= scale
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


@dataclass
class Segment(Chunks):
    """Chunks with the outputs that they are for."""

    y: np.ndarray
    state: np.ndarray | None

    def answer(self, read: np.ndarray, content: np.ndarray) -> None:
        """y = read content, [M, L, R, C, V]."""
        M, L, R, C, _, V = self.shape
        y = self.y[self.index] if self.whole else None
        if y is not None and y.dtype == read.dtype and takes(y):
            y = in_chunks(y, C, R)
            read, content = (x.reshape(*y.shape[:4], *x.shape[3:]) for x in (read, content))
            matmul(read, content, out=y)
            return
        chunks = matmul(read, content, out=self.scratch("y", M, L, R, C, V))
        store(chunks, self.problem.dtype, self.y, self.index, self.stop - self.start)

    def leave(self) -> None:
        """Hand the final state over once the last segment has made it."""
        if self.state is not None and self.stop == self.block.length:
            rows = self.state[self.block.rows, self.block.heads]
            self.state[self.block.rows, self.block.heads] = self.carry.reshape(rows.shape)
