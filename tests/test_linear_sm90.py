"""cuda/linear_sm90.cu: the linear rule on Hopper's warpgroup products and copy engine.

What the kernel shares with linear.cu runs on the CPU in test_linear.py. The GPU tests named
test_case_* are small enough for compute-sanitizer.
"""

from __future__ import annotations

import mmap
import re
import shutil
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from conftest import Family, no_gpu
from host import sass, simt

from cupy_gdelta import accuracy, arrays, gated_linear_attention

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import (
    addressed,
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
from wild import WILD, wild_inputs

from cupy_gdelta.gpu import call, linear_sm90, loader, plan, tensormap, warpgroups


def _is_hopper() -> bool:
    import cupy

    return not no_gpu() and cupy.cuda.Device().compute_capability == "90"


on_hopper = pytest.mark.gpu, pytest.mark.skipif(not _is_hopper(), reason="needs a Hopper GPU")


def hopper(test):
    for mark in on_hopper:
        test = mark(test)
    return test


@dataclass(frozen=True)
class Case:
    K: int
    V: int
    T: int = 200
    B: int = 2
    H: int = 4
    Hq: int = 2
    pieces: int = 1
    gate: str = "zeros among"
    options: dict = field(default_factory=dict, hash=False)
    rule: str = "linear"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        packed = "-packed" if self.options else ""
        return f"{self.K}x{self.V}-T{self.T}-{self.gate}-pieces{self.pieces}{packed}"

    @property
    def tile(self) -> warpgroups.WarpgroupTile:
        tile = warpgroups.best_tile(1000, 1000, self.K, self.V, 132, plan.SHARED_LIMIT)
        assert tile is not None
        size = -(-((self.T + 63) // 64) // self.pieces) * 64
        queued = self.pieces == 1 and "cu_seqlens" in self.options
        return replace(tile, pieces=self.pieces, piece_size=size, queued=queued)


PACKED = {"cu_seqlens": [0, 5, 5, 200, 290], "scale": 0.5}
CASES = [
    Case(64, 64),
    Case(64, 64, T=1, gate="one"),
    Case(24, 40, T=64, gate="zero"),
    Case(8, 64, T=65, gate="negative"),
    Case(128, 128, T=700, gate="random"),
    Case(128, 128, T=129, gate="1e-37", Hq=1),
    Case(128, 64, T=300, gate="0.9995"),
    Case(64, 128, T=300, gate="0.2"),
    Case(64, 64, T=300, B=1, options=PACKED),
    Case(128, 128, T=300, B=1, options=PACKED),
    Case(64, 64, T=1000, pieces=4),
    Case(64, 64, T=3000, B=1, H=1, Hq=1, pieces=47, gate="random"),
    Case(128, 128, T=1500, pieces=5, gate="random"),
    Case(128, 128, T=900, B=1, H=2, pieces=2, gate="one"),
    Case(96, 72, T=500, B=1, pieces=8, options={"cu_seqlens": [0, 3, 3, 400, 420], "scale": -2.0}),
]


def launch(case: Case, x: dict) -> tuple:
    p, y, state = pose(case, x)
    chosen = plan.Plan("linear_sm90", "float32", case.tile, "")
    linear_sm90.launch(p, chosen, y, state, device_offsets(p))
    return y.owner, state.owner


def on_this_cpu(kernels: simt.Kernels, case: Case, x: dict, grid: int, **how) -> tuple:
    """Launch on NumPy arrays as linear_sm90.launch does on CuPy's, by twins of the hardware."""
    p, y, state, args, *_ = on_host(case, x)
    run_on_host(kernels, case, p, (x["q"], x["k"], x["v"], y), args, grid, **how)
    return y, state


def run_on_host(kernels, case: Case, p, mapped, args, grid: int, **how) -> None:
    taken = np.zeros(1, np.uint32)
    cut = linear_sm90.pieces(p, case.tile, taken.ctypes.data)[0]
    maps = [host_map(np.asarray(a)) for a in mapped]
    name = linear_sm90.expression(case.tile)
    kernels.launch(name, grid, 512, case.tile.shared_bytes, [args, cut, *maps], **how)


def host_map(x: np.ndarray) -> np.void:
    """What tests/host/hopper.h takes for a tensor map."""
    words = np.zeros(16, np.uint64)
    B, T, heads, columns = x.shape
    steps = [n // x.itemsize for n in x.strides]
    words[:8] = [x.ctypes.data, columns, heads, T, B, steps[1], steps[2], steps[0]]
    return words.view(np.dtype((np.void, 128)))[0]


WHOLE = [case for case in CASES if case.pieces == 1]


@pytest.fixture(scope="module")
def kernels() -> simt.Kernels:
    names = dict.fromkeys(linear_sm90.expression(case.tile) for case in WHOLE)
    return simt.Kernels(loader.folder() / "linear_sm90.cu", list(names))


@needs_compiler
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_on_the_cpu_in_every_order(case, kernels, rng):
    x = random_inputs(case, rng, Family("numpy"))
    verify_in_every_order(case, x, lambda order: on_this_cpu(kernels, case, x, grid=3, order=order))


@needs_compiler
def test_every_lane_may_arrive(tmp_path, rng):
    source = where_every_lane_arrives(tmp_path) / "linear_sm90.cu"
    case = WHOLE[0]
    x = random_inputs(case, rng, Family("numpy"))
    kernels = simt.Kernels(source, [linear_sm90.expression(case.tile)])
    y, state = on_this_cpu(kernels, case, x, grid=3)
    verify(case, x, y, state, "every lane")


@needs_compiler
@pytest.mark.parametrize("scale", [1.0, -2.0])
@pytest.mark.parametrize("name", WILD)
def test_products_of_gates_that_overflow_on_the_cpu(name, scale, kernels):
    case = Case(16, 64, T=100, B=1, H=1, Hq=1, options={"scale": scale})
    x, expected = wild_inputs(Family("numpy"), WILD[name], "linear")
    y, _ = on_this_cpu(kernels, case, x, grid=1)
    error = accuracy.error(y.astype(np.float64), scale * expected)
    assert error <= accuracy.TOLERANCE["linear", "bfloat16"], name


class Together:
    """A call in pieces on this CPU, each block in a process of its own, as often as it is run."""

    def __init__(self, kernels: simt.Kernels, case: Case, x: dict) -> None:
        self.kernels, self.tile, self.x = kernels, case.tile, x
        p, *written = pose(case, x)
        self.y, self.state = (shared_with_children(view.owner) for view in written)
        views = p, arrays.take(self.y), arrays.take(self.state)
        offsets = None if p.cu_seqlens is None else arrays.take(p.cu_seqlens)
        self.args = call.arguments(*map(addressed, (*views, offsets)))[0], offsets
        self.blocks = p.N * p.H * case.pieces
        words = linear_sm90.space_words(p, case.tile, self.blocks)
        self.space = shared_with_children(np.random.default_rng(0).standard_normal(words, "f4"))
        self.pieces = lambda: linear_sm90.pieces(p, case.tile, self.space.ctypes.data)[0]
        self.maps = [host_map(np.asarray(a)) for a in (*(x[n] for n in "qkv"), self.y)]

    def run(self, order: int) -> tuple:
        self.x["v"] *= -1  # what an earlier run has left is wrong now
        self.y[...] = self.state[...] = np.nan
        values = [self.args[0], self.pieces(), *self.maps]
        how = {"order": order, "together": True}
        name = linear_sm90.expression(self.tile)
        self.kernels.launch(name, self.blocks, 512, self.tile.shared_bytes, values, **how)
        return self.y, self.state


def shared_with_children(x: np.ndarray) -> np.ndarray:
    space = np.ndarray(x.shape, x.dtype, mmap.mmap(-1, max(x.nbytes, 1)))
    space[...] = x
    return space


def forgetting(past: str, pieces: int, rng, **sizes) -> tuple[Case, dict]:
    """Gates that forget most of a piece, and data of which this matters or does not."""
    sizes = {"K": 64, "V": 64, "T": 4096, "B": 1, "H": 3, "Hq": 3, **sizes}
    case = Case(**sizes, pieces=pieces, gate="one")
    x = random_inputs(case, rng, Family("numpy"))
    gate, v = x["gate"], x["v"]
    gate[:] = 0.97 if past == "short" else 0.94
    if past == "silence":  # all that is left is what early tokens left
        gate[:, :1000], gate[:, 1500:] = 1, 1
        v[:, 900:] = 0
    elif past == "loud":
        v[:, 128:192] *= 1e9
    elif past == "growth":
        gate[:, 64:128] = 3
    elif past == "zeros":
        gate[:, 500::517] = 0
    elif past == "mixed":
        gate[:, :, 1] = 1
        gate[:, :, 2:] = 0.5
    return case, x


IN_PIECES = [
    Case(64, 64, T=1000, B=1, H=2, pieces=4),
    Case(64, 64, T=1000, B=1, H=1, Hq=1, pieces=3, gate="random"),
    Case(128, 128, T=500, B=1, H=1, Hq=1, pieces=2, gate="one"),
    Case(96, 72, T=500, B=1, H=2, pieces=3, options={"cu_seqlens": [0, 3, 3, 400, 420]}),
]


@pytest.fixture(scope="module")
def kernels_of_pieces() -> simt.Kernels:
    names = dict.fromkeys(linear_sm90.expression(case.tile) for case in IN_PIECES)
    return simt.Kernels(loader.folder() / "linear_sm90.cu", list(names))


@needs_compiler
@pytest.mark.parametrize("case", IN_PIECES, ids=str)
def test_pieces_on_the_cpu(case, kernels_of_pieces, rng):
    """Whatever was in the workspace, and also where it is what an earlier call left there."""
    x = random_inputs(case, rng, Family("numpy"))
    call_ = Together(kernels_of_pieces, case, x)
    end = case.options.get("cu_seqlens", [case.T])[-1]
    used = {n: a if n == "initial_state" else a[:, :end] for n, a in x.items()}
    seen = []
    for order in (0, 1, 3):
        y, state = call_.run(order)
        verify(replace(case, T=end), used, y[:, :end], state, f"order {order}")
        assert (y[:, end:] == 0).all()
        seen.append(y.tobytes() + state.tobytes())
    assert seen[0] == seen[2], "who comes first shows in the result"


@needs_compiler
@pytest.mark.parametrize("past", ["silence", "loud", "growth", "zeros", "mixed", "short"])
def test_what_gates_forget_on_the_cpu(past, kernels_of_pieces, rng):
    case, x = forgetting(past, 3, rng, T=1920, H=2, Hq=2)
    call_ = Together(kernels_of_pieces, case, x)
    verify(case, x, *call_.run(3), past)


# What pieces wait for, and what they would read if they did not.
NEEDED = {
    "states of others": (
        "piece.wait(attempt == 0 ? kLeft : kLeftAgain)",
        "Marks{true, true, false}",
    ),
    "this call's": ("x >> 8 != cut.call || ", ""),
    "states put together": ("      wait(stage);\n", ""),
    "whether all is well": ("piece.wait(kJudged).any(kAgain)", "false"),
    "how many chunks": ("        chunks = max(chunks, shared.needed);\n", ""),
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("which", NEEDED)
def test_pieces_that_do_not_wait_are_caught(which, tmp_path, rng):
    for path in loader.folder().glob("*.cu*"):
        text = path.read_text()
        (tmp_path / path.name).write_text(text.replace(*NEEDED[which]))
    planted = sum(
        (tmp_path / path.name).read_text() != path.read_text()
        for path in loader.folder().glob("*.cu*")
    )
    assert planted == 1
    cases = [forgetting(past, 3, rng, T=1920, H=1, Hq=1) for past in ("silence", "zeros")]
    cases.append((IN_PIECES[0], random_inputs(IN_PIECES[0], rng, Family("numpy"))))
    broken = simt.Kernels(tmp_path / "linear_sm90.cu", [linear_sm90.expression(cases[0][0].tile)])

    def run() -> None:
        for case, x in cases:
            together = Together(broken, case, x)
            for order in (0, 1, 3):
                verify(case, x, *together.run(order), which)

    with pytest.raises((simt.Fault, AssertionError)):
        run()


# Waits of one block. Left out: those of stores, which come at once here; that of pieces, which take
# several blocks; the last one for decays, which the state that is waited for implies.
WAIT = re.compile(r"(?:shared\.\w+\[[^;]*\]\.wait\(|wgmma_wait<\d>\()[^;]*;")
FILES = ("feed_sm90.cuh", "queue_sm90.cuh", "state_sm90.cuh", "linear_sm90.cu")
MADE = "decays_made[table.slot].wait"


def waits() -> list[str]:
    found = []
    for file in FILES:
        texts = WAIT.findall((loader.folder() / file).read_text())
        found += [f"{file} {i} {text}" for i, text in enumerate(texts)]
    last = max(i for i, text in enumerate(found) if MADE in text)
    return [x for i, x in enumerate(found) if i != last and "state_made[first.slot]" not in x]


def odd_packed(rng) -> tuple[Case, dict]:
    """Many chunks a block, and a sequence of NaN behind another one's last chunk."""
    case = Case(64, 64, T=800, B=1, options={"cu_seqlens": [0, 390, 800]})
    x = random_inputs(case, rng, Family("numpy"))
    x["k"][:, 390:] = x["v"][:, 390:] = np.nan
    return case, x


def compare_odd(kernels: simt.Kernels, rng, order: int) -> None:
    case, x = odd_packed(rng)
    y, state = on_this_cpu(kernels, case, x, grid=1, order=order)
    half = {n: a if n == "initial_state" else a[:, :390] for n, a in x.items()}
    half["initial_state"] = x["initial_state"][:1]
    verify(replace(case, options={}), half, y[:, :390], state[:1], f"order {order}")


@needs_compiler
def test_rows_that_end_inside_a_vector(kernels, rng):
    """Tokens past the last sequence are cleared, and columns past the last one left alone."""
    options = {"cu_seqlens": [0, 70, 70, 133, 190]}
    case = Case(20, 20, T=200, B=1, options=options)
    x = random_inputs(case, rng, Family("numpy"))
    x.update({n: with_gaps(x[n]) for n in "qkv"})
    p, whole, state = pose(case, x)
    y = with_gaps(whole.owner)
    args = call.arguments(*map(addressed, (p, arrays.take(y), state, arrays.take(p.cu_seqlens))))[0]
    run_on_host(kernels, case, p, (*(x[n] for n in "qkv"), y), args, 3)
    y = y.base
    short = {n: a if n == "initial_state" else a[:, :190] for n, a in x.items()}
    verify(replace(case, T=190), short, y[:, :190, :, :20], state.owner, "with gaps")
    assert (y[:, 190:, :, :20] == 0).all()
    assert np.isnan(y[..., 20:].astype(np.float32)).all()


def with_gaps(x: np.ndarray) -> np.ndarray:
    """``x`` in rows of which each begins at a multiple of 16 bytes, with NaN between them."""
    space = np.full((*x.shape[:-1], x.shape[-1] + -x.shape[-1] % 8), np.nan, x.dtype)
    space[..., : x.shape[-1]] = x
    return space[..., : x.shape[-1]]


@needs_compiler
@pytest.mark.parametrize("order", simt.ORDERS)
def test_the_tail_of_a_sequence_is_its_own(order, kernels, rng):
    compare_odd(kernels, rng, order)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("wait", waits())
def test_a_wait_left_out_is_caught(wait, tmp_path, rng):
    file, which, *_ = wait.split(" ")
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, tmp_path)
    planted = tmp_path / file
    source = planted.read_text()
    at = list(WAIT.finditer(source))[int(which)]
    planted.write_text(source[: at.start()] + ";" + source[at.end() :])
    cases = [Case(64, 64, T=700), Case(128, 128, T=700)]
    offsets = [*range(0, 351, 70), *[350] * 9]  # nothing is copied of the last ones
    cases += [Case(64, 64, T=350, B=1, options={"cu_seqlens": offsets})]
    names = list(dict.fromkeys(linear_sm90.expression(case.tile) for case in cases))
    broken = simt.Kernels(tmp_path / "linear_sm90.cu", names)

    def run() -> None:
        for order in simt.ORDERS:
            compare_odd(broken, rng, order)
            for case in cases:
                x = random_inputs(case, rng, Family("numpy"))
                verify(case, x, *on_this_cpu(broken, case, x, grid=2, order=order), "planted")

    with pytest.raises((simt.Fault, AssertionError)):
        run()


@hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_on_a_gpu(case, rng):
    x = random_inputs(case, rng, Family("cupy"))
    y, state = launch(case, x)
    verify(case, x, y, state, "on a GPU")
    for _ in range(20):
        again = launch(case, x)
        assert (again[0] == y).all(), "other bits"
        assert (again[1] == state).all(), "other bits"


@hopper
@pytest.mark.parametrize("scale", [1.0, -2.0])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", WILD)
def test_products_of_gates_that_overflow(name, pieces, scale):
    case = Case(16, 64, T=100, B=1, H=1, Hq=1, pieces=pieces, options={"scale": scale})
    x, expected = wild_inputs(Family("cupy"), WILD[name], "linear")
    y, _ = launch(case, x)
    error = accuracy.error(y.get().astype(np.float64), scale * expected)
    assert error <= accuracy.TOLERANCE["linear", "bfloat16"], name


@hopper
@pytest.mark.parametrize("nothing", ["k", "v"])
def test_growth_of_nothing_over_many_chunks(nothing, rng):
    """The decay of a piece overflows though that of no chunk does; what it decays is 0."""
    case = Case(64, 64, T=2048, B=1, H=1, Hq=1, pieces=4, gate="one")
    x = random_inputs(case, rng, Family("cupy"))
    x["gate"][:, :512] = 1.5
    x[nothing][:, :512] = 0
    x["initial_state"][...] = 0
    y, state = launch(case, x)
    assert (y[:, :512] == 0).all()
    one = launch(replace(case, pieces=1), x)
    for a, b in zip((y, state), one, strict=True):
        assert accuracy.error(a.get().astype(np.float64), b.get().astype(np.float64)) < 3.5e-3


@hopper
def test_pieces_of_a_graph_wait_for_each_other_at_every_replay(rng):
    """Also where the workspace is as an earlier replay left it."""
    import cupy

    x = Family("cupy").arrays(accuracy.inputs(rng, B=1, T=8192, H=2, K=128, V=128), "bfloat16")
    x["initial_state"] = cupy.ones((1, 2, 128, 128), "float32")
    chosen = plan.choose("linear", "bfloat16", 8192, 2, 128, 128, 132, copied=True)
    assert chosen.tile.pieces > 1
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gated_linear_attention(**x)
        stream.begin_capture()
        y, state = gated_linear_attention(**x, return_state=True)
        graph = stream.end_capture()
        for i in range(20):
            x["v"] *= -1
            x["initial_state"] *= -1
            expected = gated_linear_attention(**x, return_state=True)
            y.fill(0)
            graph.launch(stream)
            stream.synchronize()
            assert (y == expected[0]).all(), f"replay {i}"
            assert (state == expected[1]).all(), f"replay {i}"


@hopper
@pytest.mark.parametrize(("T", "H", "D"), [(70, 300, 64), (8192, 2, 128), (2000, 7, 48)])
def test_the_public_function_runs_it(T, H, D, rng):
    x = Family("cupy").arrays(accuracy.inputs(rng, T=T, H=H, K=D, V=D), "bfloat16")
    chosen = plan.choose("linear", "bfloat16", T, H, D, D, 132, copied=True)
    assert chosen.kernel == "linear_sm90"
    y, state = gated_linear_attention(**x, return_state=True)
    verify(Case(D, D, T=T, H=H), x, y, state, "called")


@hopper
@pytest.mark.parametrize("layout", ["heads first", "sliced", "reversed states"])
def test_strided_arrays_are_read_in_place(layout, rng):
    case = Case(64, 64, T=333, H=6, Hq=6)
    x = random_inputs(case, rng, Family("cupy"))
    expected = gated_linear_attention(**x, return_state=True)
    strided = laid_out(x, layout)
    assert all(tensormap.fits(arrays.take(strided[n])) for n in "qkv")
    got = gated_linear_attention(**strided, return_state=True)
    for a, b in zip(got, expected, strict=True):
        assert (a == b).all()


@hopper
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("pieces", [1, 4])
def test_a_nan_stays_in_its_sequence(pieces, D, rng):
    """However many chunks a block has had, the last one of a sequence ends where it ends."""
    import cupy

    options = {"cu_seqlens": [0, 700, 1333, 2080]}
    case = Case(D, D, T=2100, B=1, H=8, Hq=4, pieces=pieces, options=options)
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
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("pieces", [3, 4, 9])
@pytest.mark.parametrize("past", ["silence", "loud", "growth", "zeros", "mixed", "short"])
def test_what_gates_forget_is_only_left_out_where_it_is_nothing(past, pieces, D, rng):
    """Pieces leave out early tokens by their gates alone, and find out later what those were."""
    import cupy

    case, x = forgetting(past, pieces, rng, K=D, V=D)
    x = {n: cupy.asarray(z) for n, z in x.items()}
    verify(case, x, *launch(case, x), past)


@hopper
@pytest.mark.parametrize("pieces", [1, 4, 9])
def test_a_nan_is_remembered_after_any_gate(pieces, rng):
    import cupy

    case = Case(128, 128, T=4096, B=1, H=3, Hq=3, pieces=pieces, gate="0.2")
    x = random_inputs(case, rng, Family("cupy"))
    clean, clean_state = launch(case, x)
    x["v"][0, 5, 1, 7] = np.nan
    for _ in range(3):
        y, state = launch(case, x)
        assert cupy.isnan(y[0, 5:, 1, 7].astype("float32")).all()
        assert cupy.isnan(state[0, 1, :, 7]).all()
        assert (y[:, :, ::2] == clean[:, :, ::2]).all()
        assert (state[:, ::2] == clean_state[:, ::2]).all()


@hopper
def test_many_packed_sequences(rng):
    lengths = rng.integers(0, 300, 200)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    case = Case(64, 64, T=int(offsets[-1]) + 7, B=1, H=8, Hq=4, options={"cu_seqlens": offsets})
    x = random_inputs(case, rng, Family("cupy"))
    verify(case, x, *launch(case, x), "packed")
    y = launch(case, x)[0]
    assert (y[:, offsets[-1] :] == 0).all()


def test_tiles_fit_into_shared_memory_and_fill_the_chip():
    for K in (1, 24, 64, 65, 128):
        for items, T in ((1, 100_000), (4, 32768), (16, 640), (32, 8192), (256, 4096)):
            tile = warpgroups.best_tile(T, items, K, K, 132, plan.SHARED_LIMIT)
            assert tile is not None
            assert tile.dim >= K
            assert tile.shared_bytes <= plan.SHARED_LIMIT
            assert tile.pieces * tile.piece_size >= T
            assert tile.pieces == 1 or tile.pieces * items <= 132, "all blocks run at once"
    assert warpgroups.best_tile(32768, 4, 128, 128, 132, plan.SHARED_LIMIT).pieces == 32
    assert warpgroups.best_tile(1000, 64, 129, 64, 132, plan.SHARED_LIMIT) is None
    assert warpgroups.best_tile(63, 64, 64, 64, 132, plan.SHARED_LIMIT) is None


def test_the_copy_engine_takes_rows_of_whole_vectors():
    def fits(*row, **changes):
        x = arrays.take(np.zeros((2, 3, 4, *row), np.float16))
        return tensormap.fits(replace(x, **changes))

    assert fits(64)
    assert fits(24)
    assert not fits(64, ptr=2), "address"
    assert not fits(20), "rows of 40 bytes"
    assert fits(64, shape=(2, 1, 4, 64), strides=(768, 1, 64, 1)), "a stride that is never taken"
    assert not fits(64, strides=(768, 0, 64, 1)), "broadcast"
    assert not fits(64, strides=(-768, 256, 64, 1)), "backwards"


KEPT = "next[j][i] | kt[j][i] & none"


@pytest.mark.parametrize(
    ("dim", "change", "planted"),
    [
        *((dim, {}, planted) for dim in (64, 128) for planted in (False, True)),
        *((dim, {"pieces": 2}, False) for dim in (64, 128)),
        *((dim, {"queued": True}, False) for dim in (64, 128)),
    ],
)
def test_products_run_side_by_side_and_keep_their_factors(dim, change, planted):
    """wgmma reads registers late: what is written into them too early shows in the result."""
    nvrtc = pytest.importorskip("host.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    if sass.disassembler() is None:
        pytest.skip("nvdisasm is missing")
    tile = warpgroups.best_tile(1000, 1000, dim, dim, 132, plan.SHARED_LIMIT)
    source = loader.source("linear_sm90")
    assert KEPT in source
    if planted:
        source = source.replace(KEPT, "next[j][i]")
    expression = linear_sm90.expression(replace(tile, **change))
    cubin, log = nvrtc.machine_code(source, [expression], "sm_90a", loader.OPTIONS)
    assert "C75" not in log, "the compiler makes products wait for each other"
    code = sass.disassemble(cubin)
    assert sum(name.startswith("HGMMA") for name, _ in code) >= 2 * dim // 16 + 8
    assert bool(sass.early_writes(code)) == planted


@pytest.mark.parametrize("dim", [64, 128])
def test_a_tile_knows_the_kernel_s_size(dim):
    """The bytes that a tile counts are those that the kernel has, by its own static_assert."""
    nvrtc = pytest.importorskip("host.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    tile = warpgroups.best_tile(1000, 1000, dim, dim, 132, plan.SHARED_LIMIT)
    source = loader.source("linear_sm90")
    source += f"static_assert(sizeof(Shared<Shape<{dim}, {dim}>, {tile.stages}>) == "
    source += f"{tile.shared_bytes - 1024});\n"
    assert nvrtc.usage(source, [linear_sm90.expression(tile)], "sm_90a", loader.OPTIONS)
