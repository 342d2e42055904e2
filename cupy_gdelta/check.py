"""``cupy-gdelta check``: both rules on every device here against the float64 loop over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from . import accuracy, api, devices, reference
from .arrays import state_dtype
from .info import table
from .refusal import Refusal

DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16")  # tf32: float32 in, tf32 products
RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (api.gated_linear_attention, reference.gated_linear_attention),
    "delta": (api.gated_delta_rule, reference.gated_delta_rule),
}
CORRELATED = "keys alike"  # the row that only the delta rule has
QUICK = ("one", "random", "zeros among", CORRELATED)


@dataclass(frozen=True)
class Result:
    """The worst relative error of y and of the state over the cases of one cell of the table."""

    rule: str
    dtype: str
    gate: str
    error: float
    tolerance: float
    failure: str = ""

    @property
    def within(self) -> bool:
        return not self.failure and self.error <= self.tolerance


def run(device: str = "all", quick: bool = False) -> int:
    """Print a table for each device; 0 when all is within tolerance, else 1."""
    why = devices.why_no_gpu() if device != "cpu" else ""
    if why and device == "gpu":
        raise Refusal(f"--device gpu cannot be used here: {why}")
    results: list[Result] = []
    for title, put, context in _places(device, gpus=device != "cpu" and not why):
        with context():
            here = list(measure(put, quick))
        _show(title, here)
        results += here
    if why:
        print(f"no GPU was checked: {why}")
    if "bfloat16" not in {r.dtype for r in results}:
        print("bfloat16 was not checked: ml_dtypes is not installed")
    met = sum(r.within for r in results)
    print(f"{met} of {len(results)} within tolerance")
    return 0 if met == len(results) else 1


def _places(device: str, gpus: bool) -> Iterator[tuple[str, Callable, Callable]]:
    """Title, array constructor and a maker of the context of every device asked for."""
    from contextlib import nullcontext

    if device != "gpu":
        yield f"CPU (NumPy {np.__version__})", np.asarray, nullcontext
    if gpus:
        import cupy

        for i in range(cupy.cuda.runtime.getDeviceCount()):
            name = cupy.cuda.runtime.getDeviceProperties(i)["name"].decode()
            title = f"GPU {i}: {name} (CuPy {cupy.__version__})"
            yield title, cupy.asarray, partial(cupy.cuda.Device, i)


def measure(put: Callable[[np.ndarray], Any], quick: bool = False) -> Iterator[Result]:
    """Every rule, dtype and gate regime, with arrays that ``put`` makes from NumPy's."""
    for rule in RULES:
        for gate in (*accuracy.GATES, CORRELATED):
            if (gate == CORRELATED and rule != "delta") or (quick and gate not in QUICK):
                continue
            for dtype in DTYPES:
                try:
                    kind = devices.bfloat16() if dtype == "bfloat16" else dtype
                except ModuleNotFoundError:
                    continue
                yield _cell(rule, gate, dtype, kind, put, quick)


def _cell(rule: str, gate: str, dtype: str, kind: Any, put: Callable, quick: bool) -> Result:
    tolerance = accuracy.TOLERANCE[rule, dtype]
    if gate == CORRELATED:
        tolerance = accuracy.CORRELATED.get((rule, dtype), tolerance)
    worst = 0.0
    try:
        for arrays, options in _cases(gate, np.dtype("float32" if kind == "tf32" else kind), quick):
            worst = max(worst, *_errors(rule, dtype, arrays, options, put))
    except Exception as error:  # a device that cannot compute a case is what this command is for
        text = f"{type(error).__name__}: {devices.first_line(error)}"
        return Result(rule, dtype, gate, float("inf"), tolerance, text)
    return Result(rule, dtype, gate, worst, tolerance)


def _cases(gate: str, kind: np.dtype, quick: bool) -> Iterator[tuple[dict, dict]]:
    """A batch of the plain shape; packed sequences of grouped heads that go on from a state."""
    rng = np.random.default_rng(0)
    T = 100 if quick else 300
    regime, correlated = ("random", True) if gate == CORRELATED else (gate, False)
    ends = [0, T // 3, T // 3, T - 40, T]
    packed: dict[str, Any] = {"T": T, "H": 4, "Hq": 2, "K": 64, "V": 48}
    for sizes, options in (({"B": 2, "T": T}, {}), (packed, {"cu_seqlens": ends, "scale": 0.5})):
        arrays = accuracy.inputs(rng, gate=regime, correlated=correlated, **sizes)
        if "cu_seqlens" in options:
            shape = (len(ends) - 1, packed["H"], packed["K"], packed["V"])
            arrays["initial_state"] = rng.standard_normal(shape)
        wide = np.dtype(state_dtype(kind.name))
        yield {n: x.astype(kind if n in "qkv" else wide) for n, x in arrays.items()}, options


def _errors(
    rule: str, dtype: str, arrays: dict, options: dict[str, Any], put: Callable
) -> list[float]:
    function, loop = RULES[rule]
    expected = loop(**arrays, **options)
    precision = {"precision": "tf32"} if dtype == "tf32" else {}
    on_device = {name: put(x) for name, x in arrays.items()}
    got = function(**on_device, return_state=True, **options, **precision)
    host = [x.get() if hasattr(x, "get") else x for x in got]
    return [accuracy.error(x, e) for x, e in zip(host, expected, strict=True)]


def _show(title: str, results: list[Result]) -> None:
    for rule in RULES:
        cells = {(r.gate, r.dtype): r for r in results if r.rule == rule}
        dtypes = [d for d in DTYPES if any(d == dtype for _, dtype in cells)]
        header = ["gate\ntolerance", *(f"{d}\n{_tolerance(rule, d)}" for d in dtypes)]
        gates = dict.fromkeys(gate for gate, _ in cells)
        rows = [[gate, *(_text(cells[gate, d]) for d in dtypes)] for gate in gates]
        table(rows, header, f"{title}: {rule} rule")
    for text in dict.fromkeys(r.failure for r in results if r.failure):
        print(f"failed: {text}")


def _tolerance(rule: str, dtype: str) -> str:
    usual = accuracy.TOLERANCE[rule, dtype]
    loose = accuracy.CORRELATED.get((rule, dtype))
    return f"{usual:.1e}{f' ({loose:.1e})' if loose else ''}"


def _text(result: Result) -> str:
    if result.within:
        return f"{result.error:.1e}"
    return "failed !" if result.failure else f"{result.error:.1e} !"
