"""cuda/delta32.cu: the chunked delta rule, on the CPU with every access followed, and on
a GPU.

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

from cupy_gdelta.gpu import delta32, delta_chunks32, loader, plan

SOURCE = loader.folder() / "delta32.cu"


@dataclass(frozen=True)
class Case:
    K: int
    V: int
    T: int = 150
    B: int = 1
    H: int = 2
    Hq: int = 2
    wide: int = 4
    products: str = "kThree"
    gate: str = "zeros among"
    log: bool = False
    beta: tuple | None = None  # what beta is drawn from
    repeated: bool = False  # one key of unit length, again and again
    tile_options: dict = field(default_factory=dict, hash=False)
    options: dict = field(default_factory=dict, hash=False)
    rule: str = "delta"
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.K}x{self.V}-T{self.T}-{self.gate}-{self.dtype}-{self.products}"

    @property
    def tile(self) -> delta_chunks32.DeltaTile32:
        how = (self.wide > 1, "highest", plan.SHARED_LIMIT, self.dtype)
        tile = delta_chunks32.best_tile(1000, self.K, self.V, *how)
        assert tile is not None
        return replace(tile, products=self.products, **self.tile_options)

    @property
    def expression(self) -> str:
        return delta32.expression(self.tile, self.options.get("qk_l2norm", False))

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


ONE = {"teams": 1, "turns": 1, "slots": 2, "stages": 3}
CASES = [
    Case(64, 64),
    Case(24, 24),
    Case(24, 24, T=300, gate="random", products="kOne", Hq=1),
    Case(64, 64, T=100, gate="0.9995", products="kOne", log=True),
    Case(64, 64, T=0),
    Case(24, 40, T=1, gate="one"),
    Case(64, 64, T=64, gate="zero", products="kOne"),
    Case(64, 32, T=129, gate="negative", tile_options={"out_cols": 16, "teams": 2, "slots": 3}),
    Case(128, 128, T=129, gate="negative", Hq=1),
    Case(16, 16, T=63, gate="0.2", B=3, options={"qk_l2norm": True}),
    Case(40, 17, wide=1, gate="1e-37", tile_options={"stages": 3}),
    Case(1, 3, T=65, wide=1, gate="0.9995", log=True),
    Case(33, 70, T=200, wide=1, gate="random", products="kOne", options={"qk_l2norm": True}),
    Case(64, 64, T=300, options={"cu_seqlens": [0, 5, 5, 200, 290], "scale": 0.5}),
    Case(96, 80, T=100, Hq=1, gate="negative", tile_options={"copy_warps": 2}),
    Case(24, 24, T=200, H=1, Hq=1, tile_options=ONE),
    Case(24, 24, gate="one", beta=(1.0,), repeated=True),
    Case(64, 64, T=70, gate="one", beta=(0.0, 1.0, 2.0)),
    Case(32, 32, T=70, gate="random", beta=(0.0, 1.0, 2.0, -0.1), repeated=True),
    Case(64, 64, T=100, gate="random", dtype="float16", products="kOne", Hq=1),
    Case(64, 64, T=70, gate="0.9995", dtype="float16", log=True, options={"qk_l2norm": True}),
    Case(33, 70, T=65, wide=1, gate="negative", dtype="float16"),
    Case(128, 40, T=65, gate="random", dtype="float16", tile_options={"copy_warps": 2}),
]


def run_on_host(kernels: simt.Kernels, case: Case, x: dict, **how) -> tuple[np.ndarray, np.ndarray]:
    """Launch on NumPy arrays as gpu.delta32.launch does on CuPy's."""
    p, y, state, call, reads, writes = on_host(case, x)
    tile = case.tile
    how |= {"reads": reads, "writes": writes}
    blocks = p.N * p.H * tile.col_blocks
    kernels.launch(case.expression, blocks, tile.threads, tile.shared_bytes, [call], **how)
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


PLANTS = [
    ("delta32.cu", "__syncthreads();", 0),
    ("delta32.cu", "shared.known[slot.slot].wait(slot.parity);", 0),
    ("delta32.cu", "shared.known[slot.slot].wait(slot.parity ^ 1);", 0),
    ("delta32.cu", "shared.used[slot.slot].wait(slot.parity ^ 1);", 0),
    ("delta32.cu", "shared.prepared[slot.slot].wait(slot.parity);", 0),
    ("delta32.cu", "shared.loaded[stage.slot].wait(stage.parity);", 0),
    ("delta32.cu", "shared.made[stage.slot].wait(stage.parity);", 0),
    ("delta32_feed.cuh", "shared.free[stage.slot].wait(stage.parity ^ 1);", 0),
    ("delta32_feed.cuh", "shared.free[slot].wait(stage.parity ^ 1);", 0),
    ("delta32_feed.cuh", "sync_threads<32 * S::kCopyWarps>(1 + S::kTeams);", 0),
    ("delta32_feed.cuh", "cp_async_wait<1>();", 0),
    ("arrive.cuh", "__syncwarp();", 0),
    *[("delta32_prepare.cuh", "sync_threads<32 * kPreparers>(barrier);", i) for i in range(3)],
    *[("delta32_prepare.cuh", "__syncwarp();", i) for i in range(3)],
    *[("delta32_state.cuh", "sync_threads<32 * kParts>(barrier);", i) for i in range(2)],
]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: "-".join(map(str, plant)))
def test_a_planted_fault_is_caught(plant, tmp_path, rng):
    """Every barrier and every wait of the kernel, left out one by one."""
    name, text, which = plant
    parts = (loader.folder() / name).read_text().split(text)
    assert len(parts) == 1 + sum(plant[:2] == (name, text) for plant in PLANTS)
    planted = text.join(parts[: which + 1]) + ";" + text.join(parts[which + 1 :])
    assert_caught(name, planted, {"qk_l2norm": True}, tmp_path, rng)


@needs_compiler
def test_a_barrier_that_waits_for_no_copies_is_caught(tmp_path, rng):
    name = "delta32_feed.cuh"
    text = (loader.folder() / name).read_text()
    planted = text.replace(".arrive_after_copies();", ".arrive();")
    assert planted != text
    assert_caught(name, planted, {}, tmp_path, rng)


def assert_caught(name: str, text: str, options: dict, tmp_path, rng) -> None:
    """A race or a wrong result, where text takes the place of one of the kernel's files."""
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, tmp_path)
    (tmp_path / name).write_text(text)
    case = Case(72, 32, T=200, H=1, Hq=1, tile_options={"copy_warps": 2}, options=options)
    broken = simt.Kernels(tmp_path / "delta32.cu", [case.expression])
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
    case = Case(72, 96, T=500, H=1, Hq=1, options={"qk_l2norm": True})
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
    delta32.launch(p, plan.Plan("delta32", "float32", case.tile, ""), y, state, device_offsets(p))
    return y.owner, state.owner


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "tf32"])
@pytest.mark.parametrize(("T", "H"), [(256, 300), (1000, 1), (5000, 2), (300, 100)])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (96, 80), (100, 30), (16, 70)])
def test_the_public_function_runs_it(T, H, K, V, dtype, rng):
    from cupy_gdelta import gated_delta_rule

    stored, precision = ("float32", "tf32") if dtype == "tf32" else (dtype, "highest")
    x = Family("cupy").arrays(accuracy.inputs(rng, T=T, H=H, K=K, V=V), stored)
    chosen = plan.choose("delta", stored, T, H, K, V, 132, precision=precision)
    assert chosen.kernel == "delta32"
    tolerance = accuracy.TOLERANCE["delta", dtype]
    check("delta", gated_delta_rule, x, stored, tolerance=tolerance, precision=precision)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["one", "0.9995", "0.95", "log"])
@pytest.mark.parametrize("beta", [1.0, 0.01])
@pytest.mark.parametrize(("H", "D"), [(200, 4), (200, 24), (200, 64)])
def test_errors_of_data_of_one_sign_do_not_add_up(gate, beta, H, D, rng):
    """Numbers that repeat: roundings are equal too, and nothing averages them out."""
    from cupy_gdelta import gated_delta_rule

    T = 8192
    numbers = 0.5 + rng.random((5, 1, 1, H, D))
    q, k, v, b, g = np.broadcast_to(numbers, (5, 1, T, H, D))
    length = np.linalg.norm(k, axis=-1, keepdims=True)
    x = {"q": q / D, "k": k / length, "v": v, "beta": b[..., 0] * beta / 1.5}
    if gate == "log":
        x["log_gate"] = -1e-3 * g[..., 0]
    else:
        x["gate"] = np.full((1, T, H), {"one": 1.0}.get(gate) or float(gate))
    x = Family("cupy").arrays(x, "float32")
    y, state = gated_delta_rule(**x, return_state=True)
    few = sorted({0, H // 2, H - 1})  # heads compared, one by one: none may err more than allowed
    for h in few:
        mine = {n: a[:, :, h : h + 1] for n, a in x.items()}
        got = y[:, :, h : h + 1], state[:, h : h + 1]
        check("delta", lambda got=got, **_: got, mine, "float32", what=f"head {h}")
