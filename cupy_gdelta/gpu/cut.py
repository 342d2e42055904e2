"""Walks along time that are cut into pieces, see cuda/cut.cuh: pure functions of sizes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..problem import Problem

ARGS = struct.Struct("=Q 4i")  # CutArgs
SHORTEST = 1024  # tokens of a piece
EARLY = 450  # tokens before a piece that are walked too, with gates near 0.95
# Of the time of a narrower walk that is not cut: 0.6 pays. None is cut while a row of a state can
# be lost that is small beside others of its column, and not written just before a piece.
WORTH = 0.0


@dataclass(frozen=True)
class Cut:
    """Pieces of walks, and the columns and stages of the blocks that walk them."""

    chunks: int  # of a piece
    chunk: int  # tokens
    cols: int
    stages: int = 0

    def pieces(self, T: int) -> int:
        """Of the longest sequence there may be."""
        return max(1, -(-T // (self.chunks * self.chunk)))

    def edge_bytes(self, p: Problem) -> int:
        """Of the states that pieces of walks forward and back begin with, and those they leave."""
        return 2 * 2 * 4 * p.N * p.H * self.pieces(p.T) * p.K * p.V


def choose(T: int, chunk: int, cols: int, stages: int, blocks: int, room: int) -> Cut | None:
    """How to cut walks of ``blocks`` blocks where there is room for ``room``, or None."""
    pieces = min(room // max(blocks, 1), T // SHORTEST)
    if pieces < 2 or -(-T // pieces) + EARLY > WORTH * T:
        return None
    return Cut(-(-T // (pieces * chunk)), chunk, cols, stages)


class Walk(NamedTuple):
    """One launch of walks: the form of the kernel, its pieces, and whether it walks up to them."""

    how: str  # Cut of cuda/cut.cuh
    pieces: int
    early: bool


def walks(cut: Cut | None, T: int) -> list[Walk]:
    """Launches in order."""
    if cut is None:
        return [Walk("kWhole", 1, early=False)]
    in_pieces = [Walk("kPieces", cut.pieces(T), early) for early in (True, False)]
    return [*in_pieces, Walk("kAgain", 1, early=False)]


def arguments(p: Problem, cut: Cut | None, walk: Walk, edges: int) -> np.ndarray:
    """A walk's last argument, laid out as CutArgs; ``edges`` is an address."""
    sizes = (0, 0) if cut is None else (cut.chunks, cut.pieces(p.T))
    packed = ARGS.pack(edges, *sizes, walk.early, 0)
    return np.frombuffer(packed, np.dtype((np.void, ARGS.size)))
