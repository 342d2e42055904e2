"""Array families for the tests: one body runs with NumPy, torch, DLPack and CuPy arrays."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest


@functools.cache
def no_gpu() -> str:
    """Why tests marked gpu cannot run here; empty where they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"


def pytest_collection_modifyitems(items):
    if any(item.get_closest_marker("gpu") for item in items) and no_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=no_gpu()))


def python(code: str, **environment: str | None) -> str:
    """Run ``code`` in a fresh interpreter, warnings as errors; its output. None unsets."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={n: x for n, x in (os.environ | environment).items() if x is not None},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


class Family:
    """Makes arrays of one family from NumPy arrays."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_gpu = name in ("cupy", "torch-cuda")

    def __repr__(self) -> str:
        return self.name

    def array(self, x, dtype: str | None = None):
        """``x`` (NumPy) as an array of this family, rounded to ``dtype``, a name."""
        x = np.asarray(x)
        if self.name.startswith("torch"):
            import torch

            tensor = torch.from_numpy(np.array(x, order="C"))
            if dtype is not None:
                tensor = tensor.to(getattr(torch, dtype))
            return tensor.cuda() if self.on_gpu else tensor
        if dtype == "bfloat16":
            import ml_dtypes

            dtype = ml_dtypes.bfloat16
        x = x.astype(dtype) if dtype is not None else x
        if self.name == "cupy":
            import cupy

            return cupy.asarray(x)
        if self.name == "dlpack":
            import array_api_strict

            return array_api_strict.asarray(x)
        return x

    def arrays(self, problem: dict, dtype: str) -> dict:
        """A problem of ``accuracy.inputs``: q, k, v in ``dtype``, the rest in the state's dtype."""
        state = "float64" if dtype == "float64" else "float32"
        kinds = dict.fromkeys(("q", "k", "v"), dtype)
        return {n: self.array(x, kinds.get(n, state)) for n, x in problem.items()}


def _family(name: str) -> Family:
    if name.startswith("torch"):
        pytest.importorskip("torch")
    if name == "dlpack":
        pytest.importorskip("array_api_strict")
    return Family(name)


GPU_FAMILIES = [
    pytest.param("cupy", marks=pytest.mark.gpu),
    pytest.param("torch-cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=["numpy", "torch", *GPU_FAMILIES])
def family(request) -> Family:
    """Every family that has all four dtypes."""
    return _family(request.param)


@pytest.fixture(params=["numpy", GPU_FAMILIES[0]])
def backend(request) -> Family:
    """One family for each back end, where the kind of array does not matter."""
    return _family(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
