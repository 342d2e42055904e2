"""cuda/delta_grad.cu and delta_grad32.cu: chunked gradients of the delta rule.

They run on the CPU in several thread orders, with every access followed.

On a GPU, the tests named test_case_* are small enough for compute-sanitizer.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from compare import REFERENCE_GRAD, assert_close, bits, host
from conftest import Family
from host import simt

from cupy_gdelta import accuracy, arrays

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import (
    RUNS,
    addressed,
    device_offsets,
    needs_compiler,
    pose_grad,
    random_gradients,
    random_inputs,
    verify_grad,
    verify_grad_in_every_order,
    where_every_lane_arrives,
)

from cupy_gdelta.gpu import delta_grad, delta_grad_tile, loader, plan
from cupy_gdelta.gpu.delta_grad_tile import DeltaGradTile

STEMS = ("delta_grad", "delta_grad32")


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
    stages: int = 2
    gate: str = "zeros among"
    options: dict = field(default_factory=dict, hash=False)
    prepare: Callable = field(default=dict, hash=False)  # inputs -> the inputs passed
    rule: str = "delta"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        how = "" if self.prepare is dict else f"-{self.prepare.__name__}"
        return f"{self.dtype}-{self.K}x{self.V}-T{self.T}-{self.gate}-{'-'.join(self.options)}{how}"

    @property
    def tile(self) -> DeltaGradTile:
        sizes = (self.dtype, 1000, self.B * self.H, self.K, self.V, 132)
        tile = delta_grad_tile.best_tile(*sizes, self.wide, plan.SHARED_LIMIT)
        assert tile is not None
        cols = self.block_cols or tile.block_cols
        return replace(tile, block_cols=cols, stages=self.stages)

    @property
    def expressions(self) -> list[str]:
        units = "qk_l2norm" in self.options
        direct = self.Hq == self.H and not units
        found = list(delta_grad.expressions(self.tile, direct))
        if units:
            found.append(f"{self.tile.stem}_units<{self.K}>")
        if not direct:
            of = (self.dtype, "float32", units, self.K, 1)
            found.append(delta_grad.recurrent_grad.finish_expression(*of))
        return found

    def inputs(self, rng: np.random.Generator, family: Family | None = None) -> dict:
        family = family or Family("numpy")
        x = random_inputs(self, rng, family) | random_gradients(self, rng, family)
        return self.prepare(x)


def module_of(x: dict):
    return sys.modules[type(x["q"]).__module__.partition(".")[0]]


def logarithms(x: dict) -> dict:
    """Logarithms of the gates instead."""
    gate = x.pop("gate")
    return x | {"log_gate": -1e-1 * abs(gate)}


def narrow_logarithms(x: dict) -> dict:
    """Logarithms of the gates, and betas, in the dtype of q."""
    x = logarithms(x)
    return x | {n: x[n].astype(x["q"].dtype) for n in ("log_gate", "beta")}


def absent(x: dict) -> dict:
    return x | {"gate": None, "beta": None, "initial_state": None, "dstate": None}


def state_alone(x: dict) -> dict:
    return x | {"dy": None}


def strided(x: dict) -> dict:
    """Reversed time, heads apart, one broadcast token, addresses that break 16-byte alignment."""
    xp = module_of(x)
    q = xp.zeros((*x["q"].shape[:3], x["q"].shape[3] + 1), x["q"].dtype)[..., 1:]
    q[...] = x["q"]
    return x | {
        "q": q,
        "k": x["k"][:, ::-1],
        "v": x["v"].transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
        "gate": xp.broadcast_to(x["gate"][:, :1], x["gate"].shape),
        "initial_state": xp.asfortranarray(x["initial_state"]),
        "dy": xp.broadcast_to(x["dy"][:, :1], x["dy"].shape),
        "dstate": xp.broadcast_to(x["dstate"][:, :, :1], x["dstate"].shape),
    }


def betas(x: dict) -> dict:
    """0, 1, 2 and negative ones by turns."""
    beta = x["beta"].copy()
    for i, b in enumerate((0.0, 1.0, 2.0, -0.5)):
        beta[:, i::4] = b
    return x | {"beta": beta}


def some_betas(x: dict) -> dict:
    """The same, but for tokens in the middle alone."""
    beta = betas(x)["beta"]
    beta[:, :70], beta[:, 150:] = x["beta"][:, :70], x["beta"][:, 150:]
    return x | {"beta": beta}


def one_key(x: dict) -> dict:
    """The same key again and again."""
    k = x["k"].copy()
    k[...] = k[:, :1]
    return x | {"k": k}


def few_keys(x: dict) -> dict:
    """Twelve keys by turns."""
    k = x["k"].copy()
    for i in range(12, k.shape[1]):
        k[:, i] = k[:, i - 12]
    return x | {"k": k}


def reflected(x: dict) -> dict:
    """The same key again and again, and betas of 2: the state is reflected each time."""
    return one_key(x) | {"beta": np.full_like(x["beta"], 2)}


def reflected_by_turns(x: dict) -> dict:
    """Eight orthonormal keys by turns, and betas of 2."""
    k = x["k"].copy()
    for b, _, h in np.ndindex(k.shape[0], 1, k.shape[2]):
        basis = np.linalg.qr(k[b, :8, h].astype(np.float64).T)[0].T.astype(k.dtype)
        k[b, :, h] = basis[np.arange(k.shape[1]) % 8]
    return x | {"k": k, "beta": np.full_like(x["beta"], 2)}


def orthonormal_by_turns(x: dict) -> dict:
    """Up to twenty orthonormal keys by turns, which leave the rest of K alone, and betas of 1."""
    k = x["k"].copy()
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((k.shape[-1],) * 2))[0][:20]
    k[...] = module_of(x).asarray(basis[np.arange(k.shape[1]) % len(basis)][:, None])
    return x | {"k": k, "beta": np.ones_like(x["beta"])}


def slowly_growing(x: dict) -> dict:
    """Gates a little above 1, and below -1."""
    gate = np.full_like(x["gate"], 1.02)
    gate[:, 200:] = -1.02
    return x | {"gate": gate}


def like_keys(x: dict) -> dict:
    """Keys that nearly repeat, gates near 1."""
    k = 0.3 * x["k"].astype(np.float32) + x["k"][:, :1].astype(np.float32)
    k /= (k * k).sum(-1, keepdims=True) ** 0.5
    gate = 1 - 0.01 * abs(x["gate"])
    return x | {"k": k.astype(x["k"].dtype), "gate": gate}


def growing(x: dict) -> dict:
    """Gates above 1 among others."""
    gate = x["gate"].copy()
    gate[:, ::7] = 1.5
    return x | {"gate": gate}


def soaring(x: dict) -> dict:
    """Gates whose product passes 2^60 inside a chunk, and one of 0 later in it."""
    gate = x["gate"].copy()
    gate[:, 34:37] = 1e8
    gate[:, 60] = 0
    return x | {"gate": gate}


def soaring_unread(x: dict) -> dict:
    """Their product passes float32's range, where nothing is written, and nothing reads it."""
    x = soaring(x)
    x["gate"][:, 34:50] = 1e8
    for name, first in (("k", 32), ("dy", 34)):
        x[name] = x[name].copy()
        x[name][:, first:60] = 0
    return x


CASES = [
    Case(64, 64),
    Case(64, 64, T=0, options={"cu_seqlens": [0, 0]}),
    Case(24, 40, T=1, gate="one"),
    Case(64, 64, T=64, gate="zero", block_cols=32),
    Case(128, 128, T=129, gate="random", block_cols=64, stages=3),
    Case(128, 128, T=100, gate="negative", Hq=1),
    Case(16, 16, T=63, gate="0.2", B=3),
    Case(40, 17, wide=False, gate="1e-37"),
    Case(17, 3, T=65, wide=False, gate="0.9995"),
    Case(33, 70, T=200, wide=False, gate="random", H=4, Hq=2),
    Case(64, 64, T=300, options={"cu_seqlens": [0, 5, 5, 200, 290], "scale": 0.5}),
    Case(32, 16, T=300, Hq=1, options={"cu_seqlens": [0, 70, 134, 300], "scale": 0.5}),
    Case(96, 64, T=100, gate="negative", options={"qk_l2norm": True}),
    Case(24, 24, T=100, H=4, options={"qk_l2norm": True}, prepare=narrow_logarithms),
    Case(64, 32, T=130, prepare=logarithms),
    Case(64, 64, T=100, prepare=absent),
    Case(32, 32, T=100, prepare=state_alone),
    Case(32, 48, T=100, wide=False, prepare=strided, gate="random"),
    Case(64, 64, T=140, prepare=betas, gate="random"),
    Case(64, 64, T=140, prepare=one_key, gate="random"),
    Case(64, 64, T=140, prepare=like_keys, gate="random"),
    Case(48, 64, T=140, prepare=growing, gate="random"),
    Case(32, 32, T=140, prepare=soaring, gate="random"),
    Case(32, 32, T=200, gate="one"),
    Case(32, 32, T=100, gate="zeros among"),
]


CASES += [replace(case, dtype="float32") for case in CASES if max(case.K, case.V) <= 64]
CASES += [
    Case(64, 64, T=1000, H=1, Hq=1, gate="one", prepare=one_key, dtype="float32"),
    Case(64, 64, T=1000, H=1, Hq=1, gate="random", prepare=one_key, dtype="float32"),
    Case(64, 64, T=1000, H=1, Hq=1, gate="one", prepare=betas, dtype="float32"),
    Case(64, 64, T=1000, H=1, Hq=1, gate="one", prepare=few_keys, dtype="float32"),
    Case(64, 64, T=1000, H=1, Hq=1, gate="one", prepare=reflected, dtype="float32"),
    Case(64, 64, T=1000, H=1, Hq=1, gate="one", prepare=reflected_by_turns, dtype="float32"),
    Case(16, 16, T=300, H=1, Hq=1, gate="0.9995", prepare=orthonormal_by_turns, dtype="float32"),
    Case(64, 16, T=400, H=1, Hq=1, gate="one", prepare=orthonormal_by_turns, dtype="float32"),
    Case(32, 32, T=400, H=1, Hq=1, prepare=slowly_growing, dtype="float32"),
    Case(64, 64, T=300, gate="0.9995", prepare=some_betas, dtype="float32"),
    Case(40, 17, T=200, wide=False, gate="one", prepare=some_betas, dtype="float32"),
]


# What two planes of bfloat16 leave of these numbers, or three products of their squares, is large.
UNLUCKY = [1 + 2**-8 - 2**-16 - 2**-17, 1 + 2**-9 + 2**-17, 1.1]
CONSTANT = [  # arrays that are constant, where others are random; their gates and betas
    (Case(64, 64, T=101, H=1, Hq=1, dtype="float32"), "q k v dy", 0.5, 0.5),
    (Case(64, 64, T=64, H=1, Hq=1, dtype="float32"), "q k v dy", 0.95, 0.5),
    (Case(64, 64, T=101, H=1, Hq=1, dtype="float32"), "q k v dy", 0.01, 0.5),
    (Case(64, 64, T=101, H=1, Hq=1, dtype="float32"), "k", 0.5, 0.5),
    (Case(64, 64, T=101, H=1, Hq=1, dtype="float32"), "q v dy", 0.0, 0.5),
    (Case(24, 24, T=101, H=1, Hq=1, dtype="float32"), "q k v dy", 0.2, 0.5),
    (Case(24, 24, T=101, H=1, Hq=1, dtype="float32"), "q k", 0.0, 0.5),
    (Case(16, 16, T=101, H=1, Hq=1, dtype="float32"), "v dy", 0.0, 0.5),
    (Case(16, 16, T=101, H=1, Hq=1, dtype="float32"), "q v", 0.0, 0.5),
    (Case(17, 33, T=101, H=1, Hq=1, wide=False, dtype="float32"), "q k v dy", 0.5, 0.5),
    (
        Case(64, 64, T=70, H=1, Hq=1, dtype="float32", options={"cu_seqlens": [*range(0, 71, 5)]}),
        "q k v dy",
        0.5,
        0.5,
    ),
]


def constant(case: Case, number: float, names: str, gate: float, beta: float, family, rng) -> dict:
    """Rows of q and k are near unit length."""
    x = case.inputs(rng)
    for name in ("initial_state", "dstate"):
        del x[name]
    root = 2 ** round(np.log2(case.K) / 2)
    for name in names.split():
        x[name][...] = number / root if name in "qk" else number
    if gate == 0:  # where signs do not make errors cancel either
        for name in ("v", "dy"):
            x[name][:, ::3] *= -1
    x["gate"][...], x["beta"][...] = gate, beta
    return {name: family.array(a, case.dtype) for name, a in x.items()}


def run_on_host(kernels: dict, case: Case, x: dict, **how) -> dict[str, np.ndarray]:
    """Launch on NumPy arrays as gpu.delta_grad.launch does on CuPy's."""
    p, grads = pose_grad(case, x)
    tile = case.tile
    needed = delta_grad.sizes(p, tile)
    parts = {n: np.full(-(-size // 256) * 32 + 32, np.nan) for n, size in needed.items()}
    at = {n: -(-a.ctypes.data // 256) * 256 if needed[n] else 0 for n, a in parts.items()}
    offsets = None if p.cu_seqlens is None else arrays.take(p.cu_seqlens)
    reads = {name: view.array for name, view in vars(p).items() if isinstance(view, arrays.View)}
    if offsets is not None:
        reads["cu_seqlens"] = offsets.array
    views = {name: addressed(view) for name, view in grads.items()}
    writes = {f"d {name}": view.array for name, view in grads.items()} | parts
    how |= {"reads": reads, "writes": writes}
    found = delta_grad.launches(addressed(p), tile, views, offsets and addressed(offsets), at)
    for name, blocks, threads, shared, args in found:
        structs = [a[0] if isinstance(a, np.ndarray) else a for a in args]
        kernels[tile.stem].launch(name, blocks, threads, shared, structs, **how)
    return {name: view.owner for name, view in grads.items()}


def build(cases: list[Case], folder: Path | None = None) -> dict[str, simt.Kernels]:
    """The kernels of some cases, by the stem of their file."""
    built = {}
    for stem in STEMS:
        found = dict.fromkeys(e for c in cases if c.tile.stem == stem for e in c.expressions)
        if found:
            built[stem] = simt.Kernels((folder or loader.folder()) / f"{stem}.cu", list(found))
    return built


@pytest.fixture(scope="module")
def kernels() -> dict[str, simt.Kernels]:
    return build(CASES + [case for case, *_ in CONSTANT])


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu_in_every_order(case, kernels, rng):
    x = case.inputs(rng)
    verify_grad_in_every_order(case, x, lambda order: run_on_host(kernels, case, x, order=order))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_race_and_no_stray_access(case, kernels, rng):
    x = case.inputs(rng)
    verify_grad(case, x, run_on_host(kernels, case, x, check=True), "checked")


@needs_compiler
@pytest.mark.parametrize("case", [Case(72, 24, T=200), Case(16, 16, T=140)], ids=str)
def test_every_lane_may_arrive(case, tmp_path, rng):
    x = case.inputs(rng)
    found = run_on_host(build([case], where_every_lane_arrives(tmp_path)), case, x, check=True)
    verify_grad(case, x, found, "every lane")


@needs_compiler
@pytest.mark.parametrize(("case", "names", "gate", "beta"), CONSTANT, ids=str)
@pytest.mark.parametrize("number", UNLUCKY)
def test_errors_of_constants_do_not_add_up(number, case, names, gate, beta, kernels, rng):
    x = constant(case, number, names, gate, beta, Family("numpy"), rng)
    verify_grad(case, x, run_on_host(kernels, case, x), f"{number} {names} gate {gate}")


@needs_compiler
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("number", UNLUCKY)
def test_errors_of_every_other_token_do_not_add_up(number, first, rng):
    """The others are random, in the last chunk of 5 tokens too."""
    case = Case(64, 64, T=101, H=1, Hq=1, dtype="float32")
    family = Family("numpy")
    x = constant(case, number, "q k v dy", 0.5, 1.0, family, rng)
    for name in ("q", "k", "v", "dy"):
        x[name][:, first::2] *= rng.standard_normal(x[name][:, first::2].shape)
    verify_grad(case, x, run_on_host(build([case]), case, x), f"{number} from {first}")


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_that_overflow_spoil_no_others(dtype, rng):
    """Those of some gates pass float32's range; all others are right."""
    case = Case(32, 32, T=140, prepare=soaring_unread, gate="random", dtype=dtype)
    x = case.inputs(rng)
    grads = run_on_host(build([case]), case, x)
    inputs = {name: a if a is None else host(a) for name, a in x.items()}
    expected = REFERENCE_GRAD["delta"](**inputs)
    assert abs(expected.gate).max() > 1e39
    small = abs(expected.gate) < 1e30
    assert small.sum() >= 200
    tolerance = accuracy.GRADIENT_TOLERANCE[dtype]
    assert_close(grads.pop("gate")[small], expected.gate[small], tolerance, "d gate")
    for name, got in grads.items():
        assert_close(got, getattr(expected, name), tolerance, f"d {name}")


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_gate_that_is_not_finite_shows(bad, dtype, rng):
    case = Case(32, 32, T=100, H=1, Hq=1, gate="0.9995", dtype=dtype)
    x = case.inputs(rng)
    x["gate"][:, 40] = bad
    grads = run_on_host(build([case]), case, x)
    with np.errstate(all="ignore"):
        expected = REFERENCE_GRAD["delta"](**{n: a if a is None else host(a) for n, a in x.items()})
    for name, got in grads.items():
        wrong = ~np.isfinite(getattr(expected, name))
        assert not np.isfinite(got.astype(np.float32)[wrong]).any(), name


WAITS = re.compile(
    r"__syncthreads\(\);|__syncwarp\(\);|sync_threads<64>\(barrier\);|meet_apart<2>\(barrier\);|"
    r"cp_async_wait<[^>]*>\(\);"
)


def plants() -> list[tuple[str, str, int]]:
    """Every barrier and every wait: the stem of the kernels, the file and which one in it."""
    files = {
        stem: [f"{stem}{end}" for end in (".cu", "_prepare.cuh", "_copy.cuh", "_walk.cuh")]
        for stem in STEMS
    }
    return [
        (stem, name, i)
        for stem, names in files.items()
        for name in names
        for i in range(len(WAITS.findall((loader.folder() / name).read_text())))
    ]


PLANTED = {  # several chunks, padding, and for 16 bits two parts of a state; gates that overflow;
    # rows that are copied number by number
    "delta_grad": [Case(72, 24, T=200), Case(32, 32, T=140, prepare=soaring, gate="random")],
    "delta_grad32": [
        Case(40, 24, T=100, dtype="float32"),
        Case(32, 32, T=100, prepare=betas, dtype="float32"),
        Case(17, 33, T=65, wide=False, dtype="float32"),
    ],
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("plant", plants(), ids=lambda plant: "-".join(map(str, plant)))
def test_a_planted_fault_is_caught(plant, tmp_path, rng):
    """Every barrier and every wait of the kernels, left out one by one."""
    stem, name, which = plant
    for path in loader.folder().glob("*.cu*"):
        shutil.copy(path, tmp_path)
    text = (tmp_path / name).read_text()
    found = list(WAITS.finditer(text))[which]
    (tmp_path / name).write_text(text[: found.start()] + ";" + text[found.end() :])
    cases = PLANTED[stem]
    broken = build(cases, tmp_path)

    def run() -> None:
        for case in cases:
            x = case.inputs(rng)
            verify_grad(case, x, run_on_host(broken, case, x, check=True), "planted")

    with pytest.raises((simt.Fault, AssertionError)):  # a race, or a result that is wrong
        run()


def test_every_barrier_has_its_plant():
    """None lies in a file that is left out."""
    for stem in STEMS:
        texts = [path.read_text() for path in loader.folder().glob(f"{stem}[._]*")]
        count = sum(len(WAITS.findall(text)) for text in texts)
        assert count == sum(plant[0] == stem for plant in plants()) >= 15


@needs_compiler
@pytest.mark.parametrize("stem", STEMS)
def test_a_tile_knows_the_kernel_s_sizes(stem, tmp_path):
    """Tiles and kernels count the same threads and bytes."""
    tiles = [case.tile for case in CASES if case.tile.stem == stem]
    kernel = f'#include "{stem}.cu"\n' + "__global__ void sizes(int* out) {\n"
    for i, t in enumerate(tiles):
        walk = f"WalkShape<{t.K}, {t.V}, {t.block_cols}, {t.stages}>"
        found = (f"PrepareShape<{t.K}>::kBytes", f"{walk}::kBytes", f"{walk}::kThreads")
        found += (f"kTokenBytes<{t.K}, {t.V}>", "(int)sizeof(Prepared)")
        kernel += "".join(f"out[{5 * i + j}] = {x};\n" for j, x in enumerate(found))
    for source in loader.folder().glob("*.cu*"):
        shutil.copy(source, tmp_path)
    path = Path(tmp_path) / "sizes.cu"
    path.write_text(kernel + "}\n")
    out = np.zeros(5 * len(tiles), np.int32)
    simt.Kernels(path, ["sizes"]).launch("sizes", 1, 1, 0, [out])
    assert out.tolist() == [
        n
        for t in tiles
        for n in (
            t.prepare_bytes,
            t.walk_bytes,
            t.walk_threads,
            t.token_bytes,
            t.prepared_bytes,
        )
    ]


@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
def test_tiles_fit_into_shared_memory(limit):
    for K in (16, 24, 64, 100, 128):
        for V in (1, 24, 64, 128):
            tile = delta_grad_tile.best_tile("bfloat16", 1000, 64, K, V, 132, True, limit)
            assert tile is not None or limit < 163 * 1024
            if tile is not None:
                assert max(tile.prepare_bytes, tile.walk_bytes, tile.token_bytes) <= limit


def test_what_chunks_are_for():
    def kernel(dtype: str, T: int, K: int, V: int) -> str:
        return plan.choose_grad("delta", dtype, T, 32, K, V, 132).kernel

    assert kernel("bfloat16", 64, 128, 128) == "delta_grad"
    assert kernel("bfloat16", 63, 128, 128) == "recurrent_grad"
    assert kernel("bfloat16", 1000, 129, 64) == "recurrent_grad"
    assert kernel("bfloat16", 1000, 8, 64) == "recurrent_grad"
    assert kernel("float16", 1000, 64, 64) == "recurrent_grad"
    assert kernel("float32", 1000, 64, 64) == "delta_grad"
    assert kernel("float32", 1000, 65, 64) == "recurrent_grad"


def launch_on_gpu(case: Case, tile: DeltaGradTile, x: dict) -> dict:
    """Launch one plan on CuPy arrays, gradients poisoned with NaN first."""
    p, grads = pose_grad(case, x)
    delta_grad.launch(p, plan.Plan("delta_grad", "float32", tile, ""), grads, device_offsets(p))
    return {name: view.owner for name, view in grads.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_on_a_gpu(case, rng):
    x = case.inputs(rng, Family("cupy"))
    first = launch_on_gpu(case, case.tile, x)
    verify_grad(case, x, first, "on a GPU")
    for _ in range(RUNS):
        again = launch_on_gpu(case, case.tile, x)
        for name, got in again.items():
            assert bits(got) == bits(first[name]), f"other bits in d {name}"


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "names", "gate", "beta"), CONSTANT, ids=str)
@pytest.mark.parametrize("number", UNLUCKY)
def test_constants_on_a_gpu(number, case, names, gate, beta, rng):
    x = constant(case, number, names, gate, beta, Family("cupy"), rng)
    found = launch_on_gpu(case, case.tile, x)
    verify_grad(case, x, found, f"{number} {names} gate {gate}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("T", "H"), [(64, 300), (1000, 1), (2000, 8)])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (48, 48), (100, 30)])
def test_the_public_function_runs_it(dtype, T, H, K, V, rng):
    from cupy_gdelta import gated_delta_rule_grad

    if dtype == "float32":
        K, V = min(K, 64), min(V, 64)
    case = Case(K, V, T=T, H=H, Hq=H, dtype=dtype)
    x = case.inputs(rng, Family("cupy"))
    assert plan.choose_grad("delta", dtype, T, H, K, V, 132).kernel == "delta_grad"
    found = gated_delta_rule_grad(**x)._asdict()
    verify_grad(case, x, found, "called")
