"""cuda/recurrent.cu, on the CPU in several thread orders and with every access followed; on a GPU.

The GPU tests named test_case_* are small enough for compute-sanitizer:

    compute-sanitizer --tool racecheck python -m pytest -m gpu tests/test_recurrent.py -k test_case
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from compare import bits
from conftest import Family
from host import simt

from cupy_gdelta import arrays

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import (
    device_offsets,
    needs_compiler,
    on_host,
    pose,
    random_inputs,
    verify,
    verify_in_every_order,
)

from cupy_gdelta.gpu import loader, plan, recurrent

SOURCE = loader.folder() / "recurrent.cu"


@dataclass(frozen=True)
class Case:
    rule: str
    dtype: str
    K: int
    V: int
    T: int = 70
    B: int = 1
    H: int = 2
    Hq: int = 2
    rows: int = 0  # lanes a column; 0 is the plan's own choice
    cols: int = 1
    sums: str = ""
    gate: str = "zeros among"
    options: dict = field(default_factory=dict, hash=False)
    prepare: Callable = field(default=dict, hash=False)  # inputs -> the inputs passed

    def __str__(self) -> str:
        return f"{self.rule}-{self.dtype}-{self.K}x{self.V}-T{self.T}-rows{self.rows}x{self.cols}"

    @property
    def plan(self) -> plan.Plan:
        log_gate, aligned = self.prepare is logarithms, 4 if self.prepare is strided else 16
        sizes = (self.T, self.B * self.H, self.K, self.V, 132)
        chosen = plan.choose_by_tokens(self.rule, self.dtype, *sizes, aligned, log_gate)
        sums = self.sums or chosen.sums
        tile = chosen.tile
        if self.rows or self.sums:
            tile = plan.make_tile(self.K, self.V, sums, 1, self.rows or 4, self.cols)
        return plan.Plan("recurrent", sums, tile, "")

    @property
    def expression(self) -> str:
        norm = "qk_l2norm" in self.options
        args = (self.rule, self.dtype, self.plan.sums, norm, self.K, self.V, self.plan.tile)
        return recurrent.expression(*args)

    def inputs(self, rng: np.random.Generator, family: Family | None = None) -> dict:
        return self.prepare(random_inputs(self, rng, family or Family("numpy")))


def logarithms(x: dict) -> dict:
    """Logarithms of the gates instead, float32 or of the dtype of q."""
    gate = x.pop("gate")
    return x | {"log_gate": -1e-3 * abs(gate)}


def narrow(x: dict) -> dict:
    """Gate and beta in the dtype of q."""
    return x | {n: x[n].astype(x["q"].dtype) for n in ("gate", "beta")}


def absent(x: dict) -> dict:
    return x | {"gate": None, "beta": None, "initial_state": None}


def strided(x: dict) -> dict:
    """Reversed time, heads apart, one broadcast token, addresses that break 16-byte alignment."""
    xp = sys.modules[type(x["q"]).__module__.partition(".")[0]]
    q = xp.zeros((*x["q"].shape[:3], x["q"].shape[3] + 1), x["q"].dtype)[..., 1:]
    q[...] = x["q"]
    gate = xp.broadcast_to(x["gate"][:, :1], x["gate"].shape)
    state = xp.asfortranarray(x["initial_state"])
    k, v = x["k"][:, ::-1], x["v"].transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    return x | {"q": q, "k": k, "v": v, "gate": gate, "initial_state": state}


CASES = [
    Case("linear", "float32", 24, 24),
    Case("delta", "float32", 24, 24, gate="negative"),
    Case("linear", "float32", 24, 24, T=0),
    Case("delta", "float32", 24, 24, T=1),
    Case("linear", "float32", 24, 24, T=64, rows=4),
    Case("delta", "float32", 9, 24, rows=8, cols=2, options={"qk_l2norm": True}),
    Case("linear", "bfloat16", 64, 64, Hq=1, rows=8, cols=4),
    Case("delta", "float16", 40, 17, B=3, rows=16),
    Case("linear", "float64", 33, 1, rows=32),
    Case("delta", "float64", 1, 1, gate="1e-37"),
    Case("linear", "float32", 20, 70, sums="float64"),
    Case("delta", "bfloat16", 128, 100, T=33, H=1, Hq=1, options={"scale": 0.3}),
    Case("linear", "float16", 256, 3, T=9, H=1, Hq=1),
    Case("delta", "float32", 24, 24, T=90, options={"cu_seqlens": [0, 5, 5, 70, 71]}),
    Case("linear", "float32", 8, 8, T=200, prepare=logarithms),
    Case("delta", "bfloat16", 24, 16, prepare=lambda x: logarithms(narrow(x))),
    Case("delta", "float16", 16, 40, prepare=narrow),
    Case("linear", "float64", 24, 24, prepare=absent),
    Case("delta", "float32", 24, 24, gate="random", prepare=strided),
]


def run_on_host(kernels: simt.Kernels, case: Case, x: dict, **how) -> tuple[np.ndarray, np.ndarray]:
    """Launch on NumPy arrays as the GPU path does on CuPy's."""
    _, y, state, args, reads, writes = on_host(case, x)
    tile = case.plan.tile
    kernels.launch(
        case.expression,
        3,  # fewer blocks than items: blocks take turns
        tile.threads,
        tile.shared_bytes,
        [args],
        reads=reads,
        writes=writes,
        **how,
    )
    return y, state


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    return simt.Kernels(SOURCE, list(dict.fromkeys(case.expression for case in CASES)))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu_in_every_order(case, kernels, rng):
    x = case.inputs(rng)
    verify_in_every_order(case, x, lambda order: run_on_host(kernels, case, x, order=order))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_race_and_no_stray_access(case, kernels, rng):
    x = case.inputs(rng)
    y, state = run_on_host(kernels, case, x, check=True)
    verify(case, x, y, state, "checked")


BARRIERS = SOURCE.read_text().count("__syncthreads();")


@needs_compiler
@pytest.mark.parametrize("which", range(BARRIERS))
def test_a_missing_barrier_is_caught(which, tmp_path, rng):
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, tmp_path)
    planted = tmp_path / "recurrent.cu"
    parts = planted.read_text().split("__syncthreads();")
    assert len(parts) == BARRIERS + 1 >= 4
    head, tail = parts[: which + 1], parts[which + 1 :]
    planted.write_text("__syncthreads();".join(head) + ";" + "__syncthreads();".join(tail))
    case = CASES[0]  # its three blocks of tokens pass every barrier
    with pytest.raises(simt.Fault, match="race"):
        run_on_host(simt.Kernels(planted, [case.expression]), case, case.inputs(rng), check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_on_a_gpu(case, rng):
    launch_on_gpu(case, case.plan, case.inputs(rng, Family("cupy")))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("D", [24, 64, 128])
def test_every_tile_gives_the_same_bits_every_time(rule, dtype, D, rng):
    case = Case(rule, dtype, D, D, T=130, B=2, gate="one")
    x = case.inputs(rng, Family("cupy"))
    sums = case.plan.sums
    for tile in plan.tiles(rule, D, D, sums, 16 // arrays.ITEMSIZE[dtype]):
        chosen = plan.Plan("recurrent", sums, tile, "")
        first = launch_on_gpu(case, chosen, x)
        for _ in range(10):
            again = launch_on_gpu(case, chosen, x, compare=False)
            assert again == first, f"{tile}: the same inputs gave other bits"


def launch_on_gpu(case: Case, chosen: plan.Plan, x: dict, compare: bool = True) -> str:
    """Launch one plan on CuPy arrays, y and the state poisoned with NaN first; their bits."""
    p, y, state = pose(case, x)
    recurrent.launch(p, chosen, y, state, device_offsets(p))
    if compare:
        verify(case, x, y.owner, state.owner, str(chosen.tile))
    return bits(y.owner, state.owner)
