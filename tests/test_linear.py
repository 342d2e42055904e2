"""cuda/linear.cu: the chunked linear rule, on the CPU with every access followed, and on a GPU.

The GPU tests named test_case_* are small enough for compute-sanitizer.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from compare import assert_close
from conftest import Family
from host import simt

from cupy_gdelta import accuracy

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
from wild import WILD, wild_inputs

from cupy_gdelta.gpu import chunks, linear, loader, plan

SOURCE = loader.folder() / "linear.cu"


@dataclass(frozen=True)
class Case:
    K: int
    V: int
    T: int = 150
    B: int = 1
    H: int = 2
    Hq: int = 2
    wide: bool = True
    pieces: int = 1
    block_cols: int = 0  # 0 is the plan's own choice
    gate: str = "zeros among"
    options: dict = field(default_factory=dict, hash=False)
    rule: str = "linear"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.K}x{self.V}-T{self.T}-{self.gate}-pieces{self.pieces}"

    @property
    def tile(self) -> chunks.ChunkTile:
        tile = chunks.best_tile(1000, 1000, self.K, self.V, 132, self.wide, plan.SHARED_LIMIT)
        assert tile is not None
        chunk_count = (self.T + 63) // 64
        size = -(-chunk_count // self.pieces) * 64
        tile = replace(tile, pieces=self.pieces, piece_size=size)
        if self.block_cols:
            tile = replace(tile, block_cols=self.block_cols)
        return tile

    @property
    def expressions(self) -> list[str]:
        output = linear.expression(self.K, self.V, self.tile, True)
        if self.pieces == 1:
            return [output]
        return [linear.expression(self.K, self.V, self.tile, False), "scan_pieces", output]


CASES = [
    Case(64, 64),
    Case(64, 64, T=0),
    Case(24, 40, T=1, gate="one"),
    Case(64, 64, T=64, gate="zero", block_cols=32),
    Case(128, 128, T=129, gate="negative", Hq=1),
    Case(16, 16, T=63, gate="0.2", B=3),
    Case(40, 17, wide=False, gate="1e-37"),
    Case(1, 3, T=65, wide=False, pieces=2, gate="0.9995"),
    Case(33, 70, T=300, wide=False, pieces=3, gate="random"),
    Case(64, 64, T=300, pieces=2, options={"cu_seqlens": [0, 5, 5, 200, 290], "scale": 0.5}),
    Case(96, 64, T=100, Hq=1, gate="negative"),
]


def run_on_host(kernels: simt.Kernels, case: Case, x: dict, **how) -> tuple[np.ndarray, np.ndarray]:
    """Launch on NumPy arrays as gpu.linear.launch does on CuPy's."""
    p, y, state, call, reads, writes = on_host(case, x)
    tile, size = case.tile, p.N * p.H * p.K * p.V
    space = np.full(tile.pieces * (size + p.N * p.H), np.nan, np.float32)
    at = space.ctypes.data
    args = [call, linear.pieces(tile, at, at + 4 * tile.pieces * size)[0]]
    how |= {"reads": reads, "writes": writes | {"space": space}}
    *states, output = case.expressions
    if states:
        kernels.launch(states[0], 3, tile.state_threads, tile.state_bytes, args, **how)
        kernels.launch(states[1], 2, 256, 0, [*args, np.int64(p.K), np.int64(p.V)], **how)
    kernels.launch(output, 3, tile.threads, tile.shared_bytes, args, **how)
    return y, state


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    return simt.Kernels(SOURCE, list(dict.fromkeys(e for case in CASES for e in case.expressions)))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu_in_every_order(case, kernels, rng):
    x = random_inputs(case, rng, Family("numpy"))
    verify_in_every_order(case, x, lambda order: run_on_host(kernels, case, x, order=order))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_race_and_no_stray_access(case, kernels, rng):
    x = random_inputs(case, rng, Family("numpy"))
    y, state = run_on_host(kernels, case, x, check=True)
    verify(case, x, y, state, "checked")


PLANTS = [
    *[("linear.cu", "__syncthreads();", ";", i) for i in range(5)],
    ("linear.cu", "cp_async_wait<1>();", ";", 0),
    ("linear.cu", "cp_async_wait<kStages - 2>();", ";", 0),
    ("linear.cu", "__syncwarp();", ";", 0),
    ("linear.cu", "__syncwarp();", ";", 1),
]


@needs_compiler
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant[1]}-{plant[3]}")
def test_a_planted_fault_is_caught(plant, tmp_path, rng):
    """Every barrier and every wait of the kernel, left out one by one."""
    name, text, instead, which = plant
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, tmp_path)
    planted = tmp_path / name
    parts = planted.read_text().split(text)
    assert len(parts) > which + 1, f"{text} is not there {which + 1} times"
    head, tail = parts[: which + 1], parts[which + 1 :]
    planted.write_text(text.join(head) + instead + text.join(tail))
    case = Case(64, 64, T=400, B=2)  # seven chunks, more items than blocks
    broken = simt.Kernels(tmp_path / "linear.cu", case.expressions)
    x = random_inputs(case, rng, Family("numpy"))

    def run() -> None:
        verify(case, x, *run_on_host(broken, case, x, check=True), "planted")

    with pytest.raises((simt.Fault, AssertionError)):  # a race, or a result that is wrong
        run()


def test_every_barrier_has_its_plant():
    text = SOURCE.read_text()
    for name in ("__syncthreads();", "__syncwarp();", "cp_async_wait<"):
        planted = sum(plant[1].startswith(name) for plant in PLANTS)
        assert text.count(name) == planted, name


@needs_compiler
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", WILD)
def test_products_of_gates_that_overflow(name, pieces):
    """A state of 0 stays 0 under any finite gate, as it does token by token."""
    case = Case(16, 64, T=100, H=1, Hq=1, pieces=pieces)
    x, expected = wild_inputs(Family("numpy"), WILD[name], "linear")
    kernels = simt.Kernels(SOURCE, case.expressions)
    y, _ = run_on_host(kernels, case, x)
    assert_close(y, expected, accuracy.TOLERANCE["linear", "bfloat16"], name)


@needs_compiler
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_gate_that_is_not_finite_shows(bad):
    case = Case(16, 64, T=100, H=1, Hq=1)
    x, _ = wild_inputs(Family("numpy"), WILD["later"], "linear")
    x["gate"][...] = 1
    x["gate"][0, 70] = bad
    y, state = run_on_host(simt.Kernels(SOURCE, case.expressions), case, x)
    assert np.isfinite(y[0, :64].astype(np.float32)).all()
    assert not np.isfinite(y[0, 70:].astype(np.float32)).any()
    assert not np.isfinite(state).any()


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", WILD)
def test_products_of_gates_that_overflow_on_a_gpu(name, pieces):
    case = Case(16, 64, T=100, H=1, Hq=1, pieces=pieces)
    x, expected = wild_inputs(Family("cupy"), WILD[name], "linear")
    y, _ = launch_on_gpu(case, case.tile, x)
    assert_close(y, expected, accuracy.TOLERANCE["linear", "bfloat16"], name)


def launch_on_gpu(case: Case, tile: chunks.ChunkTile, x: dict) -> tuple:
    p, y, state = pose(case, x)
    linear.launch(p, plan.Plan("linear", "float32", tile, ""), y, state, device_offsets(p))
    return y.owner, state.owner


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_on_a_gpu(case, rng):
    x = random_inputs(case, rng, Family("cupy"))
    y, state = launch_on_gpu(case, case.tile, x)
    verify(case, x, y, state, "on a GPU")
    for _ in range(20):
        again = launch_on_gpu(case, case.tile, x)
        assert (again[0] == y).all(), "other bits"
        assert (again[1] == state).all(), "other bits"


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "H"), [(64, 300), (1000, 1), (5000, 2), (200, 100)])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (48, 48), (100, 30)])
def test_the_public_function_runs_it(T, H, K, V, rng):
    from cupy_gdelta import gated_linear_attention

    x = Family("cupy").arrays(accuracy.inputs(rng, T=T, H=H, K=K, V=V), "bfloat16")
    chosen = plan.choose("linear", "bfloat16", T, H, K, V, 132)
    assert chosen.kernel == "linear"
    y, state = gated_linear_attention(**x, return_state=True)
    verify(Case(K, V, T=T, H=H), x, y, state, "called")


def test_plans_fill_the_chip_with_pieces():
    few = chunks.best_tile(32768, 4, 128, 128, 132, True, plan.SHARED_LIMIT)
    many = chunks.best_tile(4096, 4096, 128, 128, 132, True, plan.SHARED_LIMIT)
    assert few is not None
    assert many is not None
    assert many.pieces == 1
    assert few.pieces * 4 * -(-128 // few.block_cols) <= 132
    assert few.pieces >= 4
    assert few.pieces * few.piece_size >= 32768
    assert chunks.best_tile(100, 4, 200, 64, 132, True, plan.SHARED_LIMIT) is None


def test_few_tokens_go_one_by_one():
    for K, longest in ((64, 63), (24, 191)):
        kernels = [
            plan.choose("linear", "bfloat16", T, 8, K, K, 132) for T in (longest, longest + 1)
        ]
        assert [chosen.kernel for chosen in kernels] == ["recurrent", "linear"]


@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
def test_tiles_fit_into_shared_memory(limit):
    for K in (1, 16, 24, 64, 100, 128):
        for V in (1, 24, 64, 200, 256):
            tile = chunks.best_tile(1000, 64, K, V, 132, True, limit)
            assert tile is None or tile.shared_bytes <= limit
            assert tile is None or tile.threads <= 512
            assert tile is not None or limit < 163 * 1024


def test_a_tile_knows_the_kernel_s_sizes(tmp_path):
    """plan and kernel count the same threads and bytes."""
    if simt.compiler() is None:
        pytest.skip("g++ is missing")
    kernel = '#include "linear.cu"\n__global__ void sizes(int* out) {\n'
    tiles = [case.tile for case in CASES]
    for i, (case, tile) in enumerate(zip(CASES, tiles, strict=True)):
        for j, output in enumerate(("true", "false")):
            shape = f"Shape<{case.K}, {case.V}, {tile.block_cols}, {tile.stages}"
            at = 4 * i + 2 * j
            kernel += f"out[{at}] = {shape}, {output}>::kThreads;\n"
            kernel += f"out[{at + 1}] = 2 * {shape}, {output}>::kNumbers + kDecays * "
            kernel += "(int)sizeof(Decay) + (int)sizeof(GateRing);\n"
    path = Path(tmp_path) / "sizes.cu"
    for source in loader.folder().glob("*.cu*"):
        shutil.copy(source, tmp_path)
    path.write_text(kernel + "}\n")
    out = np.zeros(4 * len(tiles), np.int32)
    simt.Kernels(path, ["sizes"]).launch("sizes", 1, 1, 0, [out])
    expected = [
        n for t in tiles for n in (t.threads, t.shared_bytes, t.state_threads, t.state_bytes)
    ]
    assert out.tolist() == expected
