"""The contenders: each makes, from the same inputs, a call that computes y, or says why it cannot.

What a peer wants in another form (logarithms of gates, values that beta has multiplied) is made
before its call and not timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import api, programs
from . import timing
from .shapes import Inputs

FOLDED = "beta folded into v beforehand"
FUNCTIONS = {"linear": api.gated_linear_attention, "delta": api.gated_delta_rule}


class Unavailable(Exception):
    """The contender does not take these inputs; the text is the reason."""


@dataclass(frozen=True)
class Contender:
    """A call that returns y, and how it is captured and timed.

    Parameters
    ----------
    call : callable
        Returns y [B, T, H, V], an array of any library that :mod:`.shapes` can read.
    capture : callable, optional
        Returns a replay of a graph of one call, and the y that it writes.
    wait : callable, optional
        Waits for what calls return; calls are then timed back to back.
    note : str
        What a reader of the figures must know.
    gradients : callable, optional
        Returns samples of the gradients of q, k and v, of contenders that call for gradients.
    """

    call: timing.Call
    capture: Callable[[], tuple[timing.Call, Any]] | None = None
    wait: Callable[[Any], Any] | None = None
    note: str = ""
    gradients: Callable[[], tuple[Any, Any, Any]] | None = None


def ours(inputs: Inputs, precision: str) -> Contender:
    """This library; a graph needs an output of its own."""
    import cupy

    function = FUNCTIONS[inputs.rule]
    out = cupy.empty(inputs.v.shape, inputs.v.dtype)
    options = {"precision": precision, **inputs.options}

    def captured() -> Any:
        return function(*inputs.arrays, out=out, **options)

    return Contender(
        lambda: function(*inputs.arrays, **options), lambda: timing.cupy_graph(captured)
    )


def user_kernel(inputs: Inputs) -> Contender:
    """examples/user_kernel.cu, one thread for each column of the state."""
    import cupy

    shape = inputs.shape
    if shape.dtype != "float32" or shape.K != shape.V or shape.Hq:
        raise Unavailable("float32, K = V and H = Hq only")
    code = (programs.folder() / "user_kernel.cu").read_text(encoding="utf-8")
    module = cupy.RawModule(code=code, options=(f"-DHEAD_DIM={shape.K}",))
    kernel = module.get_function("user_recurrence")
    y = cupy.empty_like(inputs.v)
    arguments = (*inputs.arrays, y, np.int32(shape.T), np.int32(shape.H))

    def call() -> Any:
        kernel((shape.B * shape.H,), (shape.K,), arguments)
        return y

    return Contender(call, lambda: timing.cupy_graph(call))


def fla(inputs: Inputs) -> Contender:
    """flash-linear-attention's Triton kernels, kept from handing the delta rule to FlashQLA."""
    os.environ["FLA_FLASH_QLA"] = "0"
    if inputs.rule == "linear":
        from fla.ops.simple_gla import chunk_simple_gla

        values = inputs.values(inputs.beta)
        q, k, v, g = map(as_torch, (*inputs.repeated, values, inputs.log_gate))
        call = lambda: chunk_simple_gla(q, k, v, g=g, scale=1.0)[0]  # noqa: E731
        return _on_torch(call, _note(inputs, FOLDED))
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    tensors = _delta_tensors(inputs)
    return _on_torch(lambda: chunk_gated_delta_rule(**tensors, scale=1.0)[0])


def flash_qla(inputs: Inputs) -> Contender:
    """FlashQLA's TileLang kernels."""
    shape = inputs.shape
    if (shape.K, shape.V) != (128, 128) or shape.dtype not in ("float16", "bfloat16"):
        raise Unavailable("16 bits and K = V = 128 only")
    from flash_qla import chunk_gated_delta_rule

    tensors = _delta_tensors(inputs)
    return _on_torch(lambda: chunk_gated_delta_rule(**tensors, scale=1.0)[0])


def mamba_ssm(inputs: Inputs) -> Contender:
    """Mamba-2's SSD: a step of length -log(gate) under A = -1 decays by the gate."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    step = -inputs.log_gate
    values = inputs.values(inputs.beta / step)  # SSD multiplies its input by the step
    C, B, x, dt = map(as_torch, (*inputs.repeated, values, step))
    A = -dt.new_ones(inputs.shape.H)
    return _on_torch(
        lambda: mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size=256),
        _note(inputs, "beta and the step folded into v beforehand"),
    )


def jla(inputs: Inputs) -> Contender:
    """jax-linear-attention's Mosaic GPU kernels."""
    forward, arrays, jax, note = jla_call(inputs)
    compiled = jax.jit(forward)
    return Contender(lambda: compiled(*arrays), wait=jax.block_until_ready, note=note)


def jla_call(inputs: Inputs) -> tuple[Callable[..., Any], list[Any], Any, str]:
    """y as a function of arrays, these arrays, jax itself, and what a reader must know."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU is shared here
    import jax
    from jla.ops import linear_attention

    linear = inputs.rule == "linear"
    values = inputs.values(inputs.beta) if linear else inputs.v
    gates = {"g": inputs.log_gate} if linear else {"g": inputs.log_gate, "beta": inputs.beta}
    kind = "simple_gla" if linear else "gated_deltanet"

    def forward(q: Any, k: Any, v: Any, gates: dict[str, Any]) -> Any:
        return linear_attention(kind, q, k, v, **gates, scale=1.0, impl="mosaic_gpu")[0]

    arrays = [_jax(x) for x in (*inputs.repeated, values)]
    arrays.append({name: _jax(x) for name, x in gates.items()})
    note = "back-to-back jitted calls, no L2 flush"
    return forward, arrays, jax, _note(inputs, f"{FOLDED}; {note}" if linear else note)


LOCAL: dict[str, dict[str, Callable[[Inputs], Contender]]] = {
    "linear": {"user_kernel.cu": user_kernel},
    "delta": {},
}
PEERS: dict[str, dict[str, Callable[[Inputs], Contender]]] = {
    "linear": {"fla": fla, "mamba_ssm": mamba_ssm, "jla": jla},
    "delta": {"fla": fla, "flash_qla": flash_qla, "jla": jla},
}


def _delta_tensors(inputs: Inputs) -> dict[str, Any]:
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    arrays |= {"g": inputs.log_gate, "beta": inputs.beta}
    return {name: as_torch(x) for name, x in arrays.items()}


def _note(inputs: Inputs, note: str) -> str:
    """What a reader must know of a peer that needs a head of q and k for each of v."""
    return f"q and k repeated beforehand; {note}" if inputs.shape.Hq else note


def _on_torch(call: timing.Call, note: str = "") -> Contender:
    return Contender(call, lambda: timing.torch_graph(call), note=note)


def as_torch(x: Any) -> Any:
    """A torch tensor that shares the memory of a CuPy array."""
    import torch

    if x.dtype.name != "bfloat16":
        return torch.from_dlpack(x)
    return torch.from_dlpack(x.view("int16")).view(torch.bfloat16)


def _jax(x: Any) -> Any:
    """A JAX array of a CuPy array, finished before, since JAX has streams of its own."""
    import cupy
    import jax

    cupy.cuda.Device().synchronize()
    if x.dtype.name != "bfloat16":
        return jax.dlpack.from_dlpack(x)
    return jax.dlpack.from_dlpack(x.view("uint16")).view(jax.numpy.bfloat16)
