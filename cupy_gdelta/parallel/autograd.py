"""torch's way through a call over many ranks, and back."""

from __future__ import annotations

from typing import Any

import torch

from .. import arrays
from . import back, enter
from .run import Call


def apply(call: Call, given: dict[str, Any]) -> tuple[Any, Any]:
    """y and the final states as functions of the caller's tensors."""
    gate = given["gate"] if given["log_gate"] is None else given["log_gate"]
    rest = (given["q"], given["k"], given["v"], gate, given["beta"], given["initial_state"])
    return Rule.apply(call, *rest)


class Rule(torch.autograd.Function):
    """y, state = rule(q, k, v, gate, beta, initial_state), on every rank."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Any) -> tuple[Any, Any]:
        ctx.call = call
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return enter.run(call)

    @staticmethod
    def backward(ctx: Any, dy: Any, dstate: Any) -> tuple[Any, ...]:
        # Looking at what was saved raises where an input has been overwritten.
        return None, *Gradients.apply(ctx.call, dy, dstate, *ctx.saved_tensors)


class Gradients(torch.autograd.Function):
    """The gradients of rule's inputs, which have no derivatives themselves."""

    @staticmethod
    def forward(ctx: Any, call: Call, dy: Any, dstate: Any, *inputs: Any) -> tuple[Any, ...]:
        ctx.name = call.p.name
        views = (None if x is None else arrays.take(x.detach()) for x in (dy, dstate))
        with call.space.current():
            return tuple(back.backward(call, *views))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise TypeError(f"{ctx.name}_grad: second derivatives are not computed")
