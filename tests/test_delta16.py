"""cuda/delta16.cu: the chunked delta rule of small heads, on the CPU with every access followed,
and on a GPU.

The GPU tests named test_case_* are small enough for compute-sanitizer.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from compare import assert_close, check
from conftest import Family
from host import simt

from cupy_gdelta import accuracy

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import (
    assert_a_gate_shows,
    assert_a_query_stays,
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

from cupy_gdelta.gpu import delta16, delta_chunks16, loader, plan

SOURCE = loader.folder() / "delta16.cu"


@dataclass(frozen=True)
class Case:
    K: int
    V: int
    T: int = 150
    B: int = 1
    H: int = 2
    Hq: int = 2
    aligned: bool = True
    products: str = "kThree"
    gate: str = "zeros among"
    log: bool = False
    beta: tuple | None = None  # what beta is drawn from
    repeated: bool = False  # one key of unit length, again and again
    dtype: str = "float32"
    tile_options: dict = field(default_factory=dict, hash=False)
    options: dict = field(default_factory=dict, hash=False)
    rule: str = "delta"

    def __str__(self) -> str:
        return f"{self.K}x{self.V}-T{self.T}-{self.gate}-{self.dtype}-{self.products}"

    @property
    def tile(self) -> delta_chunks16.DeltaTile16:
        precision = {"kThree": "highest", "kOne": "tf32"}[self.products]
        how = (self.aligned, precision, plan.SHARED_LIMIT, self.dtype)
        tile = delta_chunks16.best_tile(1000, self.K, self.V, *how)
        assert tile is not None
        return replace(tile, **self.tile_options)

    @property
    def expression(self) -> str:
        return delta16.expression(self.tile, self.options.get("qk_l2norm", False))

    def inputs(self, rng: np.random.Generator, family: Family) -> dict:
        x = random_inputs(self, rng, family)
        if self.log:
            x["log_gate"] = -0.01 * abs(x.pop("gate"))
        if self.beta:
            x["beta"] = family.array(rng.choice(self.beta, x["beta"].shape), self.dtype)
        if self.repeated:
            x["k"][...] = x["k"][:, :1]
        return x

    def verify(self, x: dict, y, state, what: str) -> None:
        """At the tolerance of the products."""
        tf32 = self.dtype == "float32" and self.products == "kOne"
        verify(replace(self, dtype="tf32" if tf32 else self.dtype), x, y, state, what)


FEW = {"teams": 2, "decay_warps": 1, "stages": 4, "slots": 2}
CASES = [
    Case(24, 24),
    Case(24, 24, T=300, gate="random", products="kOne", Hq=1),
    Case(32, 32, T=100, gate="0.9995", products="kOne", log=True),
    Case(24, 24, T=0),
    Case(24, 32, T=1, gate="one"),
    Case(32, 24, T=16, gate="zero"),
    Case(16, 16, T=63, gate="0.2", B=3, options={"qk_l2norm": True}),
    Case(8, 32, T=65, gate="negative", tile_options={"decay_warps": 1, "teams": 3}),
    Case(30, 17, aligned=False, gate="1e-37"),
    Case(1, 3, T=65, aligned=False, gate="0.9995", log=True),
    Case(24, 24, T=300, options={"cu_seqlens": [0, 5, 5, 200, 290], "scale": 0.5}),
    Case(24, 24, T=200, H=1, Hq=1, tile_options=FEW),
    Case(24, 24, gate="one", beta=(1.0,), repeated=True),
    Case(32, 32, T=70, gate="random", beta=(0.0, 1.0, 2.0, -0.1), repeated=True),
    Case(24, 24, T=100, gate="random", dtype="float16", products="kOne", Hq=1),
    Case(16, 8, T=75, gate="0.9995", dtype="float16", products="kOne", options={"qk_l2norm": True}),
    Case(20, 31, T=50, aligned=False, gate="negative", dtype="float16", products="kOne"),
    Case(64, 64, T=300, options={"cu_seqlens": [0, 5, 5, 200, 290], "scale": 0.5}),
    Case(64, 64, T=100, gate="random", products="kOne", Hq=1),
    Case(64, 64, T=70, gate="one", beta=(0.0, 1.0, 2.0), options={"qk_l2norm": True}),
    Case(40, 64, T=150, gate="negative", B=2, tile_options={"teams": 2, "slots": 2}),
    Case(64, 24, T=65, gate="0.9995", log=True),
    Case(33, 45, T=100, aligned=False, gate="1e-37"),
    Case(64, 64, T=65, gate="random", dtype="float16", options={"qk_l2norm": True}),
    Case(48, 63, T=65, aligned=False, dtype="float16", products="kOne"),
]


def run_on_host(kernels: simt.Kernels, case: Case, x: dict, **how) -> tuple[np.ndarray, np.ndarray]:
    """Launch on NumPy arrays as gpu.delta16.launch does on CuPy's."""
    p, y, state, call, reads, writes = on_host(case, x)
    tile = case.tile
    how |= {"reads": reads, "writes": writes}
    kernels.launch(case.expression, p.N * p.H, tile.threads, tile.shared_bytes, [call], **how)
    return y, state


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    return simt.Kernels(SOURCE, list(dict.fromkeys(case.expression for case in CASES)))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu_in_every_order(case, kernels, rng):
    x = case.inputs(rng, Family("numpy"))
    verify_in_every_order(
        case, x, lambda order: run_on_host(kernels, case, x, order=order), Case.verify
    )


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_race_and_no_stray_access(case, kernels, rng):
    x = case.inputs(rng, Family("numpy"))
    y, state = run_on_host(kernels, case, x, check=True)
    case.verify(x, y, state, "checked")


PREPARE, STATE, FEED = "delta16_prepare.cuh", "delta16_state.cuh", "delta16_feed.cuh"
PLANTS = [
    ("delta16.cu", "__syncthreads();", 0),
    (PREPARE, "__syncwarp();", 0),
    (PREPARE, "shared.loaded[stage.slot].wait(stage.parity);", 0),
    (PREPARE, "shared.made[stage.slot].wait(stage.parity);", 0),
    (PREPARE, "shared.used[slot.slot].wait(slot.parity ^ 1);", 0),
    (STATE, "shared.prepared[next.slot].wait(next.parity);", 0),
    (STATE, "__syncwarp();", 0),
    ("decay16.cuh", "__syncwarp();", 0),
    (FEED, "shared.free[stage.slot + i].wait(stage.parity ^ 1);", 0),
    (FEED, "shared.free[slot].wait(stage.parity ^ 1);", 1),
    (FEED, "cp_async_wait<1>();", 0),
    (FEED, "__syncwarp();", 1),
    ("arrive.cuh", "__syncwarp();", 0),
]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: "-".join(map(str, plant)))
def test_a_planted_fault_is_caught(plant, tmp_path, rng):
    """Barriers and waits of the kernel, left out one by one."""
    name, text, which = plant
    parts = (loader.folder() / name).read_text().split(text)
    assert which + 1 < len(parts)
    planted = text.join(parts[: which + 1]) + ";" + text.join(parts[which + 1 :])
    assert_caught(name, planted, {"qk_l2norm": True}, tmp_path, rng)


@needs_compiler
def test_a_barrier_that_waits_for_no_copies_is_caught(tmp_path, rng):
    text = (loader.folder() / FEED).read_text()
    planted = text.replace(".arrive_after_copies();", ".arrive();")
    assert planted != text
    assert_caught(FEED, planted, {}, tmp_path, rng)


def assert_caught(name: str, text: str, options: dict, tmp_path, rng) -> None:
    """A race or a wrong result, where text takes the place of one of the kernel's files."""
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, tmp_path)
    (tmp_path / name).write_text(text)
    case = Case(24, 24, T=200, H=1, Hq=1, options=options)
    broken = simt.Kernels(tmp_path / "delta16.cu", [case.expression])
    x = case.inputs(rng, Family("numpy"))

    def run() -> None:
        case.verify(x, *run_on_host(broken, case, x, check=True), "planted")

    with pytest.raises((simt.Fault, AssertionError)):
        run()


@needs_compiler
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_gate_that_is_not_finite_shows(bad, rng):
    case = Case(24, 24, T=200, H=1, Hq=1, gate="0.2")
    x = case.inputs(rng, Family("numpy"))
    kernels = simt.Kernels(SOURCE, [case.expression])
    assert_a_gate_shows(case, x, bad, lambda: run_on_host(kernels, case, x))


@needs_compiler
def test_a_query_that_is_not_a_number_is_one_of_its_token(rng):
    """What it makes of the padding of a row in shared memory must not stay there."""
    case = Case(20, 24, T=400, H=1, Hq=1, options={"qk_l2norm": True})
    x = case.inputs(rng, Family("numpy"))
    kernels = simt.Kernels(SOURCE, [case.expression])
    assert_a_query_stays(case, x, lambda: run_on_host(kernels, case, x))


@needs_compiler
@pytest.mark.parametrize("case", [Case(24, 24, T=200, H=1, Hq=1)], ids=str)
def test_every_lane_may_arrive(case, tmp_path, rng):
    source = where_every_lane_arrives(tmp_path) / SOURCE.name
    x = case.inputs(rng, Family("numpy"))
    case.verify(x, *run_on_host(simt.Kernels(source, [case.expression]), case, x), "every lane")


@needs_compiler
@pytest.mark.parametrize("name", WILD)
def test_products_of_gates_that_overflow(name):
    """A state of 0 stays 0 under any finite gate, as it does token by token."""
    case = Case(16, 32, T=100, H=1, Hq=1)
    x, expected = wild_inputs(Family("numpy"), WILD[name], "delta", "float32", V=32)
    y, _ = run_on_host(simt.Kernels(SOURCE, [case.expression]), case, x)
    assert_close(y, expected, accuracy.TOLERANCE["delta", "float32"], name)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_on_a_gpu(case, rng):
    x = case.inputs(rng, Family("cupy"))
    y, state = launch_on_gpu(case, x)
    case.verify(x, y, state, "on a GPU")
    for _ in range(20):
        again = launch_on_gpu(case, x)
        assert (again[0] == y).all(), "other bits"
        assert (again[1] == state).all(), "other bits"


def launch_on_gpu(case: Case, x: dict) -> tuple:
    p, y, state = pose(case, x)
    delta16.launch(p, plan.Plan("delta16", "float32", case.tile, ""), y, state, device_offsets(p))
    return y.owner, state.owner


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "tf32"])
@pytest.mark.parametrize(("T", "H"), [(256, 300), (1000, 1), (5000, 2), (300, 100)])
@pytest.mark.parametrize(("K", "V"), [(32, 32), (64, 64), (24, 24), (30, 7), (33, 48)])
def test_the_public_function_runs_it(T, H, K, V, dtype, rng):
    from cupy_gdelta import gated_delta_rule

    stored, precision = ("float32", "tf32") if dtype == "tf32" else (dtype, "highest")
    x = Family("cupy").arrays(accuracy.inputs(rng, T=T, H=H, K=K, V=V), stored)
    chosen = plan.choose("delta", stored, T, H, K, V, 132, precision=precision)
    assert chosen.kernel == "delta16"
    tolerance = accuracy.TOLERANCE["delta", dtype]
    check("delta", gated_delta_rule, x, stored, tolerance=tolerance, precision=precision)
