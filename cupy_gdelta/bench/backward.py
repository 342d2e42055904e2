"""The contenders with gradients: each computes y, then the gradients of q, k and v from dy.

``call`` does both with the dy of the inputs, ``gradients`` the same with a dy of which the sample
that is compared with float64 needs no more than it holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .. import grad
from . import peers
from .peers import FOLDED, FUNCTIONS, Contender, Unavailable
from .shapes import Inputs

GRADS = {
    "linear": grad.gated_linear_attention_grad,
    "delta": grad.gated_delta_rule_grad,
}


def ours(inputs: Inputs, precision: str) -> Contender:
    forward, backward = FUNCTIONS[inputs.rule], GRADS[inputs.rule]

    def both(dy: Any) -> Any:
        forward(*inputs.arrays, precision=precision)
        return backward(dy, *inputs.arrays, precision=precision)

    def gradients() -> Any:
        return _samples(inputs, both(inputs.early_dy), False)

    return Contender(lambda: both(inputs.dy), gradients=gradients)


def fla(inputs: Inputs) -> Contender:
    """flash-linear-attention's Triton kernels, kept from handing the delta rule to FlashQLA."""
    os.environ["FLA_FLASH_QLA"] = "0"
    if inputs.rule == "linear":
        from fla.ops.simple_gla import chunk_simple_gla

        values = inputs.values(inputs.beta)
        tensors = dict(zip("qkvg", map(peers.as_torch, _with_v(inputs, values)), strict=True))
        return _on_torch(inputs, chunk_simple_gla, tensors, FOLDED)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return _on_torch(inputs, chunk_gated_delta_rule, peers._delta_tensors(inputs))


def flash_qla(inputs: Inputs) -> Contender:
    """FlashQLA's TileLang kernels."""
    shape = inputs.shape
    if (shape.K, shape.V) != (128, 128) or shape.dtype not in ("float16", "bfloat16"):
        raise Unavailable("16 bits and K = V = 128 only")
    from flash_qla import chunk_gated_delta_rule

    return _on_torch(inputs, chunk_gated_delta_rule, peers._delta_tensors(inputs))


def jla(inputs: Inputs) -> Contender:
    """jax-linear-attention's Mosaic GPU kernels."""
    forward, arrays, jax, note = peers.jla_call(inputs)

    def both(arrays: Any, dy: Any) -> Any:
        y, back = jax.vjp(forward, *arrays)
        return y, back(dy)

    compiled = jax.jit(both)
    dy, early = peers._jax(inputs.dy), peers._jax(inputs.early_dy)
    linear = inputs.rule == "linear"

    def gradients() -> Any:
        return _samples(inputs, compiled(arrays, early)[1], linear)

    return Contender(
        lambda: compiled(arrays, dy), wait=jax.block_until_ready, note=note, gradients=gradients
    )


def _with_v(inputs: Inputs, v: Any) -> tuple[Any, ...]:
    return inputs.q, inputs.k, v, inputs.log_gate


def _on_torch(
    inputs: Inputs, function: Callable[..., Any], tensors: dict[str, Any], note: str = ""
) -> Contender:
    import torch

    dy, early = peers.as_torch(inputs.dy), peers.as_torch(inputs.early_dy)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}

    def both(dy: Any) -> Any:
        y = function(**leaves, scale=1.0)[0]
        return torch.autograd.grad(y, tuple(leaves.values()), dy)

    def gradients() -> Any:
        return _samples(inputs, both(early), bool(note))

    return Contender(lambda: both(dy), note=note, gradients=gradients)


def _samples(inputs: Inputs, grads: Any, folded: bool) -> Any:
    """Of the gradients of q, k and v, the latter perhaps multiplied by beta beforehand."""
    q, k, v = map(inputs.sample, grads[:3])
    return q, k, v * inputs.sample(inputs.beta)[..., None] if folded else v


PEERS: dict[str, dict[str, Callable[[Inputs], Contender]]] = {
    "linear": {"fla": fla, "jla": jla},
    "delta": {"fla": fla, "flash_qla": flash_qla, "jla": jla},
}
