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
        ctx.save_for_backward(*inputs)  # that torch sees it when one is overwritten
        ctx.set_materialize_grads(False)
        return enter.run(call)

    @staticmethod
    def backward(ctx: Any, dy: Any, dstate: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.call.p.name}: second derivatives are not computed; "
                f"got a backward pass with create_graph=True"
            )
        ctx.saved_tensors  # noqa: B018 (raises where an input was overwritten)
        views = (None if x is None else arrays.take(x) for x in (dy, dstate))
        return None, *back.backward(ctx.call, *views)
