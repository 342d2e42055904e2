"""Both rules on NumPy and its BLAS, in chunks of tokens.

``linear`` and ``delta`` hold the equations; ``decay`` the products of gates; ``steps`` the loop
over tokens for chunks where those could overflow, and for decode; ``step`` a few tokens of decode,
with states in place; ``blas`` the products of matrices; ``pieces`` the way from the caller's arrays
to the chunks and back; ``walk`` the order of the work and its threads.
``grad``, ``grad_steps`` and ``grad_walk`` are the same for gradients.
"""

from __future__ import annotations

import numpy as np

from ..problem import Problem
from . import delta, grad_walk, linear, walk
from .step import advance

__all__ = ["advance", "backward", "forward"]


def forward(problem: Problem, y: np.ndarray, state: np.ndarray | None) -> None:
    """Write y [B, T, H, V] and, if given, the final state [N, H, K, V].

    Arrays of bfloat16 carry its bits in uint16. No input is written, and the memory taken besides
    them does not grow with T.
    """
    walk.run(problem, delta.segment if problem.rule == "delta" else linear.segment, y, state)


def backward(problem: Problem, grads: dict[str, np.ndarray]) -> None:
    """Write the gradient of each argument named in grads, in its shape and dtype.

    Memory besides: a segment for each thread, and the states between the segments.
    """
    grad_walk.run(problem, grads)
