"""The backward pass over many ranks: the same chains, walked from the last rank to the first.

The gradient G of a state goes back through a piece as

    G_before = A^T G_after + U'

with the A of scan, and U' what the piece's own dy and final states make of it. So it takes the same
scan over the same chains reversed.
"""

from __future__ import annotations

from typing import Any

from .. import arrays
from ..arrays import View
from ..gradients import Gradients
from .local import plain
from .run import Call, Trace
from .scan import Map, Scan


def backward(call: Call, dy: View | None, dstate: View | None) -> Gradients:
    """Gradients of this rank's inputs, in the caller's library; None for those not given."""
    p, part, trace = call.p, call.part, call.trace
    assert trace is not None
    if dy is None:
        dy = call.space.zeros(p.v.shape, p.dtype)
    rows = _final(call, dstate)
    through = bool(call.pieces.through[call.link.rank])
    entered = step = None
    if through:
        step = _step(call, trace, dy)
    elif part.entering:
        entered = _entered(call, trace, dy, rows.array[: call.pieces.together])
        step = call.form.fill(None, None, arrays.take(entered.initial_state).array)
    chains = trace.outgoing[::-1], trace.incoming[::-1]
    after = Scan(call.link, call.form, *chains, step).finish()
    if through:
        entered = _entered(call, trace, dy, after)
    own = _own(call, trace, dy, rows, after)
    return _joined(call, trace, entered, own)


def _final(call: Call, dstate: View | None) -> View:
    """The gradients of the final states that are found here, from the rank that was given these."""
    p, link, space = call.p, call.link, call.space
    first, stop = call.pieces.finished(link.rank)
    last = link.size - 1
    if not p.return_state:
        return space.zeros((stop - first, p.H, p.K, p.V), p.state_dtype)
    if not call.everywhere and link.rank != last:
        found = call.states(stop - first)
        link.exchange([], [(call.raw(found), last)] if stop > first else [])()
        return found
    every = call.states(p.N)
    arrays.fill(every, 0.0 if dstate is None else dstate)
    if call.everywhere:
        link.total(every.array)
    else:
        bounds = [(r, *call.pieces.finished(r)) for r in range(last)]
        link.exchange([(call.raw(every, a, b), r) for r, a, b in bounds if b > a], [])()
    return arrays.take(plain(every)[first:stop])


def _step(call: Call, trace: Trace, dy: View) -> Map:
    """What all tokens of this rank do to the gradient of a state."""
    p, local = call.p, call.local
    if p.rule == "linear":
        U = local.read_by(dy, trace.seen)
    else:
        zero = call.space.zeros((p.B, p.H, p.K, p.V), p.state_dtype)
        U = arrays.take(local.grad(0, trace.seen, dy, zero, None).initial_state).array
    step = trace.step
    if step is None or step.A is None:
        return call.form.fill(None, None, U)
    return call.form.fill(*call.form.transposed(step.A, step.e), U)


def _entered(call: Call, trace: Trace, dy: View, after: Any) -> Gradients:
    """Gradients of the tokens that entered; ``after`` is that of the state after them."""
    view = call.space.view
    return call.local.grad(0, call.part.entering, dy, view(trace.before), view(after))


def _own(call: Call, trace: Trace, dy: View, rows: View, after: Any) -> Gradients | None:
    """Gradients of the tokens of sequences that start here."""
    p, part = call.p, call.part
    if part.first == part.last and part.entering == p.T:
        return None
    final = call.states(part.last - part.first)
    mine = rows.array[call.pieces.together * bool(part.entering) :]
    final.array[: len(mine)] = mine
    if part.leaves:
        final.array[len(mine) :] = after
    return call.local.grad(part.entering, p.T, dy, trace.initial, final, part.offsets)


def _joined(
    call: Call, trace: Trace, entered: Gradients | None, own: Gradients | None
) -> Gradients:
    """Gradients of all tokens of this rank, and of the initial states that it was given."""
    p, at = call.p, call.part.entering
    found = {}
    for label in ("q", "k", "v", "gate", "beta"):
        given = getattr(p, label)
        if given is None:
            continue
        whole = arrays.empty(p.v, given.shape, given.dtype)
        for part, some in ((entered, slice(0, at)), (own, slice(at, p.T))):
            if part is not None:
                whole.array[:, some] = arrays.take(getattr(part, label)).array
        found[label] = whole.owner
    found["initial_state"] = _initial(call, None if own is None else own.initial_state)
    return Gradients(*(found.get(label) for label in Gradients._fields))


def _initial(call: Call, own: Any) -> Any:
    """The gradient of the initial states, on the ranks that were given them."""
    p, link, part = call.p, call.link, call.part
    if call.spread and link.rank:
        rows = [(call.raw(arrays.take(own)), 0)] if part.last > part.first else []
        link.exchange(rows, [])()
        return None
    if p.initial_state is None:
        return None
    every = call.space.zeros((p.N, p.H, p.K, p.V), p.state_dtype)
    if own is not None:
        every.array[part.first : part.last] = arrays.take(own).array
    if call.spread:
        bounds = zip(call.pieces.first.tolist(), call.pieces.last.tolist(), strict=True)
        rows = [(call.raw(every, a, b), r) for r, (a, b) in enumerate(bounds) if r and b > a]
        link.exchange([], rows)()
    return every.owner
