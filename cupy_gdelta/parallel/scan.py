"""The exclusive scan that takes states across ranks: what it combines, in which rounds.

A piece takes the state before it to the state after it by

    S_after = A S_before + U

with A a number for the linear rule, the product of the gates, and a K by K matrix for the delta
rule. Two pieces in a row make one of the same form, A = A_2 A_1 and U = A_2 U_1 + U_2, which does
not depend on how more of them are put in pairs. So in round r = 0, 1, 2 ... every rank of a chain
sends what it knows of the 2^r pieces up to its own to the rank 2^r after it (Hillis and Steele,
"Data parallel algorithms", 1986), and after ceil(log2(ranks)) rounds each knows the state before
its piece. The first rank of a chain knows its state whatever was before it: it has no A, and
neither has what reaches back to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import Problem
from .links import Link
from .reach import finite
from .spaces import Space


@dataclass(frozen=True)
class Form:
    """Shape and layout of what a chain sends: ``count`` sequences together."""

    space: Space
    rule: str
    dtype: str  # of the states
    count: int
    H: int
    K: int
    V: int

    @classmethod
    def of(cls, space: Space, p: Problem, count: int) -> Form:
        return cls(space, p.rule, p.state_dtype, count, p.H, p.K, p.V)

    @property
    def transition(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of A."""
        if self.rule == "linear":
            return (self.count, self.H), "float64"
        return (self.count, self.H, self.K, self.K), self.dtype

    def message(self, absolute: bool) -> Map:
        """Room for a message that holds U, and A before it unless it is ``absolute``."""
        shape, dtype = self.transition
        first = 0 if absolute else math.prod(shape) * np.dtype(dtype).itemsize
        state = (self.count, self.H, self.K, self.V)
        raw = self.space.bytes(first + math.prod(state) * np.dtype(self.dtype).itemsize)
        typed = self.space.typed
        A = None if absolute else typed(raw[:first], dtype).reshape(shape)
        return Map(A, typed(raw[first:], self.dtype).reshape(state), raw)

    def fill(self, A: Any, U: Any) -> Map:
        """A message with these contents; A is None for a state that is known."""
        found = self.message(A is None)
        if A is not None:
            found.A[...] = A
        found.U[...] = U
        return found

    def after(self, first: Map, second: Map) -> Map:
        """What the first piece and then the second do to a state."""
        wide = self.space.wide
        A = wide(second.A)
        with np.errstate(all="ignore"):
            if self.rule == "delta":
                before = None if first.A is None else A @ wide(first.A)
                return self.fill(before, A @ wide(first.U) + wide(second.U))
            before = None if first.A is None else finite(self.space, A * first.A)
            return self.fill(before, A[..., None, None] * wide(first.U) + wide(second.U))


@dataclass(frozen=True)
class Map:
    """A and U in the memory of one message."""

    A: Any  # None where U is the state itself
    U: Any
    raw: Any


class Scan:
    """One rank's part in the chain that it receives in and the one that it sends in.

    They are one and the same where it passes on; ``piece`` is what its own tokens do, None where
    it does not send. The first round is under way when this returns.
    """

    def __init__(
        self, link: Link, form: Form, incoming: list[int], outgoing: list[int], piece: Map | None
    ) -> None:
        self.link, self.form, self.piece = link, form, piece
        self.incoming, self.outgoing = incoming, outgoing
        self.to = outgoing.index(link.rank) if outgoing else 0  # places in the chains
        self.at = incoming.index(link.rank) if incoming else 0
        self.before: Map | None = None  # what the pieces before do, those of which it knows
        self.sent: Map | None = None
        self.far = 1
        self._start()

    def finish(self) -> Any:
        """The state before this rank's piece; None without a chain that it receives in."""
        while self._going():
            self._end()
            self.far *= 2
            if self._going():
                self._start()
        return None if self.before is None else self.before.U

    def _going(self) -> bool:
        return self.to + self.far < len(self.outgoing) or self.far <= self.at

    def _start(self) -> None:
        sends, receives = [], []
        room = self.form.count * self.form.H  # else there is nothing to say
        if room and self.to + self.far < len(self.outgoing):
            sends.append((self._known().raw, self.outgoing[self.to + self.far]))
        self.arriving: Map | None = None
        if self.far <= self.at:
            self.arriving = self.form.message(absolute=self.at - self.far < self.far)
        if room and self.arriving is not None:
            receives.append((self.arriving.raw, self.incoming[self.at - self.far]))
        self.wait: Callable[[], None] = self.link.exchange(sends, receives)

    def _end(self) -> None:
        self.wait()
        if self.arriving is not None:
            self.sent = None
            earlier = self.arriving
            self.before = earlier if self.before is None else self.form.after(earlier, self.before)

    def _known(self) -> Map:
        """What the last pieces do up to this rank's own, as many as it knows of."""
        assert self.piece is not None
        if self.sent is None:
            self.sent = self.piece
            if self.before is not None and self.to:  # else what came belongs to another chain
                self.sent = self.form.after(self.before, self.piece)
        return self.sent
