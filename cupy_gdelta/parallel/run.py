"""One sequence over many ranks: the order of the work and of the messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import View
from ..problem import Problem
from .links import Link
from .local import Local, plain
from .pieces import Pieces
from .reach import decay, reach
from .scan import Form, Map, Scan
from .spaces import Space


class Trace(NamedTuple):
    """What the forward pass leaves to the backward one."""

    seen: int  # tokens that see the state before them
    incoming: list[int]  # the chains, see Pieces.chain
    outgoing: list[int]
    initial: View | None  # of the sequences that start here
    before: Any  # the state that entered
    step: Map | None  # what all that entered do to it


@dataclass
class Call:
    """What all ranks have agreed on, as one of them sees it; ``p.N`` counts all sequences."""

    link: Link
    p: Problem
    pieces: Pieces
    spread: bool  # whether rank 0 alone has the initial states, and others need some of them
    everywhere: bool  # whether all ranks get the final states
    differentiable: bool  # whether a backward pass may follow

    def __post_init__(self) -> None:
        self.trace: Trace | None = None
        self.space = Space(self.p.v)
        self.local = Local(self.p, self.space)
        self.part = self.pieces.part(self.link.rank)
        self.form = Form.of(self.space, self.p, self.pieces.together)

    def forward(self, y: View) -> View | None:
        """Write y of this rank's tokens; the final states where they are asked for."""
        rank, part, through = self.link.rank, self.part, self.pieces.through[self.link.rank]
        seen, dead = reach(self.p, self.space, part.entering)
        gone = self._gone(dead)
        incoming, outgoing = (self.pieces.chain(rank, gone, leaving=x) for x in (False, True))
        initial = self._initial()
        own = self._own(initial, y)
        entered = step = None
        if through:
            entered, step = self._from_zero(dead, y)
        piece = step
        if part.leaves and not through:
            piece = self.form.fill(None, None, own.array[-self.pieces.together :])
        scan = Scan(self.link, self.form, incoming, outgoing, piece)
        if part.entering and not through and (dead or self.local.adds):
            entered, step = self._from_zero(dead, y)
        before = scan.finish()
        if part.entering:
            entered = self._correct(seen, before, entered, step, y)
        if self.differentiable:
            self.trace = Trace(seen, incoming, outgoing, initial, before, step)
        return self._deliver(entered, own) if self.p.return_state else None

    def _gone(self, dead: bool) -> np.ndarray:
        """Which ranks leave nothing of the state before them; asked where that could matter."""
        if not self.pieces.through.any():
            return np.zeros(self.link.size, bool)
        return np.array([x == b"\1" for x in self.link.gather(bytes([dead]))])

    def _initial(self) -> View | None:
        """The initial states of the sequences that start here."""
        p, part = self.p, self.part
        if not self.spread:
            if p.initial_state is None:
                return None
            return arrays.take(plain(p.initial_state)[part.first : part.last])
        if self.link.rank:
            found = self.states(part.last - part.first)
            self.link.exchange([], [(self.raw(found), 0)] if part.last > part.first else [])()
            return found
        every = self.states(p.N)
        assert p.initial_state is not None
        arrays.fill(every, p.initial_state)
        bounds = zip(self.pieces.first.tolist(), self.pieces.last.tolist(), strict=True)
        rows = [(self.raw(every, a, b), r) for r, (a, b) in enumerate(bounds) if r and b > a]
        self.link.exchange(rows, [])()
        return arrays.take(plain(every)[part.first : part.last])

    def _own(self, initial: View | None, y: View) -> View:
        """Run the sequences that start here; their last states here."""
        part = self.part
        if part.first == part.last and part.entering == self.p.T:
            return self.states(0)
        return self.local.run(part.entering, self.p.T, initial, y, part.offsets)

    def _from_zero(self, dead: bool, y: View) -> tuple[View, Map]:
        """Run the tokens that enter without the state before them; what they do to a state."""
        p, tokens = self.p, self.part.entering
        after = self.local.run(0, tokens, None, y)
        if dead:
            return after, self.form.fill(None, None, after.array)
        linear = p.rule == "linear"
        A, e = decay(p, self.space, tokens) if linear else self.local.transition(tokens)
        return after, self.form.fill(A, e, after.array)

    def _correct(
        self, seen: int, before: Any, entered: View | None, step: Map | None, y: View
    ) -> View:
        """Let the first tokens see the state before them; the state after all that entered."""
        dead = step is not None and step.A is None
        if entered is None or step is None or not self.local.adds:
            after = self.local.run(0, seen, self.space.view(before), y)
            return entered if entered is not None and dead else after
        self.local.add(seen, before, y)
        if dead:
            return entered
        return self.space.view(self.form.after(self.form.fill(None, None, before), step).U)

    def _deliver(self, entered: View | None, own: View) -> View | None:
        """The final states of all sequences, on the last rank or everywhere."""
        last = self.link.size - 1
        first, stop = self.pieces.finished(self.link.rank)
        parts = [own.array]
        if entered is not None and not self.pieces.through[self.link.rank]:
            parts.insert(0, entered.array)
        mine, at = self.states(stop - first), 0
        for x in parts:
            count = min(len(x), stop - first - at)  # the last states of own may go on
            mine.array[at : at + count] = x[:count]
            at += count
        if self.link.rank == last:
            every = self.states(self.p.N)
            every.array[first:stop] = mine.array
            bounds = [(r, *self.pieces.finished(r)) for r in range(last)]
            rows = [(self.raw(every, a, b), r) for r, a, b in bounds if b > a]
            self.link.exchange([], rows)()
        else:
            self.link.exchange([(self.raw(mine), last)] if stop > first else [], [])()
            if not self.everywhere:
                return None
            every = self.states(self.p.N)
        if self.everywhere:
            self.link.broadcast(self.raw(every), last)
        return every

    def states(self, count: int) -> View:
        p = self.p
        return arrays.empty(p.v, (count, p.H, p.K, p.V), p.state_dtype)

    def raw(self, states: View, start: int = 0, stop: int | None = None) -> Any:
        """Some rows of contiguous states as the bytes of a message."""
        return self.space.typed(states.array[start:stop].reshape(-1), "uint8")
