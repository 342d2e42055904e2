"""The exclusive scan that takes states across ranks: what it combines, in which rounds.

A piece takes the state before it to the state after it by

    S_after = A S_before + U

with A a number for the linear rule, the product of the gates, and a K by K matrix for the delta
rule. Exponents of its own keep A in the range of its dtype: gates above 1 may take it far beyond,
in directions that no state has, and small ones far below before large ones take it back. Two pieces
in a row make one of the same form, A = A_2 A_1 and U = A_2 U_1 + U_2, which does not depend on how
more of them are put in pairs. So in round r = 0, 1, 2 ... every rank of a chain sends what it knows
of the 2^r pieces up to its own to the rank 2^r after it (Hillis and Steele, "Data parallel
algorithms", 1986), and after ceil(log2(ranks)) rounds each knows the state before its piece. The
first rank of a chain knows its state whatever was before it: it has no A, and neither has what
reaches back to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import Problem
from .links import Link
from .spaces import Space

LEAST = -(2.0**60)  # an exponent below all others


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
    def transition(self) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """Shape of the exponents of A, which are float64, and shape and dtype of A."""
        heads = (self.count, self.H)
        if self.rule == "linear":
            return heads, heads, "float64"
        return (*heads, self.K), (*heads, self.K, self.K), self.dtype

    def message(self, absolute: bool) -> Map:
        """Room for a message that holds U, and before it e and A unless it is ``absolute``."""
        parts: list[tuple[tuple[int, ...], str]] = []
        if not absolute:
            exponents, shape, dtype = self.transition
            parts = [(exponents, "float64"), (shape, dtype)]
        parts.append(((self.count, self.H, self.K, self.V), self.dtype))
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in parts]
        raw = self.space.bytes(sum(sizes))
        ends = np.cumsum(sizes).tolist()
        found: list[Any] = [
            self.space.typed(raw[end - size : end], dtype).reshape(shape)
            for (shape, dtype), size, end in zip(parts, sizes, ends, strict=True)
        ]
        e, A, U = [None, None, *found][-3:]
        return Map(e, A, U, raw)

    def fill(self, A: Any, e: Any, U: Any) -> Map:
        """A message with these contents; A is None for a state that is known."""
        found = self.message(A is None)
        if A is not None:
            found.A[...], found.e[...] = A, e
        found.U[...] = U
        return found

    def after(self, first: Map, second: Map) -> Map:
        """What the first piece and then the second do to a state."""
        space = self.space
        A, wide = space.wide(second.A), space.wide
        with np.errstate(all="ignore"):
            if self.rule == "delta":
                before, e = None, None
                if first.A is not None:
                    before, e = balanced(space, wide(first.A), second.e)
                    before, more = balanced(space, A @ before)
                    e = first.e + e + more
                U, more = balanced(space, wide(first.U), second.e)
                U = space.scaled(A @ U, more[..., None, :])
            else:
                before, e = None, None
                if first.A is not None:
                    before, e = space.xp.frexp(A * first.A)
                    e = first.e + second.e + wide(e)
                more = second.e[..., None, None]
                U = space.scaled(A[..., None, None] * wide(first.U), more)
            return self.fill(before, e, U + wide(second.U))

    def transposed(self, A: Any, e: Any) -> tuple[Any, Any]:
        """The transpose of a transition."""
        if self.rule == "linear":
            return A, e
        return balanced(self.space, self.space.wide(A).swapaxes(-1, -2), e)


@dataclass(frozen=True)
class Map:
    """A and U in the memory of one message.

    A stands for A * 2^e: e has one number for the A of a head, or for each column of it.
    """

    e: Any
    A: Any  # None where U is the state itself
    U: Any
    raw: Any


def balanced(space: Space, x: Any, e: Any = None) -> tuple[Any, Any]:
    """Matrices y and exponents f of their columns, so that y * 2^f is x with its rows times 2^e.

    The largest number of a column of y is from .5 to 1.
    """
    xp = space.xp
    _, own = xp.frexp(x)
    rows = space.wide(own)
    if e is not None:
        rows = rows + e[..., None]
    f = xp.amax(xp.where(x == 0, LEAST, rows), -2)
    f = xp.where(f == LEAST, 0.0, f)
    shift = -f[..., None, :] + (0 if e is None else e[..., None])
    return space.scaled(x, shift), f


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
