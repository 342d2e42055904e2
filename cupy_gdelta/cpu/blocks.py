"""Which sequences and heads go through time together, and in which pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..problem import Problem

CHUNK = (
    32  # tokens: K = V = 64 then makes products small enough to be one thread's work to OpenBLAS
)
LANES = 8  # pairs of sequence and head that go through time together, where there are more
FEW = 32  # chunks that are not spread over segments for the sake of more threads
BYTES = 12 << 20  # about what a segment takes: many small calls would keep the threads apart


class Sequences(NamedTuple):
    """Sequences of one length: where they start, and their rows of the state."""

    rows: Any  # slice or [S]
    starts: Any  # 0 for whole batch entries, the start of the only sequence, or [S]
    length: int


@dataclass
class Block:
    """Some sequences with some of their heads: what goes through time together."""

    batch: slice  # of axis B, where starts is a number
    rows: Any  # of the state, slice or [S]
    starts: Any  # first token of all sequences, or of each [S]
    length: int
    heads: slice
    chunk: int  # tokens
    chunks: int  # in a segment
    carry: np.ndarray  # [L, R, K, V], the state between two segments
    drift: np.ndarray  # [L, R], see decay.rounded

    def tokens(self, start: int, stop: int) -> tuple[Any, Any, slice]:
        """Index of tokens and heads in an array [B, T, H, ...]."""
        if isinstance(self.starts, int):
            return self.batch, slice(self.starts + start, self.starts + stop), self.heads
        return 0, self.starts[:, None] + np.arange(start, stop), self.heads


def sequences(p: Problem) -> Iterator[Sequences]:
    """All sequences that are not empty, those of one length together."""
    if p.cu_seqlens is None:
        if p.B and p.T:
            yield Sequences(slice(0, p.B), 0, p.T)
        return
    assert isinstance(p.cu_seqlens, np.ndarray)
    lengths = np.diff(p.cu_seqlens)
    order = np.argsort(lengths, kind="stable")
    order = order[np.searchsorted(lengths[order], 1) :]
    for same in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        if same.size == 1:
            n = int(same[0])
            yield Sequences(slice(n, n + 1), int(p.cu_seqlens[n]), int(lengths[n]))
        elif same.size:
            yield Sequences(same, p.cu_seqlens[same], int(lengths[same[0]]))


def blocks(p: Problem, backward: bool = False) -> Iterator[Block]:
    """Every sequence and head once, in blocks whose segments take about BYTES.

    On the way back all value heads that share a query head stay in one block, which sums over them.
    """
    for group in sequences(p):
        chunk = min(CHUNK, 1 << (group.length - 1).bit_length())
        chunks = -(-group.length // chunk)
        numbers = chunk * (5 * p.K + 4 * chunk + 4 * p.V) + 2 * p.K * p.V
        if backward:
            numbers = chunk * (12 * p.K + 14 * chunk + 9 * p.V) + 3 * p.K * p.V
        gathered = not isinstance(group.rows, slice)
        count = len(group.rows) if gathered else group.rows.stop - group.rows.start
        cells = max(FEW, chunks * count * p.H // 8)  # chunks of one lane in a segment
        cells = min(cells, max(1, BYTES // (numbers * np.dtype(p.state_dtype).itemsize)))
        lanes = max(min(LANES, cells), cells // chunks, p.H // max(p.Hq, 1) if backward else 1)
        for heads in _head_ranges(p, lanes):
            size = min(count, max(1, lanes // (heads.stop - heads.start)))
            for first in range(0, count, size):
                some = slice(first, min(first + size, count))
                if gathered:
                    part = Sequences(group.rows[some], group.starts[some], group.length)
                else:
                    part = group if p.cu_seqlens is not None else group._replace(rows=some)
                yield _block(p, part, heads, chunk, cells)


def _block(p: Problem, part: Sequences, heads: slice, chunk: int, cells: int) -> Block:
    """The block of these sequences and heads, with its first state."""
    rows, starts, length = part
    width, shared = heads.stop - heads.start, p.H // p.Hq
    if p.initial_state is None:
        count = len(rows) if not isinstance(rows, slice) else rows.stop - rows.start
        carry = np.zeros((count, width, p.K, p.V), p.state_dtype)
    else:
        carry = np.array(p.initial_state.array[rows, heads], order="C")
    carry = carry.reshape(-1, min(width, shared), p.K, p.V)
    chunks = -(-length // chunk)
    segments = -(-chunks // max(1, cells // (carry.shape[0] * carry.shape[1])))
    if segments > 4:
        segments += -segments % 4  # an equal share for 2 or 4 threads
    many = -(-chunks // segments)
    batch = rows if p.cu_seqlens is None else slice(0, 1)
    return Block(batch, rows, starts, length, heads, chunk, many, carry, np.zeros(carry.shape[:2]))


def _head_ranges(p: Problem, lanes: int) -> Iterator[slice]:
    """Ranges of value heads that hold whole groups of a query head each, or a part of one."""
    if not p.H:
        return
    repeat = p.H // p.Hq
    step = max(1, lanes // repeat) * repeat
    if lanes >= repeat:
        for first in range(0, p.H, step):
            yield slice(first, min(first + step, p.H))
        return
    for group in range(0, p.H, repeat):
        for first in range(group, group + repeat, lanes):
            yield slice(first, min(first + lanes, group + repeat))
