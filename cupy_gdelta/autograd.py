"""Both rules as operators of torch, which its autograd, compiler and checkpoints know.

``torch.ops.cupy_gdelta.forward`` and ``backward`` run what NumPy and CuPy arrays run, on the memory
of the tensors. Saved for the backward pass are the inputs alone. Imported at the first call that
needs it; nothing else in the package imports torch.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from . import api, grad, problem

NAMES = {"linear": "gated_linear_attention", "delta": "gated_delta_rule"}
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? gate, Tensor? log_gate, Tensor? beta, "
    "Tensor? initial_state, Tensor? cu_seqlens, int[]? ends"
)
_OPTIONS = "str rule, float scale, bool qk_l2norm, str precision"
_GRADIENTS = ("q", "k", "v", "gate", "log_gate", "beta", "initial_state")


def call(
    name: str,
    rule: str,
    q,
    k,
    v,
    gate,
    beta,
    *,
    log_gate,
    initial_state,
    cu_seqlens,
    scale,
    return_state,
    precision,
    out=None,
    qk_l2norm=False,
) -> Any:
    """y, and the final state where asked for, differentiable.

    Under autocast q, k and v are brought to its dtype; gates, betas and states never are.
    """
    tensors = _autocast((q, k, v, gate, log_gate, beta, initial_state))
    ends = None
    if not torch.compiler.is_compiling():
        q, k, v, gate, log_gate, beta, initial_state = map(_plain, tensors)
        options = {"log_gate": log_gate, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        options |= {"scale": scale, "qk_l2norm": qk_l2norm, "precision": precision}
        p = problem.check(name, rule, q, k, v, gate, beta, return_state=return_state, **options)
        scale, qk_l2norm, return_state = p.scale, p.qk_l2norm, p.return_state
        if isinstance(p.cu_seqlens, np.ndarray):
            cu_seqlens, ends = None, p.cu_seqlens.tolist()
    elif cu_seqlens is not None and not isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens, ends = None, [operator.index(x) for x in cu_seqlens]
    y, state = torch.ops.cupy_gdelta.forward(
        *tensors, cu_seqlens, ends, rule, float(scale), qk_l2norm, precision, return_state
    )
    return (y, state) if return_state else y


def _plain(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _autocast(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    kind = "cuda" if tensors[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    narrow = torch.get_autocast_dtype(kind)

    def cast(x: Any, dtype: torch.dtype) -> Any:
        floats = (torch.float16, torch.bfloat16, torch.float32)
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in floats else x

    q_k_v = [cast(x, narrow) for x in tensors[:3]]
    return *q_k_v, *(cast(x, torch.float32) for x in tensors[3:])


def _check(suffix, tensors, cu_seqlens, ends, rule, scale, qk_l2norm, precision, **more):
    """The problem that the public function would pose."""
    q, k, v, gate, log_gate, beta, initial_state = map(_plain, tensors)
    options = {"scale": scale, "qk_l2norm": qk_l2norm, "precision": precision}
    options |= {"log_gate": log_gate, "initial_state": initial_state}
    options["cu_seqlens"] = ends if cu_seqlens is None else cu_seqlens
    return problem.check(NAMES[rule] + suffix, rule, q, k, v, gate, beta, **options, **more)


@torch.library.custom_op(
    "cupy_gdelta::forward",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}, bool return_state) -> (Tensor, Tensor)",
)
def forward(
    q,
    k,
    v,
    gate,
    log_gate,
    beta,
    initial_state,
    cu_seqlens,
    ends,
    rule,
    scale,
    qk_l2norm,
    precision,
    return_state,
):
    tensors = (q, k, v, gate, log_gate, beta, initial_state)
    options = (cu_seqlens, ends, rule, scale, qk_l2norm, precision)
    found = api.forward(_check("", tensors, *options, return_state=return_state))
    return found if return_state else (found, _nothing(v))


@forward.register_fake
def _(
    q,
    k,
    v,
    gate,
    log_gate,
    beta,
    initial_state,
    cu_seqlens,
    ends,
    rule,
    scale,
    qk_l2norm,
    precision,
    return_state,
):
    y = v.new_empty(v.shape)
    if not return_state:
        return y, _nothing(v)
    if ends is not None:
        count = len(ends) - 1
    else:
        count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return y, v.new_empty((count, v.shape[2], q.shape[3], v.shape[3]), dtype=wide)


def _nothing(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((0,), dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.ends, ctx.rule, ctx.scale, ctx.qk_l2norm, ctx.precision, ctx.state = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, dstate):
    if not ctx.state:
        dstate = None
    nothing = (None,) * 7  # for what is no tensor that floats
    if dy is None and dstate is None:
        return *(None,) * len(_GRADIENTS), *nothing
    saved = ctx.saved_tensors  # once: under a checkpoint each look at it computes them
    options = (ctx.rule, ctx.scale, ctx.qk_l2norm, ctx.precision)
    found = torch.ops.cupy_gdelta.backward(dy, dstate, *saved, ctx.ends, *options)
    grads = zip(found, saved[:-1], ctx.needs_input_grad, strict=False)
    return *(x if needed and given is not None else None for x, given, needed in grads), *nothing


forward.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op(
    "cupy_gdelta::backward",
    mutates_args=(),
    schema=f"(Tensor? dy, Tensor? dstate, {_INPUTS}, {_OPTIONS}) -> "
    f"({', '.join(['Tensor'] * len(_GRADIENTS))})",
)
def backward(
    dy,
    dstate,
    q,
    k,
    v,
    gate,
    log_gate,
    beta,
    initial_state,
    cu_seqlens,
    ends,
    rule,
    scale,
    qk_l2norm,
    precision,
):
    tensors = (q, k, v, gate, log_gate, beta, initial_state)
    options = (cu_seqlens, ends, rule, scale, qk_l2norm, precision)
    starts = {"dy": _plain(dy), "dstate": _plain(dstate)}
    found = grad.backward(_check("_grad", tensors, *options, backward=True, **starts))
    grads = found._asdict() | {"log_gate": None}
    if log_gate is not None:
        grads |= {"gate": None, "log_gate": found.gate}
    return tuple(_nothing(v) if grads[name] is None else grads[name] for name in _GRADIENTS)


@backward.register_fake
def _(dy, dstate, *inputs):
    tensors, v = inputs[: len(_GRADIENTS)], inputs[2]
    return tuple(_nothing(v) if x is None else x.new_empty(x.shape) for x in tensors)


def _refuse(ctx, *grads):
    raise TypeError(f"{ctx.name}: second derivatives are not computed")


def _name(ctx, inputs, output) -> None:
    ctx.name = f"{NAMES[inputs[11]]}_grad"


backward.register_autograd(_refuse, setup_context=_name)
