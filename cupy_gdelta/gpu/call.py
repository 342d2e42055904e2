"""The argument that every kernel takes: one checked call, laid out as CallArgs of cuda/call.cuh."""

from __future__ import annotations

import struct

import numpy as np

from ..arrays import View
from ..problem import Problem
from ..step_problem import StepProblem

# CallArgs: nine addresses, six times three strides, four of the state, then sizes and kinds.
ARGS = struct.Struct("=9Q 18q 4q q 4q d 4i")
_NONE = (0, 0, 0)
MAX_GRID = 2**31 - 1


def arguments(p: Problem, y: View, state: View | None, offsets: View | None) -> np.ndarray:
    """The kernel's one argument, laid out as CallArgs."""
    pointers = (p.q, p.k, p.v, p.gate, p.beta, p.initial_state, offsets, y, state)
    strides = (p.q, p.k, p.v, p.gate, p.beta, y)
    packed = ARGS.pack(
        *(0 if x is None else x.ptr for x in pointers),
        *(n for x in strides for n in (_NONE if x is None else x.strides[:3])),
        *((*_NONE, 0) if p.initial_state is None else p.initial_state.strides),
        0 if offsets is None else offsets.strides[0],
        *(p.T, p.H, p.H // p.Hq, p.N),
        p.scale,
        *kinds(p),
        8 if offsets is None or offsets.dtype == "int64" else 4,
        0,
    )
    return np.frombuffer(packed, np.dtype((np.void, ARGS.size)))


def kinds(p: Problem | StepProblem) -> list[int]:
    """How gate and beta are stored, as Scalars of cuda/call.cuh."""
    return [
        0 if x is None else (1 if x.dtype == p.dtype else 2) + (2 if log else 0)
        for x, log in ((p.gate, p.log_gate), (p.beta, False))
    ]
