"""cuda/delta.cu: the chunked delta rule, on the CPU with every access followed, and on a GPU.

The GPU tests named test_case_* are small enough for compute-sanitizer.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from compare import assert_close, host
from conftest import Family
from host import simt

from cupy_gdelta import accuracy, reference

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import (
    device_offsets,
    needs_compiler,
    on_host,
    pose,
    random_inputs,
    verify,
    verify_in_every_order,
    where_every_lane_arrives,
)
from wild import WILD, wild_inputs

from cupy_gdelta.gpu import delta, delta_tile, loader, plan

SOURCE = loader.folder() / "delta.cu"


@dataclass(frozen=True)
class Case:
    K: int
    V: int
    T: int = 150
    B: int = 1
    H: int = 2
    Hq: int = 2
    wide: bool = True
    block_cols: int = 0  # 0 is the plan's own choice
    gate: str = "zeros among"
    options: dict = field(default_factory=dict, hash=False)
    rule: str = "delta"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        unit = "-unit" if self.unit else ""
        return f"{self.K}x{self.V}-T{self.T}-{self.gate}{unit}"

    @property
    def unit(self) -> bool:
        return self.options.get("qk_l2norm", False)

    @property
    def tile(self) -> delta_tile.DeltaTile:
        tile = delta_tile.best_tile(1000, 1000, self.K, self.V, 132, self.wide, plan.SHARED_LIMIT)
        assert tile is not None
        return replace(tile, block_cols=self.block_cols or tile.block_cols)

    @property
    def expression(self) -> str:
        return delta.expression(self.K, self.V, self.tile, self.unit)


CASES = [
    Case(64, 64),
    Case(64, 64, T=0),
    Case(24, 40, T=1, gate="one"),
    Case(64, 64, T=64, gate="zero", block_cols=32),
    Case(128, 128, T=129, gate="negative", Hq=1),
    Case(128, 32, T=200, gate="one", options={"qk_l2norm": True}),
    Case(16, 16, T=63, gate="0.2", B=3),
    Case(40, 17, wide=False, gate="1e-37"),
    Case(9, 3, T=65, wide=False, gate="0.9995"),
    Case(33, 70, T=300, wide=False, gate="random", options={"qk_l2norm": True}),
    Case(64, 64, T=300, options={"cu_seqlens": [0, 5, 5, 200, 290], "scale": 0.5}),
    Case(96, 64, T=100, Hq=1, gate="negative"),
]


def run_on_host(kernels: simt.Kernels, case: Case, x: dict, **how) -> tuple[np.ndarray, np.ndarray]:
    """Launch on NumPy arrays as gpu.delta.launch does on CuPy's."""
    p, y, state, call, reads, writes = on_host(case, x)
    tile, blocks = case.tile, p.N * p.H * -(-case.V // case.tile.block_cols)
    how |= {"reads": reads, "writes": writes}
    kernels.launch(case.expression, blocks, tile.threads, tile.shared_bytes, [call], **how)
    return y, state


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    return simt.Kernels(SOURCE, list(dict.fromkeys(case.expression for case in CASES)))


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


@needs_compiler
@pytest.mark.parametrize("unit", [False, True])
def test_every_lane_may_arrive(unit, tmp_path, rng):
    case = Case(72, 24, T=200, options={"qk_l2norm": unit})
    kernels = simt.Kernels(where_every_lane_arrives(tmp_path) / "delta.cu", [case.expression])
    x = random_inputs(case, rng, Family("numpy"))
    verify(case, x, *run_on_host(kernels, case, x, check=True), "every lane")


PLANTS = [
    *[("delta.cu", "__syncthreads();", ";", i) for i in range(4)],
    *[("delta.cu", "__syncwarp();", ";", i) for i in range(2)],
    ("delta.cu", "cp_async_wait<GateRing::kSlots - 2>();", ";", 0),
    ("delta.cu", "cp_async_wait<kStages - 3>();", ";", 0),
    ("delta_tiles.cuh", "__syncwarp();", ";", 0),
    *[("inverse.cuh", "__syncwarp();", ";", i) for i in range(3)],
    *[("inverse.cuh", "meet_apart<kInverters>(", "(void)(", i) for i in range(2)],
]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant[0]}-{plant[1]}-{plant[3]}")
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
    case = Case(64, 64, T=400, H=1, Hq=1, options={"qk_l2norm": True})  # seven chunks
    broken = simt.Kernels(tmp_path / "delta.cu", [case.expression])
    x = random_inputs(case, rng, Family("numpy"))

    def run() -> None:
        verify(case, x, *run_on_host(broken, case, x, check=True), "planted")

    with pytest.raises((simt.Fault, AssertionError)):  # a race, or a result that is wrong
        run()


def test_every_barrier_has_its_plant():
    for file in ("delta.cu", "delta_tiles.cuh", "inverse.cuh"):
        text = (loader.folder() / file).read_text()
        for name in ("__syncthreads();", "__syncwarp();", "cp_async_wait<", "sync_threads<"):
            planted = sum(p[0] == file and p[1].startswith(name) for p in PLANTS)
            assert text.count(name) == planted, (file, name)


def repeated(rng, dtype: str, beta: float, family: Family | None = None) -> tuple[dict, np.ndarray]:
    """One unit key at every token: the state keeps (1 - beta) of its row, and takes beta v."""
    x = accuracy.inputs(rng, T=130, K=64, V=16, H=1, gate="one")
    x["k"][...] = np.eye(64)[3]
    x["beta"] = np.full_like(x["beta"], beta)
    x = (family or Family("numpy")).arrays(x, dtype)
    return x, reference.gated_delta_rule(**{n: host(a) for n, a in x.items()})[0]


@needs_compiler
@pytest.mark.parametrize("beta", [1.0, 2.0, 0.5, -0.05])
def test_one_key_again_and_again(beta, rng):
    """Writes nearly cancel, all 64 of them."""
    x, expected = repeated(rng, "bfloat16", beta)
    case = Case(64, 16, T=130, H=1, Hq=1)
    y, _ = run_on_host(simt.Kernels(SOURCE, [case.expression]), case, x)
    assert_close(y, expected, accuracy.TOLERANCE["delta", "bfloat16"], "y")


def repeated_keys(
    case: Case, rng: np.random.Generator, keys: int, gate: float, family: Family
) -> tuple[dict, tuple]:
    """The same few keys by turns, all written twice over: nothing is ever forgotten."""
    x = accuracy.inputs(rng, T=case.T, K=case.K, V=case.V, H=1, gate="one")
    own = np.linalg.qr(rng.standard_normal((case.K, keys)))[0].T
    x["k"][0, :, 0] = own[np.arange(case.T) % keys]
    x["beta"][...], x["gate"][...] = 2, gate
    x = family.arrays(x, "bfloat16")
    return x, reference.gated_delta_rule(**{n: host(a) for n, a in x.items()})


TURNED = Case(64, 16, T=600, H=1, Hq=1)


@needs_compiler
@pytest.mark.parametrize("gate", [1.0, -1.0])
@pytest.mark.parametrize("keys", [1, 2, 4])
def test_keys_that_are_turned_round_again_and_again(keys, gate, rng):
    """Rounded, they are not of length 1 to the last bit."""
    x, expected = repeated_keys(TURNED, rng, keys, gate, Family("numpy"))
    got = run_on_host(simt.Kernels(SOURCE, [TURNED.expression]), TURNED, x)
    for a, want, name in zip(got, expected, ("y", "state"), strict=True):
        assert_close(a, want, accuracy.TOLERANCE["delta", "bfloat16"], name)


WILD_CASE = Case(16, 64, T=100, H=1, Hq=1)


@needs_compiler
@pytest.mark.parametrize("name", WILD)
def test_products_of_gates_that_overflow(name):
    """A state of 0 stays 0 under any finite gate, as it does token by token."""
    x, expected = wild_inputs(Family("numpy"), WILD[name], "delta", beta=0.5)
    y, _ = run_on_host(simt.Kernels(SOURCE, [WILD_CASE.expression]), WILD_CASE, x)
    assert_close(y, expected, accuracy.TOLERANCE["delta", "bfloat16"], name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WILD)
def test_products_of_gates_that_overflow_on_a_gpu(name):
    x, expected = wild_inputs(Family("cupy"), WILD[name], "delta", beta=0.5)
    y, _ = launch_on_gpu(WILD_CASE, x)
    assert_close(y, expected, accuracy.TOLERANCE["delta", "bfloat16"], name)


def launch_on_gpu(case: Case, x: dict) -> tuple:
    p, y, state = pose(case, x)
    delta.launch(p, plan.Plan("delta", "float32", case.tile, ""), y, state, device_offsets(p))
    return y.owner, state.owner


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_on_a_gpu(case, rng):
    x = random_inputs(case, rng, Family("cupy"))
    y, state = launch_on_gpu(case, x)
    verify(case, x, y, state, "on a GPU")
    for _ in range(20):
        again = launch_on_gpu(case, x)
        assert (again[0] == y).all(), "other bits"
        assert (again[1] == state).all(), "other bits"


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "H"), [(64, 300), (1000, 1), (5000, 2), (200, 100)])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (48, 48), (100, 30)])
def test_the_public_function_runs_it(T, H, K, V, rng):
    from cupy_gdelta import gated_delta_rule

    x = Family("cupy").arrays(accuracy.inputs(rng, T=T, H=H, K=K, V=V), "bfloat16")
    assert plan.choose("delta", "bfloat16", T, H, K, V, 132).kernel == "delta"
    y, state = gated_delta_rule(**x, return_state=True)
    verify(Case(K, V, T=T, H=H), x, y, state, "called")


def test_few_tokens_and_dimensions_go_one_by_one():
    for T, K in ((63, 64), (1000, 7), (1000, 200)):
        assert plan.choose("delta", "bfloat16", T, 8, K, 64, 132).kernel == "recurrent"


@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
def test_tiles_fit_into_shared_memory(limit):
    for K in (8, 16, 24, 64, 100, 128):
        for V in (1, 24, 64, 200, 256):
            for items in (1, 64, 1000):
                tile = delta_tile.best_tile(1000, items, K, V, 132, True, limit)
                assert tile is None or tile.shared_bytes <= limit
                assert tile is None or tile.threads <= 256
                assert tile is not None or limit < (163 if K <= 64 else 227) * 1024


def test_a_tile_knows_the_kernel_s_sizes(tmp_path):
    """plan and kernel count the same threads and bytes."""
    if simt.compiler() is None:
        pytest.skip("g++ is missing")
    kernel = '#include "delta.cu"\n__global__ void sizes(int* out) {\n'
    tiles = [case.tile for case in CASES]
    for i, (case, tile) in enumerate(zip(CASES, tiles, strict=True)):
        shape = f"Shape<{case.K}, {case.V}, {tile.block_cols}, {tile.stages}>"
        kernel += f"out[{2 * i}] = {shape}::kThreads;\nout[{2 * i + 1}] = {shape}::kBytes;\n"
    path = Path(tmp_path) / "sizes.cu"
    for source in loader.folder().glob("*.cu*"):
        shutil.copy(source, tmp_path)
    path.write_text(kernel + "}\n")
    out = np.zeros(2 * len(tiles), np.int32)
    simt.Kernels(path, ["sizes"]).launch("sizes", 1, 1, 0, [out])
    assert out.tolist() == [n for t in tiles for n in (t.threads, t.shared_bytes)]
