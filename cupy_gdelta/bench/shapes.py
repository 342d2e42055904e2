"""What is measured: shapes by name or in numbers, and their inputs, made on the GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .. import reference
from ..arrays import FLOATS, ITEMSIZE, state_dtype
from ..problem import MAX_HEAD_DIM

SAMPLE = 512  # tokens that are compared with float64
LOOPS = {"linear": reference.gated_linear_attention, "delta": reference.gated_delta_rule}
GRAD_LOOPS = {
    "linear": reference.gated_linear_attention_grad,
    "delta": reference.gated_delta_rule_grad,
}


@dataclass(frozen=True)
class Shape:
    """Sizes and dtype of q, k and v; gate and beta are float32, for float64 inputs float64."""

    name: str
    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: str
    layout: str = field(default="", kw_only=True)  # one of LAYOUTS; else dense and contiguous
    data: str = field(default="", kw_only=True)  # one of DATA; else as ``make`` says
    Hq: int = field(default=0, kw_only=True)  # heads of q and k, where they are fewer than H

    @property
    def queries(self) -> int:
        """Heads of q and k."""
        return self.Hq or self.H

    @property
    def text(self) -> str:
        return f"{self.B}, {self.T}, {self.H}, {self.K}, {self.V}, {self.dtype}"

    @property
    def wide(self) -> str:
        return state_dtype(self.dtype)

    @property
    def moved(self) -> int:
        """Bytes of q, k, v, gate and beta read once and y written once."""
        item, wide = ITEMSIZE[self.dtype], ITEMSIZE[self.wide]
        token = 2 * self.queries * self.K * item + self.H * 2 * (self.V * item + wide)
        return self.B * self.T * token

    @property
    def moved_backward(self) -> int:
        """The same, then those inputs and dy read once more and their gradients written once."""
        heads = self.B * self.T * self.H
        inputs = (2 * self.K + self.V) * ITEMSIZE[self.dtype] + 2 * ITEMSIZE[self.wide]
        return self.moved + heads * (2 * inputs + self.V * ITEMSIZE[self.dtype])


LAYOUTS = {
    "packed": "sequences of random lengths side by side, B = 1",
    "heads first": "[B, H, T, D] in memory",
    "sliced": "q, k and v out of one [B, T, 3, H, D]",
}
DATA = {
    "alike": "keys that are one vector and a little of their own",
    "lasting": "gates sigmoid(N(9, 1)), which forget nothing in a thousand tokens",
}
SEQUENCES = 64  # of a packed shape
NAMED = {
    shape.name: shape
    for shape in (
        Shape("seed24", 32, 2048, 4, 24, 24, "float32"),
        Shape("d64_fp32", 8, 4096, 16, 64, 64, "float32"),
        Shape("d64", 8, 4096, 16, 64, 64, "bfloat16"),
        Shape("d128", 2, 8192, 16, 128, 128, "bfloat16"),
        Shape("long", 1, 131072, 8, 128, 128, "bfloat16"),
        Shape("tp8", 1, 32768, 4, 128, 128, "bfloat16"),
        Shape("wide", 4, 4096, 64, 128, 128, "bfloat16"),
        Shape("packed", 1, 65536, 16, 128, 128, "bfloat16", layout="packed"),
        Shape("even", SEQUENCES, 1024, 16, 128, 128, "bfloat16"),  # beside packed
        Shape("d64_heads_first", 8, 4096, 16, 64, 64, "bfloat16", layout="heads first"),
        Shape("d64_sliced", 8, 4096, 16, 64, 64, "bfloat16", layout="sliced"),
        Shape("d128_alike", 2, 8192, 16, 128, 128, "bfloat16", data="alike"),
        Shape("d128_lasting", 2, 8192, 16, 128, 128, "bfloat16", data="lasting"),
        Shape("grouped8k", 1, 8192, 32, 128, 128, "bfloat16", Hq=16),
        Shape("grouped32k", 1, 32768, 32, 128, 128, "bfloat16", Hq=16),
        Shape("grouped4x8k", 4, 8192, 64, 128, 128, "bfloat16", Hq=16),
    )
}
USUAL = tuple(
    shape
    for shape in NAMED.values()
    if not (shape.layout or shape.data or shape.Hq or shape.name == "even")
)


def parse(text: str) -> Shape:
    """A named shape, or ``B,T,H,K,V,dtype``; ValueError says what is wrong."""
    if text in NAMED:
        return NAMED[text]
    if "," not in text:
        raise ValueError(
            f"no shape called {text}; there are {', '.join(NAMED)}, or B,T,H,K,V,dtype"
        )
    *sizes, dtype = (word.strip() for word in text.split(","))
    if len(sizes) != 5 or not all(word.isdecimal() and int(word) for word in sizes):
        raise ValueError(f"must be B,T,H,K,V,dtype with five positive numbers; got {text}")
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {', '.join(FLOATS)}; got {dtype}")
    B, T, H, K, V = map(int, sizes)
    if max(K, V) > MAX_HEAD_DIM:
        raise ValueError(f"K and V must be at most {MAX_HEAD_DIM}; got {K} and {V}")
    return Shape(",".join((*sizes, dtype)), B, T, H, K, V, dtype)


@dataclass(frozen=True)
class Inputs:
    """The CuPy arrays that every contender gets, and how a part of y is compared with float64."""

    rule: str
    shape: Shape
    q: Any  # [B, T, Hq, K], like k
    k: Any
    v: Any  # [B, T, H, V]
    gate: Any  # [B, T, H], like beta
    beta: Any

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.gate, self.beta

    @cached_property
    def cu_seqlens(self) -> np.ndarray | None:
        """Offsets of packed sequences, on the host; None where the shape is dense."""
        if self.shape.layout != "packed":
            return None
        cuts = np.random.default_rng(0).choice(self.shape.T - 1, SEQUENCES - 1, replace=False) + 1
        return np.concatenate([[0], np.sort(cuts), [self.shape.T]])

    @property
    def options(self) -> dict[str, Any]:
        """What a call of this library takes besides the arrays."""
        return {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens}

    @cached_property
    def log_gate(self) -> Any:
        return np.log(self.gate)  # which hands a CuPy array to CuPy

    @cached_property
    def repeated(self) -> tuple[Any, Any]:
        """q and k with a head for each of v, for those who need it so."""
        each = self.shape.H // self.shape.queries
        return (self.q, self.k) if each == 1 else (self.q.repeat(each, 2), self.k.repeat(each, 2))

    def values(self, factor: Any) -> Any:
        """v times ``factor`` [B, T, H], rounded to the dtype of v."""
        return (self.v.astype(self.shape.wide) * factor[..., None]).astype(self.v.dtype)

    def sample(self, x: Any) -> np.ndarray:
        """The first tokens of the first and the last head of ``x`` [B, T, H, ...], in float64.

        The recurrences are causal and heads independent: y there needs nothing else.
        """
        ends = {(0, 0), (self.shape.B - 1, self.shape.H - 1)}
        last = x.shape[2] - 1
        return np.stack([host(x[b, :SAMPLE, h and last]) for b, h in sorted(ends)])[:, :, None]

    @cached_property
    def expected(self) -> np.ndarray:
        """The sample of y as the float64 loop over time computes it, on the CPU."""
        samples = [self.sample(x) for x in self.arrays]
        options = {name: np.minimum(x, SAMPLE) for name, x in self.options.items()}
        heads = zip(*([x[i : i + 1] for i in range(len(x))] for x in samples), strict=True)
        return np.concatenate([LOOPS[self.rule](*x, **options)[0] for x in heads])

    @cached_property
    def dy(self) -> Any:
        """[B, T, H, V]: the values of another head and another time."""
        return np.roll(self.v[:, ::-1], 1, axis=2)

    @cached_property
    def early_dy(self) -> Any:
        """dy that is 0 past the sample, so that gradients there need nothing else."""
        dy = self.dy.copy()
        dy[:, SAMPLE:] = 0
        return dy

    @cached_property
    def expected_gradients(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Samples of the gradients of q, k and v from ``early_dy``."""
        dy, *arrays = map(self.sample, (self.early_dy, *self.arrays))
        return GRAD_LOOPS[self.rule](dy, *arrays)[:3]


def make(rule: str, shape: Shape, seed: int = 0) -> Inputs:
    """Seeded, on the current GPU: gate sigmoid(N(3, 1)), beta U(0, 1), keys of unit length.

    A shape's ``data`` may say otherwise.
    """
    import cupy

    rng, wide = cupy.random.default_rng(seed), getattr(cupy, shape.wide)
    heads = (shape.B, shape.T, shape.H)

    def normal(*size: int) -> Any:
        return rng.standard_normal((shape.B, shape.T, *size), dtype=wide)

    q = normal(shape.queries, shape.K) * shape.K**-0.5
    k = normal(shape.queries, shape.K)
    if shape.data == "alike":
        k = 0.3 * k + k[:, :1].copy()
    k /= cupy.sqrt((k * k).sum(-1, keepdims=True))
    q, k, v = (x.astype(kind(shape.dtype)) for x in (q, k, normal(shape.H, shape.V)))
    gate = 1 / (1 + cupy.exp(-(9 if shape.data == "lasting" else 3) - normal(shape.H)))
    arrays = laid_out(shape.layout, q, k, v)
    return Inputs(rule, shape, *arrays, gate, rng.random(heads, dtype=wide))


def laid_out(layout: str, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k and v as they lie in memory under a layout."""
    if layout == "heads first":
        q, k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (q, k, v))
    elif layout == "sliced":
        together = q[:, :, None].repeat(3, 2)
        for i, x in enumerate((q, k, v)):
            together[:, :, i] = x
        q, k, v = (together[:, :, i] for i in range(3))
    return q, k, v


def kind(dtype: str) -> Any:
    """What NumPy and CuPy know a dtype by."""
    if dtype != "bfloat16":
        return dtype
    from ..devices import bfloat16

    return bfloat16()


def host(x: Any) -> np.ndarray:
    """A CuPy, torch or JAX array as float64 in NumPy."""
    if hasattr(x, "get"):
        x = x.get()
    elif hasattr(x, "cpu"):  # torch cannot hand bfloat16 to NumPy
        x = x.double().cpu().numpy()
    return np.asarray(x).astype(np.float64)
