"""cuda/step.cu, on the CPU in several thread orders and with every access followed; on a GPU.

The GPU tests named test_case_* are small enough for compute-sanitizer, as in test_recurrent.py.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import REFERENCE, assert_close, bits, host
from conftest import Family
from host import simt

from cupy_gdelta import accuracy, arrays, step_problem

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import needs_compiler

from cupy_gdelta.gpu import loader, step, step_tile

SOURCE = loader.folder() / "step.cu"
NAN = float("nan")
FEW = 1  # multiprocessors, for the tiles that many heads have


@dataclass(frozen=True)
class Case:
    rule: str
    dtype: str
    kept: str
    K: int
    V: int
    T: int = 1
    B: int = 2
    H: int = 2
    Hq: int = 2
    gate: str = "zeros among"
    rows: tuple[int, ...] = ()  # state_indices, for a pool of one row more than the highest
    states_out: bool = False
    options: dict = field(default_factory=dict, hash=False)
    prepare: Callable = field(default=dict, hash=False)  # inputs -> the inputs passed

    def __str__(self) -> str:
        return f"{self.rule}-{self.dtype}-{self.kept}-{self.K}x{self.V}-T{self.T}"

    def inputs(self, rng: np.random.Generator, family: Family) -> dict:
        """q, k, v, gate, beta, state, state_indices, states_out and out, poisoned where written."""
        sizes = {n: getattr(self, n) for n in ("B", "T", "H", "Hq", "K", "V", "gate")}
        x = family.arrays(accuracy.inputs(rng, **sizes), self.dtype)
        pool = max(self.rows) + 2 if self.rows else self.B
        head = (self.H, self.K, self.V)
        x["state"] = family.array(rng.standard_normal((pool, *head)), self.kept)
        x["state_indices"] = family.array(np.array(self.rows, np.int32)) if self.rows else None
        if self.states_out:
            x["states_out"] = family.array(np.full((self.B, self.T, *head), NAN), self.kept)
        x["out"] = family.array(np.full((self.B, self.T, self.H, self.V), NAN), self.dtype)
        return self.prepare(x)

    def check(self, x: dict) -> step_problem.StepProblem:
        return step_problem.check("test", self.rule, **x, **self.options)


def logarithms(x: dict) -> dict:
    """Logarithms of the gates instead, float32 or of the dtype of q."""
    gate = x.pop("gate")
    return x | {"gate": None, "log_gate": -1e-3 * abs(gate)}


def narrow(x: dict) -> dict:
    """Gate and beta in the dtype of q."""
    return x | {n: x[n].astype(x["q"].dtype) for n in ("gate", "beta")}


def absent(x: dict) -> dict:
    return x | {"gate": None, "beta": None}


def strided(x: dict) -> dict:
    """Nothing contiguous, nothing aligned: heads apart, a state inside a larger one, reversed."""
    xp = sys.modules[type(x["q"]).__module__.partition(".")[0]]

    def inside(a: Any) -> Any:
        larger = xp.full([n + 3 for n in a.shape], 7, a.dtype)
        view = larger[(slice(1, -2),) * a.ndim]
        view[...] = a
        return view

    x = {n: a if a is None else inside(a) for n, a in x.items()}
    return x | {
        "v": x["v"][:, :, :, ::-1],
        "beta": xp.broadcast_to(x["beta"][:, :, :1], x["gate"].shape),
    }


def transposed(x: dict) -> dict:
    """States kept as [V, K], heads last."""
    xp = sys.modules[type(x["q"]).__module__.partition(".")[0]]
    state = xp.asfortranarray(x["state"])
    out = xp.full(x["out"].shape[::-1], NAN, x["out"].dtype).transpose()
    return x | {"state": state, "out": out}


def wide_rows(x: dict) -> dict:
    """Heads before entries, rows 16 bytes longer than V."""
    xp = sys.modules[type(x["q"]).__module__.partition(".")[0]]
    P, H, K, V = x["state"].shape
    larger = xp.full((H, P, K, V + 16 // x["state"].itemsize), 9, x["state"].dtype)
    state = larger.transpose(1, 0, 2, 3)[..., :V]
    state[...] = x["state"]
    return x | {"state": state}


CASES = [
    Case("linear", "float32", "float32", 24, 24),
    Case("delta", "float32", "float32", 24, 24, T=3, gate="negative", states_out=True),
    Case("linear", "float32", "float32", 64, 64, T=16, Hq=1, B=1),
    Case("delta", "bfloat16", "float32", 128, 128, H=1, Hq=1, options={"qk_l2norm": True}),
    Case("delta", "bfloat16", "bfloat16", 64, 96, T=2, rows=(3, -1, 0), B=3, H=4),
    Case("linear", "float16", "float16", 40, 17, T=2, B=3, rows=(2, 0, 9)),
    Case("linear", "bfloat16", "float16", 9, 24, rows=(-1, -1)),
    Case("delta", "bfloat16", "bfloat16", 128, 128, H=1, Hq=1, states_out=True),
    Case("linear", "bfloat16", "bfloat16", 128, 72, B=3, H=2, Hq=1, rows=(1, 0, 4)),
    Case("delta", "float32", "float16", 40, 24, options={"qk_l2norm": True, "scale": 0.3}),
    Case("linear", "float16", "float16", 33, 17),
    Case("delta", "float16", "bfloat16", 33, 8, T=5, options={"qk_l2norm": True, "scale": 0.3}),
    Case("linear", "float64", "float64", 33, 1, T=2),
    Case("delta", "float64", "float64", 1, 1, gate="1e-37", T=4),
    Case("delta", "float64", "float64", 70, 40, T=2, states_out=True, rows=(1, 0)),
    Case("delta", "float32", "float32", 256, 100, B=1, H=1, Hq=1),
    Case("linear", "float32", "bfloat16", 3, 256, T=2),
    Case("linear", "float32", "float32", 200, 1, T=3, states_out=True),
    Case("linear", "float32", "float32", 8, 8, T=2, prepare=logarithms),
    Case("delta", "bfloat16", "float32", 24, 16, T=2, prepare=lambda x: logarithms(narrow(x))),
    Case("delta", "float16", "float32", 16, 40, prepare=narrow),
    Case("linear", "float64", "float64", 24, 24, prepare=absent),
    Case("delta", "float32", "float32", 24, 24, T=3, states_out=True, prepare=strided),
    Case("linear", "float16", "bfloat16", 16, 24, T=2, rows=(4, 1), prepare=strided),
    Case("delta", "float32", "float32", 24, 32, T=2, prepare=transposed),
    Case("linear", "float32", "float32", 20, 24, rows=(2, 0), prepare=wide_rows),
]


def expression(p: step_problem.StepProblem) -> str:
    """The instantiation for a problem whose arrays have addresses."""
    how = (p.rule, p.dtype, p.state.dtype, p.T, p.qk_l2norm, p.K, p.V)
    return step.expression(*how, step.chosen(p, FEW))


def run_on_host(kernels: simt.Kernels, case: Case, x: dict, **how: Any) -> None:
    """Launch on NumPy arrays as the GPU path does on CuPy's."""
    rows = x["state_indices"]
    p = case.check(x | {"state_indices": None if rows is None else [-1] * case.B})
    tile, sums = step.chosen(located(p), FEW), arrays.state_dtype(p.dtype)
    indices = None if rows is None else arrays.take(rows)  # which nobody has checked
    views = (p.q, p.k, p.v, p.gate, p.beta, indices, p.out, p.state, p.states_out)
    address = [0 if v is None else v.array.ctypes.data for v in views]
    packed = step.POINTERS.pack(*address) + step.sizes(p, p.out, indices)
    names = ("q", "k", "v", "gate", "beta", "indices", "y", "state", "states_out")
    memory = {n: v.array for n, v in zip(names, views, strict=True) if v is not None}
    kernels.launch(
        expression(located(p)),
        (case.H * -(-case.V // tile.block_cols), 2, -(-case.B // 2)),  # some blocks too many
        tile.threads,
        tile.shared_bytes(p.T, sums),
        [np.frombuffer(packed, np.dtype((np.void, step.BYTES)))[0]],
        reads={n: a for n, a in memory.items() if n not in names[6:]},
        writes={n: a for n, a in memory.items() if n in names[6:]},
        **how,
    )


def located(p: step_problem.StepProblem) -> step_problem.StepProblem:
    """The same with the addresses that arrays have on the CPU."""
    views = {n: v for n, v in vars(p).items() if isinstance(v, arrays.View)}
    return replace(p, **{n: replace(v, ptr=v.array.ctypes.data) for n, v in views.items()})


def verify(case: Case, before: dict, x: dict, what: str) -> None:
    """Compare y, the states and the states after each token with the reference."""
    p = {n: before[n] for n in ("q", "k", "v", "gate", "beta")}
    p = {n: a if a is None else host(a) for n, a in p.items()}
    if before.get("log_gate") is not None:
        p = p | {"gate": None, "log_gate": host(before["log_gate"])}
    rows = np.array(case.rows or range(case.B))
    live = np.flatnonzero(rows >= 0)
    pool, after = host(before["state"]), host(x["state"])
    p = {n: a if a is None else a[live] for n, a in p.items()}
    y, state = REFERENCE[case.rule](**p, initial_state=pool[rows[live]], **case.options)
    tolerance = accuracy.TOLERANCE[case.rule, case.dtype]
    kept = max(tolerance, {"bfloat16": 3.5e-3, "float16": 6e-4}.get(case.kept, 0))
    out = host(x["out"])
    if len(live):
        assert_close(out[live], y, tolerance, f"{case} {what} y")
        assert_close(after[rows[live]], state, kept, f"{case} {what} state")
    assert not out[rows < 0].any(), "y of padding"
    others = np.setdiff1d(range(len(pool)), rows)
    assert np.array_equal(after[others], pool[others]), "a row that nobody owns was written"
    for t in range(case.T) if case.states_out else ():
        part = {n: a if a is None else a[:, : t + 1] for n, a in p.items()}
        _, state = REFERENCE[case.rule](**part, initial_state=pool[rows[live]], **case.options)
        assert_close(host(x["states_out"])[live, t], state, kept, f"{case} {what} token {t}")


def copied(x: dict) -> dict:
    return {n: a if a is None else a.copy() for n, a in x.items()}


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    rng = np.random.default_rng(0)
    found = [expression(located(case.check(case.inputs(rng, Family("numpy"))))) for case in CASES]
    return simt.Kernels(SOURCE, list(dict.fromkeys(found)))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu_in_every_order(case, kernels):
    first = None
    for order in simt.ORDERS:
        x = case.inputs(np.random.default_rng(0), Family("numpy"))
        before = copied(x)
        run_on_host(kernels, case, x, order=order)
        verify(case, before, x, f"order {order}")
        found = bits(x["out"], x["state"])
        assert first in (None, found), "the order of threads shows in the result"
        first = found


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_race_and_no_stray_access(case, kernels, rng):
    x = case.inputs(rng, Family("numpy"))
    before = copied(x)
    run_on_host(kernels, case, x, check=True)
    verify(case, before, x, "checked")


@needs_compiler
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_rows_out_of_range_are_padding(kind, kernels, rng):
    case = CASES[5]
    x = case.inputs(rng, Family("numpy"))
    P = len(x["state"])
    before = copied(x)
    for rows in ([1, P, -2], [P + 7, 0, -(2**31)], [2**31 - 1, P - 1, 3]):
        x = copied(before) | {"state_indices": None}
        x["state_indices"] = np.array(rows, kind)
        run_on_host(kernels, replace(case, rows=tuple(rows)), x, check=True)
        known = [n if 0 <= n < P else -1 for n in rows]
        verify(replace(case, rows=tuple(known)), before, x, "out of range")


def planted(folder: Path, old: str, new: str, which: int = 0) -> Path:
    """The kernel with one of its parts replaced."""
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, folder)
    parts = (folder / "step.cu").read_text().split(old)
    head, tail = parts[: which + 1], parts[which + 1 :]
    (folder / "step.cu").write_text(new.join([old.join(head), old.join(tail)]))
    return folder / "step.cu"


BARRIER = "__syncthreads();"
FAULTS = {
    "no barrier after the tokens": (BARRIER, ";", 0),
    "no barrier after the sums": (BARRIER, ";", 1),
    "sums of all tokens in one place": ("shared + t % 2 * kSums", "shared", 0),
    "tokens over the sums of odd tokens": ("shared + 2 * kSums", "shared + kSums", 0),
}
SHORT = [Case(rule, "bfloat16", "bfloat16", 100, 24) for rule in ("linear", "delta")]
LONG = [Case(rule, "float32", "float32", 100, 24, T=3) for rule in ("linear", "delta")]


def test_every_barrier_is_among_the_faults():
    assert SOURCE.read_text().count(BARRIER) == sum(old == BARRIER for old, *_ in FAULTS.values())


@needs_compiler
@pytest.mark.parametrize("case", [*LONG, *SHORT], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, case, tmp_path, rng):
    if case.T == 1 and "barrier" not in fault:
        pytest.skip("one token has one place")
    x = case.inputs(rng, Family("numpy"))
    kernel = simt.Kernels(planted(tmp_path, *FAULTS[fault]), [expression(located(case.check(x)))])
    with pytest.raises(simt.Fault, match=r"race|nobody has written"):
        run_on_host(kernel, case, x, check=True)


@needs_compiler
@pytest.mark.parametrize(
    ("kept", "K", "T"), [("float32", 192, 1), ("bfloat16", 124, 1), ("bfloat16", 124, 3)]
)
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_few_heads_get_the_same_bits_from_more_blocks(rule, kept, K, T, monkeypatch):
    case = Case(rule, "bfloat16", kept, K, 64, T=T, B=1, H=1, Hq=1)
    before = case.inputs(np.random.default_rng(0), Family("numpy"))
    p = located(case.check(before))
    tiles = [step.chosen(p, multiprocessors) for multiprocessors in (1, 2, 200)]
    assert len(set(tiles)) > 1
    assert len({tile.slots for tile in tiles}) == 1
    how = (rule, "bfloat16", kept, T, False, K, 64)
    kernels = simt.Kernels(SOURCE, list({step.expression(*how, tile): 0 for tile in tiles}))
    seen = set()
    for tile in tiles:
        monkeypatch.setattr(step, "best_tile", lambda *_, tile=tile: tile)
        x = copied(before)
        run_on_host(kernels, case, x)
        verify(case, before, x, str(tile))
        seen.add(bits(x["out"], x["state"]))
    assert len(seen) == 1


def run_on_gpu(case: Case, x: dict) -> None:
    from cupy_gdelta import gpu

    p = case.check(x)
    assert gpu.advance(p, p.out) is gpu.repeat.on_cupy


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_on_a_gpu(case):
    first = None
    for i in range(10):
        x = case.inputs(np.random.default_rng(0), Family("cupy"))
        before = copied(x)
        run_on_gpu(case, x)
        if i == 0:
            verify(case, before, x, "on a GPU")
        found = bits(x["out"], x["state"])
        assert first in (None, found), "the same inputs gave other bits"
        first = found


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_every_split_of_a_state_is_right(rule, kept, T, monkeypatch):
    case = Case(rule, "bfloat16", kept, 128, 128, T=T, H=3, Hq=3)
    for wide in (1, 2, 4) if kept == "float32" else (1, 2, 4, 8):
        for lanes in (1, 4, 8, 32):
            for warps in (1, 2, 4, 8):
                tile = step_tile.StepTile(128, wide, lanes, warps)
                if tile.slots * 32 // wide < 128:  # the state would not fit a thread's registers
                    continue
                monkeypatch.setattr(step, "best_tile", lambda *_, tile=tile: tile)
                x = case.inputs(np.random.default_rng(0), Family("cupy"))
                before = copied(x)
                run_on_gpu(case, x)
                verify(case, before, x, str(tile))


SHAPES = [
    (1, 1),
    (1, 256),
    (256, 1),
    (24, 24),
    (33, 70),
    (64, 64),
    (128, 128),
    (256, 256),
    (9, 255),
]


@pytest.mark.parametrize("kept", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("K", "V"), SHAPES)
def test_tiles(K, V, packed, kept):
    sums = "float64" if kept == "float64" else "float32"
    for aligned in (arrays.ITEMSIZE[kept], 8, 16):
        tile = step_tile.best_tile(K, V, kept, packed, aligned, 10**6, 132)
        assert tile.wide * arrays.ITEMSIZE[kept] <= max(aligned, arrays.ITEMSIZE[kept])
        assert V % tile.wide == 0
        assert tile.lanes * tile.wide < 2 * V or tile.lanes == 1
        assert step_tile.most_shared(tile, sums) <= 99 * 1024  # what every GPU has
        words = {"float64": 2, "bfloat16": 0.5 if packed and tile.wide > 1 else 1}.get(kept, 1)
        twice = (kept == "float32" and tile.wide == 4) + (K > 128)
        assert -(-K // tile.slots) * tile.wide * words <= step_tile.STATE_WORDS * 2**twice
        few = step_tile.best_tile(K, V, kept, packed, aligned, 1, 132)
        assert few.slots == tile.slots  # so that the bits are the same
        assert few.wide == tile.wide
        assert few.warps % 2 == 1 or few.lanes == 1 or -(-V // few.block_cols) >= 99


def test_tiles_of_128_columns():
    def split(*given):
        tile = step_tile.best_tile(128, 128, *given)
        return tile.wide, tile.lanes, tile.warps, tile.resident

    for heads, multiprocessors in ((256 * 32, 132), (50, 132), (32, 80)):
        assert split("float32", True, 16, heads, multiprocessors) == (4, 16, 4, 3)
        assert split("bfloat16", True, 16, heads, multiprocessors) == (8, 8, 4, 6)
    assert split("float32", True, 16, 32, 132) == (4, 8, 2, 6)
    assert split("bfloat16", True, 16, 32, 132) == (8, 4, 2, 12)
    assert split("float32", False, 16, 1, 132) == (4, 4, 1, 12)
