"""cuda/linear32.cu: the chunked linear rule in float32 and float16, on the CPU with every access
followed, and on a GPU.

The GPU tests named test_case_* are small enough for compute-sanitizer.
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from compare import assert_close, check, host
from conftest import Family
from host import simt

from cupy_gdelta import accuracy, arrays, reference

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import (
    assert_a_gate_shows,
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

from cupy_gdelta.gpu import chunks32, linear32, loader, plan

SOURCE = loader.folder() / "linear32.cu"


@dataclass(frozen=True)
class Case:
    K: int
    V: int
    T: int = 150
    B: int = 1
    H: int = 2
    Hq: int = 2
    wide: int = chunks32.VECTORS
    engine: bool = True
    pieces: int = 1
    products: str = "kThree"
    gate: str = "zeros among"
    log: bool = False
    narrow_gates: bool = False
    tile_options: dict = field(default_factory=dict, hash=False)
    options: dict = field(default_factory=dict, hash=False)
    rule: str = "linear"
    dtype: str = "float32"

    def __str__(self) -> str:
        sizes = f"{self.dtype}-{self.K}x{self.V}-T{self.T}"
        return f"{sizes}-{self.gate}-{self.products}-pieces{self.pieces}"

    @property
    def tile(self) -> chunks32.Tile32:
        sizes = (1000, 1000, self.K, self.V, 132, self.wide > 1)
        precision = "tf32" if self.products == "kOne" else "highest"
        how = (precision, plan.SHARED_LIMIT, self.dtype, self.engine and self.wide > 1)
        tile = chunks32.best_tile(*sizes, *how)
        assert tile is not None
        assert tile.wide == (chunks32.BOXES if self.engine and self.wide > 1 else self.wide)
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
        if self.narrow_gates:
            narrow = [n for n in ("gate", "log_gate", "beta") if n in x]
            x |= {n: x[n].astype(self.dtype) for n in narrow}
        return x

    def verify(self, x: dict, y, state, what: str) -> None:
        """At the tolerance of the products."""
        dtype = "tf32" if (self.dtype, self.products) == ("float32", "kOne") else self.dtype
        verify(replace(self, dtype=dtype), x, y, state, what)


SHALLOW = {"turns": 2, "stages": 3, "slots": 2}
BOXES = Case(16, 16, T=400, H=1, Hq=1, tile_options=SHALLOW)
VECTORS = replace(BOXES, engine=False)
PACKED = replace(BOXES, options={"cu_seqlens": [0, 100, 390]})
ONE_BLOCK = {"out_rows": 16}
CASES = [
    Case(64, 64),
    Case(24, 24),
    Case(24, 24, T=300, gate="random", products="kOne", Hq=1),
    Case(64, 64, T=100, gate="0.9995", products="kOne", log=True),
    Case(64, 64, T=0),
    Case(24, 40, T=1, gate="one"),
    Case(64, 64, T=64, gate="zero"),
    Case(64, 32, T=129, gate="negative", tile_options=ONE_BLOCK | {"out_cols": 16}),
    Case(128, 128, T=129, gate="negative", Hq=1),
    Case(16, 16, T=63, gate="0.2", B=3),
    Case(40, 17, wide=1, gate="1e-37", tile_options={"turns": 1, "stages": 3}),
    Case(1, 3, T=65, wide=1, pieces=2, gate="0.9995", log=True),
    Case(33, 70, T=300, wide=1, pieces=3, gate="random"),
    Case(64, 64, T=300, pieces=2, options={"cu_seqlens": [0, 5, 5, 200, 290], "scale": 0.5}),
    Case(96, 256, T=100, Hq=1, gate="negative", tile_options=ONE_BLOCK),
    Case(24, 24, T=200, H=1, Hq=1, tile_options=ONE_BLOCK | {"turns": 2, "stages": 5}),
    Case(24, 24, T=700, gate="random"),
    Case(64, 64, T=400, H=1, Hq=1, gate="random"),
    Case(64, 104, T=200, H=1, Hq=1, gate="random"),
    BOXES,
    VECTORS,
    PACKED,
]
HALF = {"dtype": "float16", "products": "kOne"}
EXACT = HALF | {"products": "kMixed"}
CASES += [
    Case(64, 64, **HALF),
    Case(64, 64, engine=False, **HALF),
    Case(128, 72, T=70, engine=False, **EXACT),
    Case(64, 64, T=100, gate="0.9995", log=True, **EXACT),
    Case(24, 24, T=300, gate="random", Hq=1, **EXACT),
    Case(24, 24, T=0, **HALF),
    Case(24, 40, T=1, gate="one", **HALF),
    Case(128, 128, T=129, gate="negative", Hq=1, **HALF),
    Case(96, 72, T=100, gate="one", **EXACT),
    Case(40, 17, gate="1e-37", **HALF | {"wide": 1}),
    Case(1, 3, T=65, pieces=2, gate="0.9995", log=True, **HALF | {"wide": 1}),
    Case(33, 70, T=300, pieces=3, gate="random", **EXACT | {"wide": 1}),
    Case(64, 64, T=300, pieces=2, options={"cu_seqlens": [0, 5, 5, 200, 290]}, **HALF),
    Case(8, 8, T=63, gate="0.2", B=3, **HALF),
    Case(24, 24, T=100, H=3, Hq=3, gate="random", narrow_gates=True, **EXACT),
    Case(64, 64, T=100, H=1, Hq=1, log=True, narrow_gates=True, **HALF),
    Case(64, 32, T=129, gate="zero", tile_options=ONE_BLOCK | {"out_cols": 16}, **HALF),
    Case(128, 64, tile_options=ONE_BLOCK | {"cols": 32}, **HALF),
]


def host_map(x: arrays.View) -> np.void:
    """What tests/host/hopper.h takes for a tensor map."""
    words = np.zeros(16, np.int64)
    B, T, heads, columns = x.shape
    words[:5] = [x.array.ctypes.data, columns, heads, T, B]
    words[5:10] = [*(x.strides[axis] for axis in (1, 2, 0)), chunks32.CHUNK, x.array.itemsize]
    return words.view(np.dtype((np.void, 128)))[0]


def run_on_host(kernels: simt.Kernels, case: Case, x: dict, **how) -> tuple[np.ndarray, np.ndarray]:
    """Launch on NumPy arrays as gpu.linear32.launch does on CuPy's."""
    p, y, state, call, reads, writes = on_host(case, x)
    tile, size = case.tile, p.N * p.H * p.K * p.V
    total, decays = linear32.workspace(tile, size, p.N * p.H)
    space = np.full(total // 8, np.nan)
    at = space.ctypes.data
    args = [
        call,
        linear32.pieces(tile, at, at + decays)[0],
        *(host_map(x) for x in (p.q, p.k, p.v)),
    ]
    how |= {"reads": reads, "writes": writes | {"space": space}}
    items = p.N * p.H * tile.col_blocks
    *states, output = case.expressions
    if states:
        blocks = items * (tile.pieces - 1)
        kernels.launch(states[0], blocks, tile.state_threads, tile.state_bytes, args, **how)
        kernels.launch(states[1], 2, 256, 0, [*args[:2], np.int64(p.K), np.int64(p.V)], **how)
    kernels.launch(output, items * tile.pieces, tile.threads, tile.shared_bytes, args, **how)
    return y, state


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    return simt.Kernels(SOURCE, list(dict.fromkeys(e for case in CASES for e in case.expressions)))


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


FILES = ("arrive.cuh", "linear32_shape.cuh", "linear32.cu", "linear32_feed.cuh", "decay32.cuh")
PLANTS = [  # case, text, what stands there instead, and in which of its places in FILES
    (BOXES, "shared.state_made[state.slot].wait(state.parity);", "", 0),
    (BOXES, "shared.state_free[state.slot].wait(state.parity ^ 1);", "", 0),
    (BOXES, "shared.made[stage.slot].wait(stage.parity);", "", 0),
    (BOXES, "shared.loaded[stage.slot].wait(stage.parity);", "", 0),
    (BOXES, "shared.free[stage.slot].wait(stage.parity ^ 1);", "", 0),
    (BOXES, "shared.free[stage.slot].wait(stage.parity ^ 1);", "", 1),
    (VECTORS, "shared.free[slot].wait(stage.parity ^ 1);", "", 0),
    (BOXES, "cp_async_wait<kAhead - 1>();", "", 0),
    (VECTORS, "cp_async_wait<kPending>();", "", 0),
    (BOXES, "__syncwarp();", "", 0),
    (BOXES, "__syncwarp();", "", 1),
    (BOXES, "__syncthreads();", "", 0),
    (BOXES, "(shared.free[i], S::kStateWarps + kParts);", "(shared.free[i], kParts);", 0),
]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant[1]}{plant[3]}")
def test_a_planted_fault_is_caught(plant, tmp_path, rng):
    """Every barrier and every wait of the kernel, left out one by one."""
    case, text, instead, which = plant
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, tmp_path)
    for name in FILES:
        parts = (tmp_path / name).read_text().split(text)
        if which + 1 < len(parts):
            break
        which -= len(parts) - 1
    else:
        pytest.fail(f"{text} is nowhere")
    left, right = text.join(parts[: which + 1]), text.join(parts[which + 1 :])
    (tmp_path / name).write_text(left + instead + right)
    broken = simt.Kernels(tmp_path / SOURCE.name, case.expressions)
    x = case.inputs(rng, Family("numpy"))

    def run() -> None:
        case.verify(x, *run_on_host(broken, case, x, check=True), "planted")

    with pytest.raises((simt.Fault, AssertionError)):  # a race, or a result that is wrong
        run()


def test_every_barrier_has_its_plant():
    text = "".join((loader.folder() / name).read_text() for name in FILES)
    for name in (".wait(", "cp_async_wait", "__syncwarp(", "__syncthreads("):
        assert text.count(name) == sum(name in plant[1] for plant in PLANTS), name


@needs_compiler
def test_a_nan_stays_in_its_sequence(rng):
    """Rows of the next sequence are copied along with the last ones of a sequence."""
    case = replace(PACKED, T=300, options={"cu_seqlens": [0, 40, 200, 290]})
    kernels = simt.Kernels(SOURCE, case.expressions)
    x = case.inputs(rng, Family("numpy"))
    y, state = run_on_host(kernels, case, x)
    for name in "qkv":
        x[name][:, 40:200] = np.nan
        x[name][:, 290:] = np.nan
    poisoned, states = run_on_host(kernels, case, x)
    assert np.isnan(poisoned[:, 40:200]).all()
    for own in (slice(0, 40), slice(200, 300)):
        assert (poisoned[:, own] == y[:, own]).all()
    assert (states[[0, 2]] == state[[0, 2]]).all()


def beyond_float16(family: Family, rng: np.random.Generator) -> tuple[Case, dict]:
    """Values as large as float16 has them; states and outputs are larger in part."""
    case = Case(64, 64, T=100, gate="one", **HALF)
    x = accuracy.inputs(rng, T=case.T, H=2, K=64, V=64, gate="one")
    x["v"] *= 65504 / abs(x["v"]).max()
    x["k"] *= 8
    x["initial_state"] = np.zeros((1, 2, 64, 64))
    return case, family.arrays(x, "float16")


def assert_overflows_as_numpy(x: dict, y, state) -> None:
    """y is infinite where it is too large, as in a cast of NumPy, and the state stays exact."""
    expected, last = reference.gated_linear_attention(**{n: host(a) for n, a in x.items()})
    y, tolerance = host(y), accuracy.TOLERANCE["linear", "float16"]
    assert abs(last).max() > 2 * 65504, "states do not pass float16"
    assert_close(state, last, tolerance, "state")
    fits, over = abs(expected) < 65000, abs(expected) > 66000
    assert 100 < over.sum() < over.size / 2, "too few outputs overflow, or too many"
    assert (y[over] == np.copysign(np.inf, expected[over])).all()
    assert_close(y[fits], expected[fits], tolerance, "what fits")


@needs_compiler
def test_outputs_beyond_float16(kernels, rng):
    case, x = beyond_float16(Family("numpy"), rng)
    assert_overflows_as_numpy(x, *run_on_host(kernels, case, x))


@pytest.mark.gpu
def test_outputs_beyond_float16_on_a_gpu(rng):
    case, x = beyond_float16(Family("cupy"), rng)
    assert_overflows_as_numpy(x, *launch_on_gpu(case, x))


def poisoned(case: Case, family: Family, rng: np.random.Generator, number: np.ndarray) -> dict:
    """Gates of 1, and a number of the given bits in v at token 40, column 5."""
    x = accuracy.inputs(rng, T=case.T, H=2, K=64, V=64, gate="one")
    x["initial_state"] = np.zeros((1, 2, 64, 64))
    x = family.arrays(x, case.dtype)
    x["v"][0, 40, 0, 5] = family.array(number)[0]
    return x


def assert_shows(y, state) -> None:
    """In its own column of every chunk from its own on, and nowhere else."""
    bad = ~np.isfinite(host(y))
    assert bad[0, 40:, 0, 5].all()
    bad[0, 32:, 0, 5] = False
    assert not bad.any()
    bad = ~np.isfinite(host(state))
    assert bad[0, 0, :, 5].all()
    bad[0, 0, :, 5] = False
    assert not bad.any()


ONE = {"T": 100, "gate": "one"}
POISON = [  # NaN as GPUs write it, whose bits are all ones, and as NumPy does
    (Case(64, 64, products="kOne", **ONE), np.array([0x7FFFFFFF], "u4").view("f4")),
    (Case(64, 64, **ONE), np.array([0x7FFFFFFF], "u4").view("f4")),
    (Case(64, 64, **ONE), np.array([np.nan], "f4")),
    (Case(64, 64, **ONE | HALF), np.array([0x7FFF], "u2").view("f2")),
    (Case(64, 64, **ONE | HALF), np.array([np.inf], "f2")),
    (Case(64, 64, **ONE | EXACT), np.array([np.nan], "f2")),
]


@needs_compiler
@pytest.mark.parametrize(("case", "number"), POISON, ids=str)
def test_nan_shows(case, number, rng):
    x = poisoned(case, Family("numpy"), rng, number)
    kernels = simt.Kernels(SOURCE, case.expressions)
    assert_shows(*run_on_host(kernels, case, x))


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "number"), POISON, ids=str)
def test_nan_shows_on_a_gpu(case, number, rng):
    assert_shows(*launch_on_gpu(case, poisoned(case, Family("cupy"), rng, number)))


STARTS = WILD | {"across chunks": ([1] * 30 + [1e9] * 40, 75)}
WILD_CASE = Case(16, 16, T=100, H=1, Hq=1)


@needs_compiler
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_gate_that_is_not_finite_shows(bad, rng):
    case = Case(24, 24, T=200, H=1, Hq=1, gate="0.2")
    x = case.inputs(rng, Family("numpy"))
    kernels = simt.Kernels(SOURCE, case.expressions)
    assert_a_gate_shows(case, x, bad, lambda: run_on_host(kernels, case, x))


@needs_compiler
@pytest.mark.parametrize("case", [BOXES, VECTORS], ids=str)
def test_every_lane_may_arrive(case, tmp_path, rng):
    source = where_every_lane_arrives(tmp_path) / SOURCE.name
    x = case.inputs(rng, Family("numpy"))
    case.verify(x, *run_on_host(simt.Kernels(source, case.expressions), case, x), "every lane")


@needs_compiler
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", STARTS)
def test_products_of_gates_that_overflow(name, pieces):
    """A state of 0 stays 0 under any finite gate, as it does token by token."""
    case = replace(WILD_CASE, pieces=pieces)
    x, expected = wild_inputs(Family("numpy"), STARTS[name], "linear", "float32", V=16)
    y, _ = run_on_host(simt.Kernels(SOURCE, case.expressions), case, x)
    assert_close(y, expected, accuracy.TOLERANCE["linear", "float32"], name)


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", STARTS)
def test_products_of_gates_that_overflow_on_a_gpu(name, pieces):
    x, expected = wild_inputs(Family("cupy"), STARTS[name], "linear", "float32", V=16)
    y, _ = launch_on_gpu(replace(WILD_CASE, pieces=pieces), x)
    assert_close(y, expected, accuracy.TOLERANCE["linear", "float32"], name)


@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_tiles_fit_into_shared_memory(dtype, limit):
    for K in (1, 16, 24, 64, 100, 128):
        for V in (1, 24, 64, 200, 256):
            for aligned in (True, False):
                for precision, copied in (("highest", False), ("tf32", True)):
                    sizes = (1000, 64, K, V, 132, aligned)
                    tile = chunks32.best_tile(*sizes, precision, limit, dtype, copied)
                    assert tile is None or tile.shared_bytes <= limit
                    assert tile is None or tile.threads <= 1024
                    assert tile is not None or limit < 163 * 1024


def test_every_warp_that_makes_decays_has_a_stage():
    """One without would wait for a phase that only its own chunk can bring."""
    for K, V, products, wide, dtype in itertools.product(
        (1, 24, 33, 64, 96, 128),
        (1, 24, 33, 64, 104, 256),
        ("kThree", "kOne", "kMixed"),
        (chunks32.BOXES, chunks32.VECTORS, chunks32.SINGLE),
        ("float32", "float16"),
    ):
        for tile in chunks32.shapes(K, V, products, wide, dtype):
            for each in (tile, tile.by_copy_engine()):
                assert each.stages >= each.decay_warps


def test_tiles_by_heads_and_by_what_copies():
    def chosen(dtype, heads, D, copied, precision="highest"):
        sizes = (4096, heads, D, D, 132)
        return chunks32.best_tile(*sizes, True, precision, plan.SHARED_LIMIT, dtype, copied)

    few, many = (chosen("float16", heads, 128, True) for heads in (32, 256))
    assert (few.cols, few.pieces, many.cols, many.pieces) == (32, 1, 64, 1)
    assert chosen("float16", 256, 128, False).cols == 32
    turns = [chosen("float32", 128, 64, copied, "tf32").turns for copied in (True, False)]
    assert turns == [4, 2]
    one, both = (chosen("float32", 128, 64, copied) for copied in (True, False))
    assert (one.out_cols, one.turns, both.out_cols, both.turns) == (64, 4, 32, 2)
    assert one.by_copy_engine() == one
    given = both.by_copy_engine()
    assert (given.wide, given.copy_warps, given.decay_warps) == (chunks32.BOXES, 1, 3)
    assert chosen("float32", 128, 33, True).wide == chunks32.SINGLE


@needs_compiler
def test_a_tile_knows_the_kernel_s_sizes(tmp_path):
    """Threads and bytes, as gpu.chunks32 counts them and as the kernel does."""
    source = tmp_path / "sizes.cu"
    text = f'#include "{SOURCE}"\n__global__ void sizes(int* out) {{\n'
    expected = []
    for case in CASES:
        tile = case.tile
        for output, threads, size in (
            (True, tile.threads, tile.shared_bytes),
            (False, tile.state_threads, tile.state_bytes),
        ):
            shape = linear32.expression(tile, output).replace("linear32<", "Shape<")
            at = len(expected)
            text += f"  out[{at}] = {shape}::kThreads;\n"
            text += f"  out[{at + 1}] = sizeof(Shared<{shape}>);\n"
            expected += [threads, size]
    source.write_text(text + "}\n")
    out = np.zeros(len(expected), np.int32)
    simt.Kernels(source, ["sizes"]).launch("sizes", 1, 1, 0, [out])
    assert out.tolist() == expected


def test_float16_goes_in_chunks():
    for K, shortest in ((64, 128), (24, 256)):
        for T, kernel in ((shortest - 1, "recurrent"), (shortest, "linear32")):
            assert plan.choose("linear", "float16", T, 8, K, K, 132).kernel == kernel
    for rule in ("linear", "delta"):
        assert plan.choose(rule, "float16", 1000, 8, 200, 64, 132).kernel == "recurrent"
    wide = [
        plan.choose("linear", "float16", 1000, 8, K, 40, 132, aligned).tile.wide
        for K, aligned in ((40, 16), (40, 8), (36, 16))
    ]
    assert wide == [chunks32.VECTORS, chunks32.SINGLE, chunks32.SINGLE]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.T], ids=str)  # a map has rows
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
    chosen = plan.Plan("linear32", "float32", case.tile, "")
    linear32.launch(p, chosen, y, state, device_offsets(p))
    return y.owner, state.owner


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "tf32", "float16"])
@pytest.mark.parametrize(("T", "H"), [(256, 300), (1000, 1), (5000, 2), (300, 100)])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (24, 24), (48, 48), (100, 30)])
def test_the_public_function_runs_it(T, H, K, V, precision, rng):
    from cupy_gdelta import gated_linear_attention

    kind = "float16" if precision == "float16" else "float32"
    how = {} if precision == "float16" else {"precision": precision}
    x = Family("cupy").arrays(accuracy.inputs(rng, T=T, H=H, K=K, V=V), kind)
    chosen = plan.choose("linear", kind, T, H, K, V, 132, **how)
    assert chosen.kernel == "linear32"
    tolerance = accuracy.TOLERANCE["linear", "tf32" if precision == "tf32" else kind]
    check("linear", gated_linear_attention, x, kind, tolerance=tolerance, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["one", "0.9995", "0.95", "log"])
@pytest.mark.parametrize(("H", "D"), [(1, 4), (200, 4), (200, 24), (200, 64)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_errors_of_data_of_one_sign_do_not_add_up(dtype, gate, H, D, rng):
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
    x = Family("cupy").arrays(x, dtype)
    y, state = gated_linear_attention(**x, return_state=True)
    few = sorted({0, H // 2, H - 1})  # heads compared, one by one: none may err more than allowed
    for h in few:
        mine = {n: a[:, :, h : h + 1] for n, a in x.items()}
        got = y[:, :, h : h + 1], state[:, h : h + 1]
        check("linear", lambda got=got, **_: got, mine, dtype, what=f"head {h}")
