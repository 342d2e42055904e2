"""Decode: shapes of one token a call, their inputs and contenders, and what calls cost the host.

The floor counts the state read once and written once beside the inputs and y.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import step
from ..arrays import ITEMSIZE
from . import peers, shapes, timing
from .peers import Contender, Unavailable

STEPS: dict[str, Callable[..., Any]] = {
    "linear": step.gated_linear_attention_step,
    "delta": step.gated_delta_rule_step,
}
CALLS = 10_000  # for the cost of a call on the host, in so many parts:
PARTS = 10


@dataclass(frozen=True)
class StepShape(shapes.Shape):
    """One token for each of B sequences; ``state`` is the dtype that their states are kept in."""

    state: str = "float32"

    @property
    def moved(self) -> int:
        """Bytes of the states read and written once, of the inputs and of y."""
        states = self.B * self.H * self.K * self.V * ITEMSIZE[self.state]
        return 2 * states + super().moved


NAMED = {
    f"decode{B}{suffix}": StepShape(
        f"decode{B}{suffix}", B, 1, 32, 128, 128, "bfloat16", state=state
    )
    for state, suffix in (("float32", ""), ("bfloat16", "_bf16"))
    for B in (1, 64, 256)
}


@dataclass(frozen=True)
class StepInputs:
    """The CuPy arrays of a step, and how a part of y is compared with float64."""

    rule: str
    shape: StepShape
    q: Any  # [B, H, K], like k
    k: Any
    v: Any  # [B, H, V]
    gate: Any  # [B, H], like beta
    beta: Any
    state: Any  # [B, H, K, V], before the step; every contender has a copy of its own

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.gate, self.beta

    def sample(self, x: Any) -> np.ndarray:
        """The first and the last head of x [B, H, ...] or [B, 1, H, ...], in float64."""
        if len(x.shape) == 4 and x is not self.state:
            x = x[:, 0]
        ends = sorted({(0, 0), (self.shape.B - 1, self.shape.H - 1)})
        return np.stack([shapes.host(x[b, h]) for b, h in ends])[:, None, None]

    @cached_property
    def expected(self) -> np.ndarray:
        state = self.sample(self.state)[:, 0]  # [2, 1, K, V]
        loop = shapes.LOOPS[self.rule]
        return loop(*map(self.sample, self.arrays), initial_state=state)[0]


def make(rule: str, shape: StepShape) -> StepInputs:
    """Inputs as :func:`.shapes.make` makes them, and states of order 1."""
    import cupy

    x = shapes.make(rule, shape)
    sizes = (shape.B, shape.H, shape.K, shape.V)
    rng = cupy.random.default_rng(1)
    state = rng.standard_normal(sizes, dtype=cupy.float32).astype(shapes.kind(shape.state))
    q, k, v, gate, beta = (a[:, 0] for a in x.arrays)
    return StepInputs(rule, shape, q, k, v, gate, beta, state)


def ours(inputs: StepInputs) -> Contender:
    """This library on CuPy arrays; a graph needs an output of its own."""
    import cupy

    state, out = inputs.state.copy(), cupy.empty_like(inputs.v)
    function = STEPS[inputs.rule]

    def capture() -> Any:
        found = timing.cupy_graph(lambda: function(*inputs.arrays, state, out=out))
        state[...] = inputs.state  # which warming up has changed
        return found

    return Contender(lambda: function(*inputs.arrays, state), capture)


def on_torch(inputs: StepInputs) -> Contender:
    """This library on torch tensors."""
    function = STEPS[inputs.rule]
    tensors, state = (
        [peers.as_torch(x) for x in inputs.arrays],
        peers.as_torch(inputs.state).clone(),
    )
    return _on_torch(lambda: function(*tensors, state), inputs, state)


def fla(inputs: StepInputs) -> Contender:
    """flash-linear-attention's recurrent Triton kernels, which write states to new memory."""
    if inputs.shape.state != "float32":
        raise Unavailable("states in float32 only")
    values = inputs.v
    if inputs.rule == "linear":
        from fla.ops.simple_gla import fused_recurrent_simple_gla as function

        values = (inputs.v.astype("float32") * inputs.beta[..., None]).astype(inputs.v.dtype)
    else:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as function

    arrays = {"q": inputs.q, "k": inputs.k, "v": values, "g": np.log(inputs.gate)}
    arrays |= {} if inputs.rule == "linear" else {"beta": inputs.beta}
    tensors = {name: peers.as_torch(x)[:, None] for name, x in arrays.items()}
    state = peers.as_torch(inputs.state)

    def call() -> Any:
        return function(**tensors, scale=1.0, initial_state=state, output_final_state=True)[0]

    return _on_torch(call, inputs, state, peers.FOLDED if inputs.rule == "linear" else "")


def flashinfer(inputs: StepInputs) -> Contender:
    """FlashInfer's decode kernel, states kept as [V, K]; gate and beta go in as logits."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as function

    if inputs.shape.dtype not in ("float16", "bfloat16"):
        raise Unavailable("16 bits only")
    logits = [np.log(1 / inputs.gate - 1), -np.log(1 / inputs.beta - 1)]
    narrow = [x.astype(inputs.q.dtype) for x in logits]  # as it wants them
    q, k, v, a, b = (peers.as_torch(x)[:, None] for x in (inputs.q, inputs.k, inputs.v, *narrow))
    zeros = a.new_zeros(inputs.shape.H).float()  # gate = exp(-softplus(a)) = sigmoid(-a)
    state = peers.as_torch(inputs.state).transpose(2, 3).contiguous()
    first = state.clone()

    def call() -> Any:
        return function(q, k, v, state, zeros, a, zeros, b, scale=1.0, use_qk_l2norm=False)[0]

    note = "states as [V, K]; gate and beta rounded to 16 bits as logits"
    return _on_torch(call, inputs, state, note, first)


PEERS: dict[str, Callable[[StepInputs], Contender]] = {"fla": fla, "flashinfer": flashinfer}


def contenders(rule: str, with_peers: bool) -> dict[str, Callable[[Any], Contender]]:
    found: dict[str, Callable[[Any], Contender]] = {"cupy_gdelta": ours}
    if with_peers:
        found |= {"cupy_gdelta, torch": on_torch, **PEERS}
        if rule == "linear":
            del found["flashinfer"]
    return found


def _on_torch(
    call: timing.Call, inputs: StepInputs, state: Any, note: str = "", first: Any = None
) -> Contender:
    def capture() -> Any:
        found = timing.torch_graph(call)
        state.copy_(peers.as_torch(inputs.state) if first is None else first)
        return found

    return Contender(call, capture, note=note)


def host_costs(with_peers: bool = False) -> list[dict[str, Any]]:
    """Microseconds that a call costs the host at B = 1, the median of ten parts of 10,000 calls.

    Of this library on arrays of CuPy and of torch, and of the peers that can be called.
    """
    import cupy

    rows = []
    for rule in STEPS:
        inputs = make(rule, NAMED["decode1"])
        makers: dict[str, Callable[[StepInputs], Contender]] = {"CuPy": ours, "torch": on_torch}
        if with_peers:
            makers |= {name: PEERS[name] for name in PEERS if name in contenders(rule, True)}
        for name, maker in makers.items():
            try:
                call = maker(inputs).call
                call()
            except Exception as trouble:  # a peer may raise what it likes
                if name in PEERS or isinstance(trouble, ModuleNotFoundError):
                    continue
                raise
            rows.append({"rule": rule, "array": name, "us": _host_us(call, cupy.cuda.Device())})
    return rows


def _host_us(call: timing.Call, device: Any) -> float:
    took = []
    call()
    for _ in range(PARTS):
        device.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS // PARTS):
            call()
        took.append(1e6 * (time.perf_counter() - begin) / (CALLS // PARTS))
    return float(np.median(took))
