"""cuda/recurrent_grad.cu, on the CPU in several thread orders with every access followed; on a GPU.

The GPU tests named test_case_* are small enough for compute-sanitizer:

    compute-sanitizer --tool racecheck \\
        python -m pytest -m gpu tests/test_recurrent_grad.py -k test_case
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
    addressed,
    device_offsets,
    needs_compiler,
    pose_grad,
    random_gradients,
    random_inputs,
    verify_grad,
    verify_grad_in_every_order,
)

from cupy_gdelta.gpu import call, grad_tiles, loader, plan, recurrent_grad

SOURCE = loader.folder() / "recurrent_grad.cu"


@dataclass(frozen=True)
class Case:
    rule: str
    dtype: str
    K: int
    V: int
    T: int = 40
    B: int = 1
    H: int = 2
    Hq: int = 2
    rows: int = 0  # lanes a column; 0 is the plan's own choice
    cols: int = 1
    tokens: int = 8
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
        sizes = (*sizes, aligned, log_gate)
        chosen = plan.choose_grad_by_tokens(self.rule, self.dtype, *sizes)
        sums, tile = self.sums or chosen.sums, chosen.tile
        if self.rows:
            words = arrays.ITEMSIZE[sums] // 4
            shape = (self.K, self.V, words, 1, self.rows, self.cols)
            tile = grad_tiles.make_tile(*shape, plan.SHARED_LIMIT, self.tokens)
        return plan.Plan("recurrent_grad", sums, tile, "")

    @property
    def expressions(self) -> list[str]:
        norm, chosen = "qk_l2norm" in self.options, self.plan
        sizes = (self.K, self.V, chosen.tile)
        blocks = -(-self.V // chosen.tile.block_cols)
        return [
            recurrent_grad.expression(self.rule, self.dtype, chosen.sums, norm, *sizes),
            recurrent_grad.finish_expression(self.dtype, chosen.sums, norm, self.K, blocks),
        ]

    def inputs(self, rng: np.random.Generator, family: Family | None = None) -> dict:
        family = family or Family("numpy")
        x = random_inputs(self, rng, family) | random_gradients(self, rng, family)
        return self.prepare(x)


def logarithms(x: dict) -> dict:
    """Logarithms of the gates instead, float32 or of the dtype of q."""
    gate = x.pop("gate")
    return x | {"log_gate": -1e-3 * abs(gate)}


def narrow(x: dict) -> dict:
    """Gate and beta in the dtype of q."""
    return x | {n: x[n].astype(x["q"].dtype) for n in ("gate", "beta")}


def absent(x: dict) -> dict:
    return x | {"gate": None, "beta": None, "initial_state": None, "dstate": None}


def state_alone(x: dict) -> dict:
    return x | {"dy": None}


def strided(x: dict) -> dict:
    """Reversed time, heads apart, one broadcast token, addresses that break 16-byte alignment."""
    xp = sys.modules[type(x["q"]).__module__.partition(".")[0]]
    q = xp.zeros((*x["q"].shape[:3], x["q"].shape[3] + 1), x["q"].dtype)[..., 1:]
    q[...] = x["q"]
    gate = xp.broadcast_to(x["gate"][:, :1], x["gate"].shape)
    state = xp.asfortranarray(x["initial_state"])
    k, v = x["k"][:, ::-1], x["v"].transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    dy = xp.broadcast_to(x["dy"][:, :1], x["dy"].shape)
    dstate = xp.broadcast_to(x["dstate"][:, :, :1], x["dstate"].shape)
    return x | {
        "q": q,
        "k": k,
        "v": v,
        "gate": gate,
        "initial_state": state,
        "dy": dy,
        "dstate": dstate,
    }


CASES = [
    Case("linear", "float32", 24, 24),
    Case("delta", "float32", 24, 24, gate="negative"),
    Case("delta", "float32", 24, 24, T=1),
    Case("linear", "float32", 24, 24, T=33, rows=4),
    Case("delta", "float32", 9, 24, rows=8, cols=2, options={"qk_l2norm": True}),
    Case("linear", "bfloat16", 64, 64, Hq=1, rows=8, cols=4, tokens=16),
    Case("delta", "float16", 40, 17, B=3, rows=16, tokens=4),
    Case("linear", "float64", 33, 1, rows=32),
    Case("delta", "float64", 1, 1, gate="1e-37"),
    Case("linear", "float32", 20, 70, rows=4, sums="float64"),
    Case("delta", "bfloat16", 128, 100, T=21, H=1, Hq=1, options={"scale": 0.3}),
    Case("linear", "float16", 256, 3, T=9, H=1, Hq=1),
    Case("delta", "float64", 64, 300 - 44, T=9, H=1, Hq=1),
    Case("delta", "float32", 24, 24, T=90, options={"cu_seqlens": [0, 5, 5, 70, 71]}),
    Case("linear", "float32", 8, 8, T=300, prepare=logarithms),
    Case("delta", "bfloat16", 24, 16, Hq=1, prepare=lambda x: logarithms(narrow(x))),
    Case("delta", "float16", 16, 40, prepare=narrow, options={"qk_l2norm": True}),
    Case("linear", "float64", 24, 24, prepare=absent),
    Case("delta", "float32", 24, 8, prepare=state_alone),
    Case("delta", "float32", 24, 24, gate="random", prepare=strided),
]


def run_on_host(kernels: simt.Kernels, case: Case, x: dict, **how) -> dict[str, np.ndarray]:
    """Launch on NumPy arrays as gpu.recurrent_grad.launch does on CuPy's."""
    p, grads = pose_grad(case, x)
    chosen = case.plan
    tile, sums = chosen.tile, np.dtype(chosen.sums)
    spaces = {
        name: np.full(size, np.nan, sums) for name, size in recurrent_grad.sizes(p, tile).items()
    }
    offsets = None if p.cu_seqlens is None else arrays.take(p.cu_seqlens)
    reads = {name: view.array for name, view in vars(p).items() if isinstance(view, arrays.View)}
    if offsets is not None:
        reads["cu_seqlens"] = offsets.array
    views = {name: addressed(view) for name, view in grads.items()}
    ready = addressed(p)
    offsets = offsets and addressed(offsets)
    args = [
        call.arguments(ready, views["v"], views.get("initial_state"), offsets)[0],
        recurrent_grad.arguments(ready, views, [a.ctypes.data for a in spaces.values()])[0],
    ]
    writes = {f"d {name}": view.array for name, view in grads.items()} | spaces
    how |= {"reads": reads, "writes": writes}
    main, finish = case.expressions
    # fewer blocks than items: blocks take turns
    kernels.launch(main, 3, tile.threads, tile.shared_bytes, args, **how)
    kernels.launch(finish, 2, 256, 0, args, **how)
    return {name: view.owner for name, view in grads.items()}


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    return simt.Kernels(SOURCE, list(dict.fromkeys(e for case in CASES for e in case.expressions)))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu_in_every_order(case, kernels, rng):
    x = case.inputs(rng)
    verify_grad_in_every_order(case, x, lambda order: run_on_host(kernels, case, x, order=order))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_race_and_no_stray_access(case, kernels, rng):
    x = case.inputs(rng)
    verify_grad(case, x, run_on_host(kernels, case, x, check=True), "checked")


BARRIERS = SOURCE.read_text().count("__syncthreads();")


@needs_compiler
@pytest.mark.parametrize("which", range(BARRIERS))
def test_a_missing_barrier_is_caught(which, tmp_path, rng):
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, tmp_path)
    planted = tmp_path / "recurrent_grad.cu"
    parts = planted.read_text().split("__syncthreads();")
    assert len(parts) == BARRIERS + 1 >= 5
    head, tail = parts[: which + 1], parts[which + 1 :]
    planted.write_text("__syncthreads();".join(head) + ";" + "__syncthreads();".join(tail))
    # blocks of tokens, several warps and items for a block pass every barrier
    case = Case("delta", "float32", 24, 40, rows=4, options={"qk_l2norm": True}, H=4, Hq=4)
    with pytest.raises(simt.Fault, match=r"race|nobody has written"):
        run_on_host(simt.Kernels(planted, case.expressions), case, case.inputs(rng), check=True)


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
    words = arrays.ITEMSIZE[sums] // 4
    for tile in grad_tiles.tiles(
        rule, D, D, words, 16 // arrays.ITEMSIZE[dtype], plan.SHARED_LIMIT
    ):
        chosen = plan.Plan("recurrent_grad", sums, tile, "")
        first = launch_on_gpu(case, chosen, x)
        for _ in range(20):
            again = launch_on_gpu(case, chosen, x, compare=False)
            assert again == first, f"{tile}: the same inputs gave other bits"


def launch_on_gpu(case: Case, chosen: plan.Plan, x: dict, compare: bool = True) -> str:
    """Launch one plan on CuPy arrays, gradients poisoned with NaN first; their bits."""
    p, grads = pose_grad(case, x)
    recurrent_grad.launch(p, chosen, grads, device_offsets(p))
    if compare:
        owners = {name: view.owner for name, view in grads.items()}
        verify_grad(case, x, owners, str(chosen.tile))
    return bits(*(view.owner for view in grads.values()))
