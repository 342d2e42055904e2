"""cuda/delta_sm90.cu: the delta rule on Hopper's warpgroup products and copy engine.

The GPU tests named test_case_* are small enough for compute-sanitizer.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from compare import REFERENCE, assert_close, bits, host
from conftest import Family
from host import sass, simt

from cupy_gdelta import accuracy, arrays, gated_delta_rule

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import (
    device_offsets,
    laid_out,
    needs_compiler,
    on_host,
    pose,
    random_inputs,
    verify,
    verify_in_every_order,
    where_every_lane_arrives,
)
from test_delta import repeated, repeated_keys
from test_linear_sm90 import hopper, host_map
from wild import WILD, wild_inputs

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
        queued = self.pieces == 1 and "cu_seqlens" in self.options
        return replace(tile, pieces=-(-chunks // size), piece_size=size * 64, queued=queued)

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
    states = np.full(p.N * p.H * tile.pieces * tile.states, np.nan, np.float32)
    arrivals = np.zeros(items * tile.keepers, np.uint32)
    cut = delta_sm90.pieces(p, tile, states.ctypes.data, arrivals.ctypes.data)[0]
    maps = [host_map(np.asarray(a)) for a in (x["q"], x["k"], x["v"], y)]
    grid = items if tile.pieces > 1 else min(items, grid or items)
    shared = tile.shared_bytes
    kernels.launch(case.expression, grid, tile.threads, shared, [args, cut, *maps], **how)
    return y, state


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    names = dict.fromkeys(case.expression for case in WHOLE + PIECES)
    return simt.Kernels(loader.folder() / "delta_sm90.cu", list(names))


@needs_compiler
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_on_the_cpu_in_every_order(case, kernels, rng):
    x = random_inputs(case, rng, Family("numpy"))
    verify_in_every_order(case, x, lambda order: on_this_cpu(kernels, case, x, grid=3, order=order))


@needs_compiler
@pytest.mark.parametrize("case", [WHOLE[0], PIECES[0]], ids=str)
def test_every_lane_may_arrive(case, tmp_path, rng):
    source = where_every_lane_arrives(tmp_path) / "delta_sm90.cu"
    x = random_inputs(case, rng, Family("numpy"))
    y, state = on_this_cpu(simt.Kernels(source, [case.expression]), case, x)
    verify(case, x, y, state, "every lane")


@needs_compiler
@pytest.mark.parametrize("case", PIECES, ids=str)
def test_pieces_on_the_cpu(case, kernels, rng):
    """Blocks come one after the other here, and so do the pieces that wait for each other."""
    x = random_inputs(case, rng, Family("numpy"))
    y, state = on_this_cpu(kernels, case, x)
    verify(case, x, y, state, "in pieces")


def forgetful_inputs(past: str, case: Case, rng: np.random.Generator) -> dict:
    """Gates that forget in five chunks, and early tokens that they do not forget well enough."""
    x = random_inputs(case, rng, Family("numpy"))
    x["gate"][...] = 0.94
    if past == "loud":
        x["v"][:, :64] *= 1e13
    elif past == "silence":  # all that is left is what early tokens left
        x["v"][:, 300:], x["gate"][:, 800:] = 0, 1
    elif past == "growth":
        x["gate"][:, 64:128] = 2
        x["v"][:, :64] *= 1e-6
    else:
        x["v"][0, 5, 0, 7] = np.nan
    return x


def verify_pieces(case: Case, x: dict, y, state, past: str) -> None:
    """Each on its own, beside its own largest output."""
    y, state = host(y), host(state)
    if past == "nan":
        assert np.isnan(y[0, 5:, 0, 7]).all()
        assert np.isnan(state[0, 0, :, 7]).all()
        x = x | {"v": np.nan_to_num(x["v"].astype(np.float32))}
    expected, last = REFERENCE["delta"](**{n: host(a) for n, a in x.items()})
    if past == "nan":
        y[:, :, 0, 7], state[:, 0, :, 7] = expected[:, :, 0, 7], last[:, 0, :, 7]
    size, bar = case.tile.piece_size, 4 * accuracy.TOLERANCE["delta", "bfloat16"]
    for at in range(0, case.T, size):
        piece = slice(at, at + size)
        assert_close(y[:, piece], expected[:, piece], bar, f"{past}, from token {at}")
    assert_close(state, last, bar, past)


PASTS = ["loud", "silence", "growth", "nan"]


@needs_compiler
@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("dim", [64, 128])
def test_what_gates_forget_is_only_left_out_where_it_is_nothing(dim, past, kernels, rng):
    """Pieces leave out early tokens by their gates alone; earlier ones find out what those were."""
    case = Case(dim, 64, T=2000, H=1, Hq=1, pieces=4)
    x = forgetful_inputs(past, case, rng)
    verify_pieces(case, x, *on_this_cpu(kernels, case, x), past)


REPEATED = Case(64, 64, T=300, H=1, Hq=1)
TURNED = Case(128, 64, T=600, H=1, Hq=1)


@needs_compiler
@pytest.mark.parametrize("gate", [0.9995, -0.9995, 1.0])
@pytest.mark.parametrize("beta", [1.0, 2.0, 0.5, -5e-4])
def test_one_key_again_and_again(beta, gate, kernels, rng):
    """Writes nearly cancel, all of them, and what outputs are made of does so too."""
    x = accuracy.inputs(rng, T=300, K=64, V=64, H=1, gate="one")
    x["k"][...] = x["k"][:, :1]
    x["beta"][...], x["gate"][...] = beta, gate
    x = Family("numpy").arrays(x, "bfloat16")
    y, state = on_this_cpu(kernels, REPEATED, x)
    expected = REFERENCE["delta"](**{n: host(a) for n, a in x.items()})
    for got, want, name in zip((y, state), expected, ("y", "state"), strict=True):
        assert_close(got, want, accuracy.CORRELATED["delta", "bfloat16"], name)


@needs_compiler
@pytest.mark.parametrize("gate", [1.0, -1.0])
@pytest.mark.parametrize("keys", [1, 2, 4])
def test_keys_that_are_turned_round_again_and_again(keys, gate, kernels, rng):
    """With beta = 2 nothing is ever forgotten; rounded keys are not of length 1 to the last bit."""
    x, expected = repeated_keys(TURNED, rng, keys, gate, Family("numpy"))
    got = on_this_cpu(kernels, TURNED, x)
    for a, want, name in zip(got, expected, ("y", "state"), strict=True):
        assert_close(a, want, accuracy.TOLERANCE["delta", "bfloat16"], name)


@hopper
@pytest.mark.parametrize("gate", [1.0, -1.0])
@pytest.mark.parametrize("keys", [1, 2, 4])
def test_keys_that_are_turned_round_again_and_again_on_a_gpu(keys, gate, rng):
    x, expected = repeated_keys(TURNED, rng, keys, gate, Family("cupy"))
    for a, want, name in zip(launch(TURNED, x), expected, ("y", "state"), strict=True):
        assert_close(a, want, accuracy.TOLERANCE["delta", "bfloat16"], name)


@needs_compiler
@pytest.mark.parametrize("beta", [1.0, 2.0, 0.5, -0.05])
def test_one_key_that_is_exact(beta, kernels, rng):
    x, expected = repeated(rng, "bfloat16", beta)
    y, _ = on_this_cpu(kernels, Case(64, 16, T=130, H=1, Hq=1), x)
    assert_close(y, expected, accuracy.TOLERANCE["delta", "bfloat16"], "y")


@needs_compiler
@pytest.mark.parametrize("name", WILD)
def test_products_of_gates_that_overflow(name, kernels):
    x, expected = wild_inputs(Family("numpy"), WILD[name], "delta", K=64, beta=0.5)
    y, _ = on_this_cpu(kernels, Case(64, 64, T=100, H=1, Hq=1), x)
    assert_close(y, expected, accuracy.TOLERANCE["delta", "bfloat16"], name)


# Waits of one block. Left out: those of stores, which come at once here, and for other blocks.
WAIT = re.compile(r"shared\.\w+\[[^;]*\]\.wait\([^;]*;|wgmma_wait<[^;]*;|\bwait_for_rests\(\);")
ROLES = ("feed", "copies", "prepare", "columns", "keep")
FILES = [f"delta_{role}_sm90.cuh" for role in ROLES]


def waits() -> list[str]:
    found = []
    for file in FILES:
        texts = WAIT.findall((loader.folder() / file).read_text())
        found += [f"{file} {i} {text}" for i, text in enumerate(texts)]
    # the keeper waits for tables as well, and whoever made them for keys
    return [x for x in found if "keep" not in x or "loaded" not in x]


def planted_cases() -> list[tuple[Case, dict]]:
    """Several chunks an item and items a block, of random keys and of much the same ones."""
    rng = np.random.default_rng(5)
    unit = UNIT | {"cu_seqlens": [0, 390, 1000]}
    cases = [
        Case(64, 64, T=1000, H=1, Hq=1, options=unit),
        Case(128, 64, T=500, H=2),
        Case(128, 64, T=1000, H=1, Hq=1, pieces=2, gate="0.2"),
    ]
    found = [(case, random_inputs(case, rng, Family("numpy"))) for case in cases]
    alike = Case(128, 64, T=600, H=1, Hq=1, gate="0.9995")
    for beta in (0.5, 1.5):  # keys that are much alike, and nearly the same
        x = random_inputs(alike, rng, Family("numpy"))
        x["k"][...] = x["k"][:, :1]
        x["beta"][...] = beta
        found.append((alike, x))
    return found


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wait", waits())
def test_a_wait_left_out_is_caught(wait, right_bits, tmp_path):
    file, which, *_ = wait.split(" ")
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, tmp_path)
    planted = tmp_path / file
    source = planted.read_text()
    at = list(WAIT.finditer(source))[int(which)]
    planted.write_text(source[: at.start()] + ";" + source[at.end() :])
    cases = planted_cases()
    names = list(dict.fromkeys(case.expression for case, _ in cases))
    broken = simt.Kernels(tmp_path / "delta_sm90.cu", names)

    def run() -> None:
        for order in simt.ORDERS:
            for (case, x), right in zip(cases, right_bits, strict=True):
                y, state = on_this_cpu(broken, case, x, grid=1, order=order)
                assert bits(y, state) == right

    with pytest.raises((simt.Fault, AssertionError)):
        run()


@pytest.fixture(scope="module")
def right_bits() -> list[str]:
    """Of planted_cases, without a fault."""
    cases = planted_cases()
    names = list(dict.fromkeys(case.expression for case, _ in cases))
    right = simt.Kernels(loader.folder() / "delta_sm90.cu", names)
    results = [on_this_cpu(right, case, x, grid=1) for case, x in cases]
    for (case, x), result in zip(cases, results, strict=True):
        verify(case, x, *result, "not planted")
    return [bits(*result) for result in results]


@needs_compiler
def test_what_planted_faults_are_looked_for_in_is_right(right_bits):
    assert len(right_bits) == len(planted_cases())


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dealt", [{}, {"pieces": 2}, {"queued": True}], ids=str)
def test_products_run_side_by_side_and_keep_their_factors(dim, dealt):
    """wgmma reads registers late: what is written into them too early shows in the result."""
    nvrtc = pytest.importorskip("host.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    if sass.disassembler() is None:
        pytest.skip("nvdisasm is missing")
    tile = keepers.best_tile(1000, 1000, dim, dim, 132, False, plan.SHARED_LIMIT)
    expression = delta_sm90.expression(replace(tile, **dealt), False)
    source = loader.source("delta_sm90")
    cubin, log = nvrtc.machine_code(source, [expression], "sm_90a", loader.OPTIONS)
    assert "C75" not in log, "the compiler makes products wait for each other"
    code = sass.disassemble(cubin)
    assert sum(name.startswith("HGMMA") for name, _ in code) >= 4 * dim // 16 + 16
    assert not sass.early_writes(code)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_tile_knows_the_kernel_s_size(dim):
    """The bytes that a tile counts are those that the kernel has, by its own static_assert."""
    nvrtc = pytest.importorskip("host.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    tile = keepers.best_tile(1000, 1000, dim, dim, 132, False, plan.SHARED_LIMIT)
    source = loader.source("delta_sm90")
    source += f"static_assert(sizeof(Shared<Shape<{dim}>, {tile.stages}>) == "
    source += f"{tile.shared_bytes - 1024});\n"
    assert nvrtc.usage(source, [delta_sm90.expression(tile, False)], "sm_90a", loader.OPTIONS)


def test_tiles_fit_into_shared_memory_and_fill_the_chip():
    for K in (33, 64, 65, 128):
        for items, T in ((1, 100_000), (4, 32768), (16, 640), (32, 8192), (256, 4096)):
            tile = keepers.best_tile(T, items, K, K, 132, False, plan.SHARED_LIMIT)
            assert tile is not None
            assert tile.K >= K
            assert tile.shared_bytes <= plan.SHARED_LIMIT
            assert tile.pieces * tile.piece_size >= T
            blocks = tile.pieces * items * tile.column_blocks
            assert tile.pieces == 1 or blocks <= 132, "all blocks run at once"
    assert keepers.best_tile(32768, 4, 128, 128, 132, False, plan.SHARED_LIMIT).pieces == 32
    assert keepers.best_tile(32768, 4, 128, 128, 132, True, plan.SHARED_LIMIT).pieces == 1
    assert keepers.best_tile(1000, 64, 129, 64, 132, False, plan.SHARED_LIMIT) is None
    assert keepers.best_tile(63, 64, 64, 64, 132, False, plan.SHARED_LIMIT) is None


def test_hopper_is_chosen_where_the_copy_engine_reads():
    for K, V, kernel in ((64, 64, "delta_sm90"), (128, 256, "delta_sm90"), (24, 64, "delta")):
        assert plan.choose("delta", "bfloat16", 4096, 64, K, V, 132, copied=True).kernel == kernel
        assert plan.choose("delta", "bfloat16", 4096, 64, K, V, 132).kernel == "delta"


@hopper
@pytest.mark.parametrize("case", WHOLE + PIECES, ids=str)
def test_case_on_a_gpu(case, rng):
    x = random_inputs(case, rng, Family("cupy"))
    y, state = launch(case, x)
    verify(case, x, y, state, "on a GPU")
    for _ in range(20):
        again = launch(case, x)
        assert (again[0] == y).all(), "other bits"
        assert (again[1] == state).all(), "other bits"


@hopper
@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("pieces", [3, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_case_of_what_gates_forget_on_a_gpu(dim, pieces, past, rng):
    import cupy

    case = Case(dim, dim, T=4096, H=3, Hq=3, pieces=pieces)
    x = forgetful_inputs(past, case, rng)
    on_device = {n: cupy.asarray(a) for n, a in x.items()}
    y, state = launch(case, on_device)
    verify_pieces(case, x, y, state, past)
    for _ in range(5):
        again = launch(case, on_device)
        assert bits(*again) == bits(y, state)


@hopper
@pytest.mark.parametrize("beta", [1.0, 2.0, 0.5, -0.05])
def test_one_key_again_and_again_on_a_gpu(beta, rng):
    x, expected = repeated(rng, "bfloat16", beta, Family("cupy"))
    y, _ = launch(Case(64, 16, T=130, H=1, Hq=1), x)
    assert_close(y, expected, accuracy.TOLERANCE["delta", "bfloat16"], "y")


@hopper
@pytest.mark.parametrize("name", WILD)
def test_products_of_gates_that_overflow_on_a_gpu(name):
    x, expected = wild_inputs(Family("cupy"), WILD[name], "delta", K=64, beta=0.5)
    y, _ = launch(Case(64, 64, T=100, H=1, Hq=1), x)
    assert_close(y, expected, accuracy.TOLERANCE["delta", "bfloat16"], name)


@hopper
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize(("T", "H", "D"), [(70, 300, 64), (8192, 2, 128), (2000, 7, 48)])
def test_the_public_function_runs_it(T, H, D, unit, rng):
    x = Family("cupy").arrays(accuracy.inputs(rng, T=T, H=H, K=D, V=D), "bfloat16")
    chosen = plan.choose("delta", "bfloat16", T, H, D, D, 132, copied=True)
    assert chosen.kernel == "delta_sm90"
    options = {"qk_l2norm": True} if unit else {}
    y, state = gated_delta_rule(**x, return_state=True, **options)
    verify(Case(D, D, T=T, H=H, options=options), x, y, state, "called")


@hopper
@pytest.mark.parametrize("layout", ["heads first", "sliced", "reversed states"])
def test_strided_arrays_are_read_in_place(layout, rng):
    case = Case(64, 64, T=333, H=6, Hq=6, B=2)
    x = random_inputs(case, rng, Family("cupy"))
    expected = gated_delta_rule(**x, return_state=True)
    strided = laid_out(x, layout)
    assert all(tensormap.fits(arrays.take(strided[n])) for n in "qkv")
    got = gated_delta_rule(**strided, return_state=True)
    for a, b in zip(got, expected, strict=True):
        assert (a == b).all()


@hopper
@pytest.mark.parametrize("D", [64, 128])
def test_a_nan_stays_in_its_sequence(D, rng):
    """However many chunks a block has had, the last one of a sequence ends where it ends."""
    import cupy

    options = {"cu_seqlens": [0, 700, 1333, 2080]}
    case = Case(D, D, T=2100, H=16, Hq=8, options=options)
    x = random_inputs(case, rng, Family("cupy"))
    y, state = launch(case, x)
    for n in ("k", "v", "q", "gate"):
        x[n][:, 700:1333] = np.nan
    for _ in range(5):
        bad_y, bad_state = launch(case, x)
        for part in (slice(0, 700), slice(1333, 2100)):
            assert (bad_y[:, part] == y[:, part]).all()
        assert (bad_state[0] == state[0]).all()
        assert (bad_state[2] == state[2]).all()
        assert cupy.isnan(bad_y[:, 700:1333].astype("float32")).all()


@hopper
def test_a_head_that_forgets_nothing_among_those_that_do(rng):
    """Its pieces wait for each other; the others' begin a little early, with no state."""
    case = Case(64, 64, T=6400, H=4, Hq=4, pieces=5, gate="random")
    x = random_inputs(case, rng, Family("cupy"))
    x["gate"][:, 1000:, 2] = 1
    x["gate"][:, :1000, 1] = 1e-3
    verify(case, x, *launch(case, x), "mixed")
