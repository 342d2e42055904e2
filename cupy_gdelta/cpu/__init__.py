"""Both rules on NumPy and its BLAS, in chunks of tokens.

``linear`` and ``delta`` hold the equations; ``decay`` the products of gates; ``steps`` the loop
over tokens for chunks where those could overflow, and for decode; ``step`` a few tokens of decode,
with states in place; ``blas`` the products of matrices; ``pieces`` the
way from the caller's arrays to the chunks and back; ``walk`` the order of the work and its threads.
"""

from __future__ import annotations

import numpy as np

from ..problem import Problem
from . import delta, linear, walk
from .step import advance

__all__ = ["advance", "forward"]


def forward(problem: Problem, y: np.ndarray, state: np.ndarray | None) -> None:
    """Write y [B, T, H, V] and, if given, the final state [N, H, K, V].

    Arrays of bfloat16 carry its bits in uint16. No input is written, and the memory taken besides
    them does not grow with T.
    """
    walk.run(problem, delta.segment if problem.rule == "delta" else linear.segment, y, state)
