"""Gates whose products overflow, under which a state of 0 stays 0 as it does token by token."""

from __future__ import annotations

import numpy as np
from conftest import Family

T = 100
WILD = {  # gates at the start of all ones, and the values' first tokens that are 0
    "overflow before anything is stored": ([1e20, 1e20], 4),
    "and forgotten": ([1e20, 1e20, 0], 4),
    "three and forgotten": ([1e13, 1e13, 1e13, 0], 4),
    "down and up": ([1e-30, 1e-30, 1e30, 1e30], 5),
    "later": ([1] * 70 + [-1e25, 1e25, 0], 80),
    "across blocks": ([1] * 10 + [1e9] * 20 + [0], 40),
    "across chunks": ([1] * 40 + [1e9] * 50, 95),
}


def wild_inputs(
    family: Family,
    start: tuple[list[float], int],
    rule: str,
    dtype: str = "bfloat16",
    *,
    K: int = 16,
    V: int = 64,
    beta: float = 1.0,
) -> tuple[dict, np.ndarray]:
    """One head of ones, and what the recurrence gives: nothing is stored before values begin."""
    gates, zeros = start
    x = {n: np.ones((1, T, 1, K)) / np.sqrt(K) for n in "qk"} | {"v": np.ones((1, T, 1, V))}
    x["v"][:, :zeros] = 0
    x["gate"] = np.ones((1, T, 1))
    x["gate"][0, : len(gates), 0] = gates
    x |= {"beta": np.full((1, T, 1), beta), "initial_state": np.zeros((1, 1, K, V))}
    stored = np.maximum(np.arange(1, T + 1) - zeros, 0.0)
    y = stored if rule == "linear" else 1 - (1 - beta) ** stored
    return family.arrays(x, dtype), np.broadcast_to(y[None, :, None, None], (1, T, 1, V))
