"""cuda/linear32.cu: the chunked linear rule in float32, on the CPU with every access followed, and
on a GPU.

The GPU tests named test_case_* are small enough for compute-sanitizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from compare import check
from conftest import Family
from host import simt

from cupy_gdelta import accuracy

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import device_offsets, needs_compiler, on_host, pose, random_inputs, verify

from cupy_gdelta.gpu import chunks32, linear32, loader, plan

SOURCE = loader.folder() / "linear32.cu"
EVERY_PRODUCTS = ("kThree", "kMixed", "kOne")


@dataclass(frozen=True)
class Case:
    K: int
    V: int
    T: int = 150
    B: int = 1
    H: int = 2
    Hq: int = 2
    wide: int = 4
    pieces: int = 1
    products: str = "kThree"
    gate: str = "zeros among"
    log: bool = False
    tile_options: dict = field(default_factory=dict, hash=False)
    options: dict = field(default_factory=dict, hash=False)
    rule: str = "linear"
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.K}x{self.V}-T{self.T}-{self.gate}-{self.products}-pieces{self.pieces}"

    @property
    def tile(self) -> chunks32.Tile32:
        wide = self.wide == 4
        tile = chunks32.best_tile(
            1000, 1000, self.K, self.V, 132, wide, "highest", plan.SHARED_LIMIT
        )
        assert tile is not None
        chunk_count = (self.T + 31) // 32
        size = -(-chunk_count // self.pieces) * 32
        tile = replace(tile, products=self.products, **self.tile_options)
        return replace(tile, pieces=self.pieces, piece_size=size)

    @property
    def expressions(self) -> list[str]:
        output = linear32.expression(self.tile, True)
        if self.pieces == 1:
            return [output]
        return [linear32.expression(self.tile, False), "scan_pieces", output]

    def inputs(self, rng: np.random.Generator, family: Family) -> dict:
        x = random_inputs(self, rng, family)
        if self.log:
            x["log_gate"] = -0.01 * abs(x.pop("gate"))
        return x

    def verify(self, x: dict, y, state, what: str) -> None:
        """At the tolerance of the products."""
        dtype = "tf32" if self.products == "kOne" else self.dtype
        verify(replace(self, dtype=dtype), x, y, state, what)


TWO_STEPS = {"steps": 2, "stages": 5, "decay_warps": 2}
ONE_BLOCK = {"out_rows": 16}
CASES = [
    Case(64, 64),
    Case(24, 24),
    Case(24, 24, T=300, gate="random", products="kOne", Hq=1),
    Case(64, 64, T=100, gate="0.9995", products="kOne", log=True),
    Case(64, 64, T=0),
    Case(24, 40, T=1, gate="one"),
    Case(64, 64, T=64, gate="zero", products="kMixed"),
    Case(64, 32, T=129, gate="negative", tile_options=ONE_BLOCK | {"out_cols": 16}),
    Case(128, 128, T=129, gate="negative", Hq=1),
    Case(16, 16, T=63, gate="0.2", B=3),
    Case(40, 17, wide=1, gate="1e-37", tile_options={"steps": 1, "stages": 3, "decay_warps": 1}),
    Case(1, 3, T=65, wide=1, pieces=2, gate="0.9995", log=True),
    Case(33, 70, T=300, wide=1, pieces=3, gate="random", products="kMixed"),
    Case(64, 64, T=300, pieces=2, options={"cu_seqlens": [0, 5, 5, 200, 290], "scale": 0.5}),
    Case(96, 256, T=100, Hq=1, gate="negative", tile_options=ONE_BLOCK),
    Case(
        24,
        24,
        T=200,
        H=1,
        Hq=1,
        tile_options=ONE_BLOCK | {"steps": 2, "stages": 5, "decay_warps": 2},
    ),
]


def run_on_host(kernels: simt.Kernels, case: Case, x: dict, **how) -> tuple[np.ndarray, np.ndarray]:
    """Launch on NumPy arrays as gpu.linear32.launch does on CuPy's."""
    p, y, state, call, reads, writes = on_host(case, x)
    tile, size = case.tile, p.N * p.H * p.K * p.V
    total, decays = linear32.workspace(tile, size, p.N * p.H)
    space = np.full(total // 8, np.nan)
    at = space.ctypes.data
    args = [call, linear32.pieces(tile, at, at + decays)[0]]
    how |= {"reads": reads, "writes": writes | {"space": space}}
    items = p.N * p.H * tile.col_blocks
    *states, output = case.expressions
    if states:
        blocks = items * (tile.pieces - 1)
        kernels.launch(states[0], blocks, tile.state_threads, tile.state_bytes, args, **how)
        kernels.launch(states[1], 2, 256, 0, [*args, np.int64(p.K), np.int64(p.V)], **how)
    kernels.launch(output, items * tile.pieces, tile.threads, tile.shared_bytes, args, **how)
    return y, state


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    return simt.Kernels(SOURCE, list(dict.fromkeys(e for case in CASES for e in case.expressions)))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu_in_every_order(case, kernels, rng):
    x = case.inputs(rng, Family("numpy"))
    first = None
    for order in simt.ORDERS:
        y, state = run_on_host(kernels, case, x, order=order)
        case.verify(x, y, state, f"order {order}")
        bits = y.tobytes() + state.tobytes()
        assert first in (None, bits), "the order of threads shows in the result"
        first = bits


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_race_and_no_stray_access(case, kernels, rng):
    x = case.inputs(rng, Family("numpy"))
    y, state = run_on_host(kernels, case, x, check=True)
    case.verify(x, y, state, "checked")


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
    linear32.launch(p, plan.Plan("linear32", "float32", case.tile, ""), y, state, device_offsets(p))
    return y.owner, state.owner


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "tf32"])
@pytest.mark.parametrize(("T", "H"), [(256, 300), (1000, 1), (5000, 2), (300, 100)])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (24, 24), (48, 48), (100, 30)])
def test_the_public_function_runs_it(T, H, K, V, precision, rng):
    from cupy_gdelta import gated_linear_attention

    x = Family("cupy").arrays(accuracy.inputs(rng, T=T, H=H, K=K, V=V), "float32")
    chosen = plan.choose("linear", "float32", T, H, K, V, 132, precision=precision)
    assert chosen.kernel == "linear32"
    dtype = "tf32" if precision == "tf32" else "float32"
    tolerance = accuracy.TOLERANCE["linear", dtype]
    check("linear", gated_linear_attention, x, "float32", tolerance=tolerance, precision=precision)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["one", "0.9995", "0.95", "log"])
@pytest.mark.parametrize(("H", "D"), [(1, 4), (200, 4), (200, 24), (200, 64)])
def test_errors_of_data_of_one_sign_do_not_add_up(gate, H, D, rng):
    """Numbers that repeat: roundings are equal too, and nothing averages them out."""
    from cupy_gdelta import gated_linear_attention

    T = 16384
    numbers = 0.5 + rng.random((5, 1, 1, H, D))
    q, k, v, beta, g = np.broadcast_to(numbers, (5, 1, T, H, D))
    x = {"q": q / D, "k": k, "v": v, "beta": beta[..., 0] / 100}
    if gate == "log":
        x["log_gate"] = -1e-3 * g[..., 0]
    else:
        x["gate"] = np.full((1, T, H), {"one": 1.0}.get(gate) or float(gate))
    x = Family("cupy").arrays(x, "float32")
    y, state = gated_linear_attention(**x, return_state=True)
    few = sorted({0, H // 2, H - 1})  # heads compared, one by one: none may err more than allowed
    for h in few:
        mine = {n: a[:, :, h : h + 1] for n, a in x.items()}
        got = y[:, :, h : h + 1], state[:, h : h + 1]
        check("linear", lambda got=got, **_: got, mine, "float32", what=f"head {h}")
