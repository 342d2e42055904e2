"""cuda/linear_grad.cu, on the CPU in several thread orders with every access followed; on a GPU.

The GPU tests named test_case_* are small enough for compute-sanitizer.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from compare import bits, check_grad
from conftest import Family
from host import simt

from cupy_gdelta import accuracy, arrays

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import (
    RUNS,
    addressed,
    device_offsets,
    needs_compiler,
    pose_grad,
    random_gradients,
    random_inputs,
    verify_grad,
    verify_grad_in_every_order,
)
from test_recurrent_grad import absent, logarithms, narrow, state_alone, strided

from cupy_gdelta.gpu import call, chunks_grad, linear_grad, loader, plan, recurrent_grad

SOURCE = loader.folder() / "linear_grad.cu"
ORDERED = re.compile(r"__syncthreads\(\);|cp_async_wait<[^;]*;")  # what keeps threads in step


@dataclass(frozen=True)
class Case:
    dtype: str
    K: int
    V: int
    T: int = 150
    B: int = 1
    H: int = 2
    Hq: int = 2
    gate: str = "zeros among"
    cols: int = 0  # 0 is the plan's own choice
    wide: bool = True
    apart: bool = True
    roles: int = 0
    options: dict = field(default_factory=dict, hash=False)
    prepare: Callable = field(default=dict, hash=False)  # inputs -> the inputs passed
    rule: str = "linear"

    def __str__(self) -> str:
        how = self.prepare.__name__ if self.prepare is not dict else self.gate
        return f"{self.dtype}-{self.K}x{self.V}-T{self.T}-{how}"

    @property
    def tile(self) -> chunks_grad.ChunkGradTile:
        sizes = (1000, 1000, self.K, self.V, 132, self.wide)
        tile = chunks_grad.best_tile(self.dtype, *sizes, plan.SHARED_LIMIT)
        assert tile is not None
        tile = replace(tile, apart=tile.apart and self.apart, roles=self.roles or tile.roles)
        return replace(tile, cols=self.cols) if self.cols else tile

    @property
    def expressions(self) -> tuple[str, ...]:
        return linear_grad.expressions(self.tile, self.Hq < self.H)

    def inputs(self, rng: np.random.Generator, family: Family | None = None) -> dict:
        family = family or Family("numpy")
        x = random_inputs(self, rng, family) | random_gradients(self, rng, family)
        return self.prepare(x)


def above_one(x: dict) -> dict:
    """Gates above 1 and below -1."""
    x["gate"][...] = 1.02 * np.sign(x["gate"] - 0.5)
    return x


def overflowing(x: dict) -> dict:
    """Gates whose products overflow, between tokens that neither write nor are read."""
    x["gate"][:, 10:31] = 1e9
    x["gate"][:, 31] = 0
    x["beta"][:, :31] = 0
    x["dy"][:, 10:31] = 0
    x["initial_state"][...] = 0
    return x


CASES = [
    Case("float32", 64, 64),
    Case("bfloat16", 64, 64),
    Case("float16", 64, 64),
    Case("float32", 24, 24, gate="random", B=2),
    Case("float32", 24, 24, T=130, gate="0.9995"),
    Case("bfloat16", 24, 40, T=65, H=4, Hq=2, gate="negative", options={"scale": 0.3}),
    Case("float32", 40, 20, T=100, H=4, Hq=1, gate="1e-37"),
    Case("float16", 16, 96, T=64, H=3, Hq=1, gate="0.2"),
    Case("bfloat16", 128, 128, T=100, H=1, Hq=1, gate="one"),
    Case("float32", 64, 128, T=70, H=1, Hq=1, gate="zero"),
    Case("float32", 33, 17, T=129, wide=False, gate="negative"),
    Case("float32", 128, 128, T=100, H=1, Hq=1, gate="random"),
    Case("float32", 24, 20, T=100, apart=False),
    Case("bfloat16", 40, 24, T=100, apart=False),
    Case("bfloat16", 9, 60, T=129, wide=False, gate="random", cols=16),
    Case("float16", 1, 1, T=65, wide=False),
    Case("float32", 64, 64, T=1, cols=32),
    Case("bfloat16", 48, 48, T=1100, H=1, Hq=1, gate="random"),
    Case("float32", 24, 24, T=1100, H=1, Hq=1, gate="0.9995", roles=1),
    Case("bfloat16", 64, 64, T=300, options={"cu_seqlens": [0, 5, 5, 200, 290]}),
    Case("float32", 24, 24, T=300, Hq=1, options={"cu_seqlens": [0, 64, 64, 193, 290]}),
    Case("float32", 24, 24, T=200, prepare=logarithms),
    Case("bfloat16", 24, 16, T=100, Hq=1, prepare=lambda x: logarithms(narrow(x))),
    Case("float16", 16, 40, prepare=narrow),
    Case("float32", 24, 24, prepare=absent),
    Case("bfloat16", 24, 8, prepare=state_alone),
    Case("float32", 24, 24, wide=False, gate="random", prepare=strided),
    Case("float32", 24, 24, T=100, prepare=above_one),
    Case("float32", 24, 24, prepare=overflowing),
    Case("bfloat16", 24, 24, prepare=overflowing),
    Case("bfloat16", 24, 24, gate="1e-37"),
    Case("float16", 24, 24, gate="1e-37"),
]


def run_on_host(kernels: simt.Kernels, case: Case, x: dict, **how) -> dict[str, np.ndarray]:
    """Launch on NumPy arrays as gpu.linear_grad.launch does on CuPy's."""
    p, grads = pose_grad(case, x)
    tile = case.tile
    needed = linear_grad.sizes(p, tile)
    space = np.full(sum(needed.values()) // 4, np.nan, np.float32)
    offsets = None if p.cu_seqlens is None else arrays.take(p.cu_seqlens)
    reads = {name: view.array for name, view in vars(p).items() if isinstance(view, arrays.View)}
    if offsets is not None:
        reads["cu_seqlens"] = offsets.array
    views = {name: addressed(view) for name, view in grads.items()}
    ready = addressed(p)
    spaces = linear_grad.addresses(space.ctypes.data, needed)
    args = [
        call.arguments(
            ready, views["v"], views.get("initial_state"), offsets and addressed(offsets)
        )[0],
        recurrent_grad.arguments(ready, views, spaces)[0],
    ]
    writes = {f"d {name}": view.array for name, view in grads.items()} | {"space": space}
    how |= {"reads": reads, "writes": writes}
    for name, blocks, threads, shared in linear_grad.launches(p, tile):
        kernels.launch(name, blocks, threads, shared, args, **how)
    return {name: view.owner for name, view in grads.items()}


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    cases = CASES + [case for case, *_ in CONSTANT]
    return simt.Kernels(SOURCE, list(dict.fromkeys(e for case in cases for e in case.expressions)))


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


# What two planes of bfloat16 leave of these numbers, or three products of their squares, is large.
UNLUCKY = [1 + 2**-9 + 2**-17, 1 + 2**-8 - 2**-16 - 2**-17, 1 / 3, 1.1]
CONSTANT = [
    (Case("float32", 24, 24, T=64, H=1, Hq=1), 1.0, 1.0),
    (Case("float32", 24, 24, T=512, H=1, Hq=1), 1.0, 1.0),
    (Case("float32", 24, 20, T=192, H=1, Hq=1, apart=False), 0.5, 1.0),
    (Case("float32", 33, 17, T=200, H=1, Hq=1, wide=False), 0.999, 2.0),
    (Case("float32", 64, 64, T=128, H=1, Hq=1), 1.0, 1.0),
    (Case("float32", 64, 64, T=192, H=1, Hq=1), 0.5, 2.0),
    (Case("float32", 64, 64, T=320, H=1, Hq=1), 1.02, 1.0),
    (Case("float32", 64, 128, T=128, H=1, Hq=1), 1.0, 1.0),
    (Case("float32", 128, 128, T=128, H=1, Hq=1), 0.999, 1.0),
]


def constant(case: Case, number: float, gate: float, beta: float, family: Family) -> dict:
    x = {name: np.full((case.B, case.T, case.H, case.K), number) for name in ("q", "k")}
    x |= {name: np.full((case.B, case.T, case.H, case.V), number) for name in ("v", "dy")}
    scalars = {"gate": gate, "beta": beta}
    x |= {name: np.full((case.B, case.T, case.H), value) for name, value in scalars.items()}
    return {name: family.array(a, case.dtype) for name, a in x.items()}


@needs_compiler
@pytest.mark.parametrize(("case", "gate", "beta"), CONSTANT, ids=str)
@pytest.mark.parametrize("number", UNLUCKY)
def test_errors_of_constants_do_not_add_up(number, case, gate, beta, kernels):
    x = constant(case, number, gate, beta, Family("numpy"))
    verify_grad(case, x, run_on_host(kernels, case, x), f"{number} gate {gate} beta {beta}")


@needs_compiler
@pytest.mark.parametrize("pattern", ["diagonal", "period of 16", "every other column"])
def test_errors_of_patterns_do_not_add_up(pattern, rng):
    """Keys and queries of one number each, tokens that come again, columns of one number."""
    case = Case("float32", 64, 64, T=256, H=1, Hq=1)
    kernels = simt.Kernels(SOURCE, case.expressions)
    for number in (1.003, 1.0039, 1.1, 1 / 3, 0.7):
        for gate in (1.0, 0.9):
            x = constant(case, number, gate, 1.0, Family("numpy"))
            for name in ("q", "k", "v", "dy"):
                if pattern == "period of 16":
                    few = rng.standard_normal((1, 16, 1, 64)).astype(case.dtype)
                    x[name] = np.tile(few, (1, case.T // 16, 1, 1))
                elif pattern == "every other column":
                    x[name][..., ::2] = rng.standard_normal((1, case.T, 1, 32))
                elif name in "qk":
                    x[name][0, :, 0] *= np.tile(np.eye(64, dtype=case.dtype), (4, 1))
            verify_grad(case, x, run_on_host(kernels, case, x), f"{pattern} {number} gate {gate}")


STEPS = [
    (name, i)
    for name, least in (("grad_states.cuh", 2), ("linear_grad.cu", 6))
    for i in range(max(least, len(ORDERED.findall((loader.folder() / name).read_text()))))
]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("name", "which"), STEPS)
def test_a_missing_barrier_or_wait_is_caught(name, which, tmp_path, rng):
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, tmp_path)
    planted = tmp_path / name
    text = planted.read_text()
    found = list(ORDERED.finditer(text))[which]
    planted.write_text(text[: found.start()] + ";" + text[found.end() :])
    # chunks enough to come around, and every branch that has one: copied as they are, and weighed
    cases = [Case(t, 24, 24, T=500, H=1, Hq=1, apart=False) for t in ("bfloat16", "float32")]
    names = [expression for case in cases for expression in case.expressions]
    kernels = simt.Kernels(tmp_path / "linear_grad.cu", names)

    def run_both() -> None:
        for case in cases:
            run_on_host(kernels, case, case.inputs(rng), check=True)

    with pytest.raises(simt.Fault, match=r"race|nobody has written|a cp.async of"):
        run_both()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("limit", [99 * 1024, plan.SHARED_LIMIT])
def test_tiles_fit_and_the_rest_goes_by_tokens(dtype, limit):
    for K, V in [(1, 1), (24, 24), (64, 64), (100, 30), (128, 128), (129, 8)]:
        chosen = plan.choose_grad("linear", dtype, 4096, 100, K, V, 132, shared_limit=limit)
        assert chosen.tile.shared_bytes <= limit
        if chosen.kernel == "linear_grad":
            assert chosen.tile.state_bytes <= limit
            assert chosen.tile.cols * chosen.tile.col_blocks >= V
    chosen = plan.choose_grad("linear", dtype, 4096, 100, 64, 64, 132, shared_limit=limit)
    assert (chosen.kernel == "linear_grad") == (dtype != "float64")
    big = plan.choose_grad("linear", dtype, 4096, 100, 128, 128, 132, shared_limit=limit)
    fits = dtype != "float64" and limit == plan.SHARED_LIMIT
    assert (big.kernel == "linear_grad") == fits


def test_few_heads_share_columns():
    few, many = (plan.choose_grad("linear", "bfloat16", 4096, n, 64, 64, 132) for n in (8, 128))
    assert few.tile.col_blocks > many.tile.col_blocks == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_on_a_gpu(case, rng):
    x = case.inputs(rng, Family("cupy"))
    first = launch_on_gpu(case, x)
    verify_grad(case, x, first, "on a GPU")
    for _ in range(RUNS):
        for name, again in launch_on_gpu(case, x).items():
            assert bits(again) == bits(first[name]), f"d {name}: other bits"


def launch_on_gpu(case: Case, x: dict) -> dict:
    p, grads = pose_grad(case, x)
    chosen = plan.Plan("linear_grad", "float32", case.tile, "")
    linear_grad.launch(p, chosen, grads, device_offsets(p))
    return {name: view.owner for name, view in grads.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("gate", accuracy.GATES)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (24, 24), (104, 40)])
def test_the_public_function_runs_it(dtype, gate, K, V, rng):
    from cupy_gdelta import gated_linear_attention_grad

    sizes = {"B": 2, "T": 300, "H": 4, "Hq": 2, "K": K, "V": V}
    assert plan.choose_grad("linear", dtype, 300, 8, K, V, 132).kernel == "linear_grad"
    family = Family("cupy")
    x = family.arrays(accuracy.inputs(rng, gate=gate, **sizes), dtype)
    x["initial_state"] = family.array(rng.standard_normal((2, 4, K, V)), "float32")
    dy = family.array(rng.standard_normal((2, 300, 4, V)), dtype)
    dstate = family.array(rng.standard_normal((2, 4, K, V)), "float32")
    check_grad("linear", gated_linear_attention_grad, dy, dstate, x, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "gate", "beta"), CONSTANT, ids=str)
@pytest.mark.parametrize("number", UNLUCKY)
def test_constants_on_a_gpu(number, case, gate, beta):
    x = constant(case, number, gate, beta, Family("cupy"))
    verify_grad(case, x, launch_on_gpu(case, x), f"{number} gate {gate} beta {beta}")


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [1.0, 0.9995, 0.95])
def test_errors_of_data_of_one_sign_do_not_add_up(gate, rng):
    from cupy_gdelta import gated_linear_attention_grad

    T, H, D = 16384, 2, 24
    q, k, v, beta, dy = np.broadcast_to(0.5 + rng.random((5, 1, 1, H, D)), (5, 1, T, H, D))
    x = {"q": q / D / T, "k": k, "v": v, "beta": beta[..., 0] / 100}
    x["gate"] = np.full((1, T, H), gate)
    x = Family("cupy").arrays(x, "float32")
    dy = Family("cupy").array(dy / 1000, "float32")
    check_grad("linear", gated_linear_attention_grad, dy, None, x, "float32")
