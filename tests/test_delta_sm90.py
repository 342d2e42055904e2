"""cuda/delta_sm90.cu: the delta rule on Hopper's warpgroup products and copy engine.

The GPU tests named test_case_* are small enough for compute-sanitizer.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from compare import REFERENCE, assert_close, host
from conftest import Family
from host import sass, simt

from cupy_gdelta import accuracy, arrays, gated_delta_rule

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import device_offsets, needs_compiler, on_host, pose, random_inputs, verify
from test_delta import WILD, repeated, wild_inputs
from test_linear_sm90 import host_map, hopper

from cupy_gdelta.gpu import delta_sm90, keepers, loader, plan, tensormap


@dataclass(frozen=True)
class Case:
    K: int
    V: int
    T: int = 200
    B: int = 1
    H: int = 2
    Hq: int = 2
    pieces: int = 1
    gate: str = "zeros among"
    options: dict = field(default_factory=dict, hash=False)
    rule: str = "delta"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        unit = "-unit" if self.unit else ""
        packed = "-packed" if "cu_seqlens" in self.options else ""
        return f"{self.K}x{self.V}-T{self.T}-{self.gate}-pieces{self.pieces}{packed}{unit}"

    @property
    def unit(self) -> bool:
        return self.options.get("qk_l2norm", False)

    @property
    def tile(self) -> keepers.KeeperTile:
        tile = keepers.best_tile(1000, 1000, self.K, self.V, 132, False, plan.SHARED_LIMIT)
        assert tile is not None
        chunks = -(-self.T // 64)
        size = -(-chunks // self.pieces)
        return replace(tile, pieces=-(-chunks // size), piece_size=size * 64)

    @property
    def expression(self) -> str:
        return delta_sm90.expression(self.tile, self.unit)


PACKED = {"cu_seqlens": [0, 5, 5, 200, 290], "scale": 0.5}
UNIT = {"qk_l2norm": True}
WHOLE = [
    Case(64, 64),
    Case(64, 64, T=1, gate="one"),
    Case(40, 72, T=64, gate="zero", Hq=1),
    Case(64, 64, T=300, options=PACKED),
    Case(128, 128, T=129, gate="negative", Hq=1),
    Case(128, 64, T=300, gate="random"),
    Case(96, 80, T=100, gate="1e-37", B=2),
    Case(64, 64, T=300, gate="one", options=UNIT),
    Case(128, 64, T=200, gate="0.9995", options=PACKED | UNIT | {"cu_seqlens": [0, 130, 200]}),
]
PIECES = [
    Case(64, 128, T=1200, pieces=3, gate="0.2"),
    Case(64, 64, T=900, pieces=4, gate="0.9995"),
    Case(128, 64, T=2500, H=1, Hq=1, pieces=3, gate="random"),
    Case(128, 128, T=700, pieces=3, gate="zeros among", options=UNIT),
]


def launch(case: Case, x: dict) -> tuple:
    p, y, state = pose(case, x)
    chosen = plan.Plan("delta_sm90", "float32", case.tile, "")
    delta_sm90.launch(p, chosen, y, state, device_offsets(p))
    return y.owner, state.owner


def on_this_cpu(kernels: simt.Kernels, case: Case, x: dict, grid: int = 0, **how) -> tuple:
    """Launch on NumPy arrays as delta_sm90.launch does on CuPy's, by twins of the hardware."""
    p, y, state, args, *_ = on_host(case, x)
    tile = case.tile
    items = p.N * p.H * tile.pieces * tile.column_blocks
    states = np.full(items * tile.K * keepers.COLUMNS, np.nan, np.float32)
    arrivals = np.zeros(items, np.uint32)
    cut = delta_sm90.pieces(p, tile, states.ctypes.data, arrivals.ctypes.data)[0]
    maps = [host_map(np.asarray(a)) for a in (x["q"], x["k"], x["v"], y)]
    grid = items if tile.pieces > 1 else min(items, grid or items)
    shared = tile.shared_bytes
    kernels.launch(case.expression, grid, keepers.THREADS, shared, [args, cut, *maps], **how)
    return y, state


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    names = dict.fromkeys(case.expression for case in WHOLE + PIECES)
    return simt.Kernels(loader.folder() / "delta_sm90.cu", list(names))


@needs_compiler
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_on_the_cpu_in_every_order(case, kernels, rng):
    x = random_inputs(case, rng, Family("numpy"))
    first = None
    for order in simt.ORDERS:
        y, state = on_this_cpu(kernels, case, x, grid=3, order=order)
        verify(case, x, y, state, f"order {order}")
        bits = y.tobytes() + state.tobytes()
        assert first in (None, bits), "the order of threads shows in the result"
        first = bits


@needs_compiler
@pytest.mark.parametrize("case", PIECES, ids=str)
def test_pieces_on_the_cpu(case, kernels, rng):
    """Blocks come one after the other here, and so do the pieces that wait for each other."""
    x = random_inputs(case, rng, Family("numpy"))
    y, state = on_this_cpu(kernels, case, x)
    verify(case, x, y, state, "in pieces")


REPEATED = Case(64, 64, T=300, H=1, Hq=1)


@needs_compiler
@pytest.mark.parametrize("gate", [1.0, 0.9995, -1.0])
@pytest.mark.parametrize("beta", [1.0, 2.0, 0.5, -0.05])
def test_one_key_again_and_again(beta, gate, kernels, rng):
    """Writes nearly cancel, all of them, and what outputs are made of does so too."""
    if abs(gate * (1 - beta)) > 1:
        pytest.skip("the state grows without bounds")
    x = accuracy.inputs(rng, T=300, K=64, V=64, H=1, gate="one")
    x["k"][...] = x["k"][:, :1]
    x["beta"][...], x["gate"][...] = beta, gate
    x = Family("numpy").arrays(x, "bfloat16")
    y, state = on_this_cpu(kernels, REPEATED, x)
    expected = REFERENCE["delta"](**{n: host(a) for n, a in x.items()})
    for got, want, name in zip((y, state), expected, ("y", "state"), strict=True):
        assert_close(got, want, accuracy.CORRELATED["delta", "bfloat16"], name)


@needs_compiler
@pytest.mark.parametrize("name", WILD)
def test_products_of_gates_that_overflow(name, kernels):
    x, expected = wild_inputs(Family("numpy"), name, K=64)
    y, _ = on_this_cpu(kernels, Case(64, 64, T=100, H=1, Hq=1), x)
    assert_close(y, expected, accuracy.TOLERANCE["delta", "bfloat16"], name)
