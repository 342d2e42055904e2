"""Where the command line computes: which devices work, and host arrays to and from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .refusal import NO_CUPY, Refusal

CHOICES = ("auto", "numpy", "cupy", "torch")


@dataclass(frozen=True)
class Backend:
    """A library that holds the arrays of a call; ``put`` and ``get`` go to and from NumPy."""

    name: str
    on_gpu: bool
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]


def why_no_gpu() -> str:
    """Why CuPy cannot compute here; empty when it can."""
    try:
        import cupy
    except ImportError as error:
        if getattr(error, "name", "") == "cupy":
            return NO_CUPY
        return f"CuPy cannot be imported: {first_line(error)}"
    try:
        if not cupy.cuda.runtime.getDeviceCount():
            return "no CUDA device"
        cupy.zeros(1).get()
    except Exception as error:  # a broken driver raises what it likes
        return f"no CUDA device that works: {first_line(error)}"
    return ""


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def pick(name: str) -> Backend:
    """The backend called ``name``; ``auto`` is CuPy where a CUDA device works, else NumPy."""
    if name == "torch":
        return _torch()
    why = "" if name == "numpy" else why_no_gpu()
    if name == "cupy" and why:
        raise Refusal(f"--array cupy cannot be used here: {why}")
    if name == "numpy" or why:
        return Backend("numpy", False, lambda x: x, lambda x: x)
    import cupy

    return Backend("cupy", True, cupy.asarray, cupy.asnumpy)


def _torch() -> Backend:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def put(x: np.ndarray) -> Any:
        if x.dtype.name != "bfloat16":  # which neither library knows how to pass to the other
            return torch.tensor(x, device=device)
        return torch.tensor(x.view(np.int16), device=device).view(torch.bfloat16)

    def get(x: Any) -> np.ndarray:
        if x.dtype != torch.bfloat16:
            return x.cpu().numpy()
        return x.view(torch.int16).cpu().numpy().view(bfloat16())

    return Backend(f"torch on {device}", device == "cuda", put, get)


def bfloat16() -> np.dtype:
    """NumPy's bfloat16, which ml_dtypes adds."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)
