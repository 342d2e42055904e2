"""What counts as right: tolerances for every dtype, gate regimes, one measure of error."""

from __future__ import annotations

import numpy as np

# Relative error ||x - reference|| / ||reference|| of y and of the state.
TOLERANCE = {
    ("linear", "float64"): 1e-13,
    ("linear", "float32"): 2e-6,
    ("linear", "tf32"): 2e-3,
    ("linear", "float16"): 6e-4,
    ("linear", "bfloat16"): 3.5e-3,
    ("delta", "float64"): 1e-12,
    ("delta", "float32"): 5e-6,
    ("delta", "tf32"): 3e-3,
    ("delta", "float16"): 1e-3,
    ("delta", "bfloat16"): 5e-3,
}
GRADIENT_TOLERANCE = {  # of every gradient, of both rules
    "float64": 1e-11,
    "float32": 2e-5,
    "tf32": 5e-3,
    "float16": 3e-3,
    "bfloat16": 1.2e-2,
}
CORRELATED = {("delta", "bfloat16"): 8e-3}  # keys that nearly repeat

GATES = ("one", "zero", "1e-37", "0.2", "0.9995", "random", "zeros among", "negative")


def gates(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Gates of one regime, float64; ``name`` is one of :data:`GATES`."""
    constant = {"one": 1.0, "zero": 0.0, "1e-37": 1e-37, "0.2": 0.2, "0.9995": 0.9995}
    if name in constant:
        return np.full(shape, constant[name])
    g = 1 / (1 + np.exp(-rng.normal(3, 1, shape)))
    if name == "zeros among":
        g[rng.random(shape) < 0.1] = 0.0
    elif name == "negative":
        g *= rng.choice([-1.0, 1.0], shape)
    elif name != "random":
        raise ValueError(f"no gate regime called {name!r}; there are {', '.join(GATES)}")
    return g


def inputs(
    rng: np.random.Generator,
    *,
    B: int = 1,
    T: int = 128,
    H: int = 2,
    Hq: int | None = None,
    K: int = 24,
    V: int = 24,
    gate: str = "random",
    correlated: bool = False,
) -> dict[str, np.ndarray]:
    """Random float64 q, k (of unit length), v, gate, beta that keep both recurrences of order 1."""
    heads = H if Hq is None else Hq
    q = rng.standard_normal((B, T, heads, K)) / np.sqrt(K)
    k = rng.standard_normal((B, T, heads, K))
    if correlated:
        k = 0.3 * k + rng.standard_normal((B, 1, heads, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((B, T, H, V))
    beta = rng.random((B, T, H))
    return {"q": q, "k": k, "v": v, "gate": gates(gate, (B, T, H), rng), "beta": beta}


def error(x: np.ndarray, reference: np.ndarray) -> float:
    """||x - reference|| / ||reference||, infinite where the two differ in NaN, Inf or shape."""
    x, reference = np.asarray(x).astype(np.float64), np.asarray(reference).astype(np.float64)
    if x.shape != reference.shape:
        return float("inf")
    finite = np.isfinite(reference)
    if not np.array_equal(x[~finite], reference[~finite], equal_nan=True):
        return float("inf")
    x, reference = x[finite], reference[finite]
    if not np.isfinite(x).all():
        return float("inf")
    norm, miss = np.linalg.norm(reference), np.linalg.norm(x - reference)
    return float(miss / norm) if norm else float(miss)
