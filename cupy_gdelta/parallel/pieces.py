"""Who holds what: from the lengths of all pieces to the part of every rank, without a message.

Sequences count as in the final state: the entries of a batch, or the packed ones. Those of a batch
come and go together, as one packed sequence does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """What one rank holds."""

    entering: int  # how many of its first tokens are of sequences that began on an earlier rank
    leaves: bool  # whether the sequence of its last token goes on at a later rank
    first: int  # sequences [first, last) start here, the empty ones among them
    last: int
    offsets: np.ndarray | None  # of these among the tokens after the entering ones; None: a batch


@dataclass(frozen=True)
class Pieces:
    """How the ranks share the tokens; one entry a rank in each array."""

    tokens: np.ndarray
    starts: np.ndarray
    before: np.ndarray  # the last earlier rank that holds tokens, -1 for none
    after: np.ndarray  # the next later one
    entering: np.ndarray  # see Part
    leaves: np.ndarray
    first: np.ndarray
    last: np.ndarray
    together: int  # sequences that come and go together
    offsets: np.ndarray | None  # of the whole

    @property
    def through(self) -> np.ndarray:
        """Where all tokens are of sequences that come and go on."""
        return self.leaves & (self.entering == self.tokens)

    def part(self, rank: int) -> Part:
        first, last, tokens = (int(x[rank]) for x in (self.first, self.last, self.tokens))
        entering, leaves = int(self.entering[rank]), bool(self.leaves[rank])
        own = None
        if self.offsets is not None:
            start = int(self.starts[rank]) + entering
            own = np.clip(self.offsets[first : last + 1], start, start + tokens - entering) - start
        return Part(entering, leaves, first, last, own)

    def finished(self, rank: int) -> tuple[int, int]:
        """First and end of the sequences whose final state is found on ``rank``."""
        through, comes = self.through[rank], self.entering[rank] > 0
        ends, goes = comes and not through, self.leaves[rank] and not through
        return (
            int(self.first[rank]) - self.together * int(ends),
            int(self.last[rank]) - self.together * int(goes),
        )

    def chain(self, rank: int, dead: np.ndarray, *, leaving: bool) -> list[int]:
        """The ranks that pass one state on, from the one that knows it to the last that needs it.

        It is the chain that ``rank`` receives in, or with ``leaving`` the one it sends in; empty
        where there is none. A rank knows the state at its end by itself if the sequence began
        there, or if it is ``dead``: its decays leave nothing of the state before.
        """
        if not (self.leaves if leaving else self.entering)[rank]:
            return []
        passes = self.through & ~dead
        ranks = [rank]
        if passes[rank] or not leaving:
            ranks.insert(0, int(self.before[rank]))
            while passes[ranks[0]]:
                ranks.insert(0, int(self.before[ranks[0]]))
        if passes[rank] or leaving:
            ranks.append(int(self.after[rank]))
            while passes[ranks[-1]]:
                ranks.append(int(self.after[ranks[-1]]))
        return ranks


def share(lengths: np.ndarray, batch: int, offsets: np.ndarray | None) -> Pieces:
    """``lengths`` tokens on each rank; ``offsets`` of all sequences of the whole, None: a batch."""
    tokens, ranks = lengths, np.arange(len(lengths))
    stops = np.cumsum(tokens)
    starts = stops - tokens
    filled = tokens > 0
    before = np.maximum.accumulate(np.append(-1, np.where(filled, ranks, -1)))[:-1]
    far = len(ranks)
    after = np.minimum.accumulate(np.append(far, np.where(filled, ranks, far)[::-1]))[-2::-1]
    after = np.where(after == far, -1, after)
    if offsets is None:
        home = int(np.argmax(filled)) if filled.any() else far - 1
        first, last = batch * (ranks > home), batch * (ranks >= home)
        entering, leaves = np.where(ranks > home, tokens, 0), filled & (after >= 0)
        return Pieces(tokens, starts, before, after, entering, leaves, first, last, batch, None)
    first, last = (np.searchsorted(offsets[:-1], x) for x in (starts, stops))
    last[-1] = len(offsets) - 1
    begins = offsets[first]  # where the sequence before the first one ends
    comes = (first > 0) & (begins > starts)
    entering = np.where(comes, np.minimum(begins, stops) - starts, 0)
    leaves = filled & (last > 0) & (offsets[last] > stops)
    return Pieces(tokens, starts, before, after, entering, leaves, first, last, 1, offsets)
