"""Every kernel compiles for every architecture, without a GPU, and keeps its state in registers."""

from __future__ import annotations

import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

nvrtc = pytest.importorskip("host.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
pytest.importorskip("cupy")

from cupy_gdelta.gpu import (  # noqa: E402
    delta,
    delta16,
    delta32,
    delta_grad,
    delta_grad_tile,
    delta_sm90,
    linear,
    linear32,
    linear_grad,
    linear_sm90,
    loader,
    plan,
    recurrent,
    recurrent_grad,
    step,
    step_tile,
)

ENGINES = ("sm_90a", "sm_100")  # where kernels have the copy engine work
PLANTED = (Path(nvrtc.__file__).parent / "spills.cu").read_text()

# What plan.choose may be given: shapes (K, V), tokens, recurrences, multiprocessors, alignments.
FEW = {
    "shapes": [(24, 24), (33, 70), (128, 128)],
    "dtypes": ["float32", "bfloat16", "float64"],
    "tokens": [100],
    "items": [4096],  # many fill the machine with few lanes a column: the most registers
    "multiprocessors": [132],
    "aligned": [16],
}
MANY = {
    "shapes": [(1, 1), (1, 128), (16, 16), (24, 24), (33, 70), (64, 64), (96, 80), (128, 128)],
    "dtypes": ["float16", "bfloat16", "float32", "float64"],
    "tokens": [100, 5000],
    "items": [4096],
    "multiprocessors": [132],
    "aligned": [2, 16],
}


def instantiations(
    shapes,
    dtypes,
    tokens,
    items,
    multiprocessors,
    aligned,
    normalise,
    arch,
    precision="highest",
) -> dict[str, list[str]]:
    """Every instantiation that is chosen for some of these problems, by the stem of its file."""
    found: dict[str, set[str]] = {
        "recurrent": set(),
        "linear": {"scan_pieces"},
        "linear32": {"scan_pieces"},
        "delta16": set(),
        "delta32": set(),
        "linear_sm90": set(),
        "linear_grad": set(),
        "recurrent_grad": set(),
        "delta_grad": set(),
        "delta_grad32": set(),
        "step": set(),
        "delta": set(),
        "delta_sm90": set(),
    }
    engines = (False, True) if arch == "sm_90a" else (False,)
    shared_limit = (99 if arch == "sm_120" else 163 if arch == "sm_80" else 227) * 1024
    for (K, V), dtype, T, n, sms, bytes_, rule, copied in itertools.product(
        shapes, dtypes, tokens, items, multiprocessors, aligned, recurrent.RULES, engines
    ):
        sizes = (rule, dtype, T, n, K, V, sms, bytes_)
        limits = {"shared_limit": shared_limit}
        chosen = plan.choose(*sizes, copied=copied, precision=precision, **limits)
        if chosen.kernel == "linear_sm90":
            tiles = [replace(chosen.tile, pieces=pieces) for pieces in (1, 2)]
            tiles.append(replace(chosen.tile, pieces=1, queued=True))
            expressions = [linear_sm90.expression(tile) for tile in tiles]
        elif chosen.kernel == "linear":
            expressions = [linear.expression(K, V, chosen.tile, output) for output in (True, False)]
        elif chosen.kernel == "linear32":
            tiles = {chosen.tile}
            if arch in ENGINES:
                tiles.add(chosen.tile.by_copy_engine())
            expressions = [
                linear32.expression(tile, output) for tile in tiles for output in (True, False)
            ]
        elif chosen.kernel == "delta16":
            expressions = [delta16.expression(chosen.tile, unit) for unit in normalise]
        elif chosen.kernel == "delta32":
            expressions = [delta32.expression(chosen.tile, unit) for unit in normalise]
        elif chosen.kernel == "delta":
            expressions = [delta.expression(K, V, chosen.tile, unit) for unit in normalise]
        elif chosen.kernel == "delta_sm90":
            tiles = [replace(chosen.tile, pieces=pieces) for pieces in (1, 2)]
            tiles.append(replace(chosen.tile, pieces=1, queued=True))
            expressions = [
                delta_sm90.expression(tile, unit) for tile in tiles for unit in normalise
            ]
        else:
            expressions = [
                recurrent.expression(rule, dtype, chosen.sums, unit, K, V, chosen.tile)
                for unit in (normalise if rule == "delta" else (False,))
            ]
        found[chosen.kernel].update(expressions)
        back = plan.choose_grad(*sizes, **limits)
        if back.kernel == "linear_grad":
            for shared in (False, True):
                found[back.kernel].update(linear_grad.expressions(back.tile, shared))
        elif back.kernel == "delta_grad":
            found[back.tile.stem] |= delta_grad_instantiations(dtype, K, back.tile)
        back = plan.choose_grad_by_tokens(*sizes, shared_limit=shared_limit)
        blocks = -(-V // back.tile.block_cols)
        for unit in normalise if rule == "delta" else (False,):
            found[back.kernel] |= {
                recurrent_grad.expression(rule, dtype, back.sums, unit, K, V, back.tile),
                recurrent_grad.finish_expression(dtype, back.sums, unit, K, blocks),
            }
        found["step"].update(step_instantiations(rule, dtype, K, V, bytes_, normalise))
    return {stem: sorted(expressions) for stem, expressions in found.items()}


def delta_grad_instantiations(dtype, K, tile) -> set[str]:
    """All kernels of a tile, for heads of their own and for shared ones."""
    found = {e for direct in (False, True) for e in delta_grad.expressions(tile, direct)}
    finish = recurrent_grad.finish_expression(dtype, "float32", True, K, 1)
    return found | {f"{tile.stem}_units<{K}>", finish}


def step_instantiations(rule, dtype, K, V, bytes_, normalise) -> list[str]:
    """Those of decode steps, by the dtype of states: that of q matters for few loads."""
    kinds = {"float64": ("float64",), "bfloat16": ("float32", "bfloat16")}.get(dtype, ())
    return [
        step.expression(
            *(rule, dtype, kept, T, unit, K, V),
            step_tile.best_tile(K, V, kept, T == 1, bytes_, heads, 132),
        )
        for kept in kinds
        for T in (1, 2)
        for heads in (32, 8192)
        for unit in (normalise[-1:] if rule == "delta" else (False,))
    ]


def assert_in_registers(instantiations: dict[str, list[str]], arch: str) -> None:
    workers = os.cpu_count() or 1
    for stem, expressions in instantiations.items():
        source = loader.source(stem)
        parts = [expressions[i::workers] for i in range(min(workers, len(expressions)))]
        work = functools.partial(nvrtc.usage, source, arch=arch, options=loader.OPTIONS)
        with ThreadPoolExecutor(workers) as pool:
            found = {name: used for part in pool.map(work, parts) for name, used in part.items()}
        bad = {e: u for e, u in found.items() if u.stack or u.spill_stores or u.spill_loads}
        assert not bad, f"{arch}: {len(bad)} of {len(found)} kernels use local memory: {bad}"


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_chosen_kernels_stay_in_registers(arch):
    assert_in_registers(instantiations(**FEW, normalise=[True], arch=arch), arch)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_chunks_of_32_tokens_stay_in_registers(arch):
    tokens = dict(tokens=[4096], normalise=[False], arch=arch)
    small, large, largest = (24, 24), (64, 64), (128, 128)
    for shapes, dtype, precision in (
        ([small, large, largest], "float32", "highest"),
        ([large], "float32", "tf32"),
        ([small, large, largest], "float16", "highest"),
    ):
        sizes = {"shapes": shapes, "dtypes": [dtype], "precision": precision}
        found = instantiations(**FEW | sizes | tokens)
        stems = ("linear32", "delta16", "delta32")
        assert_in_registers({stem: found[stem] for stem in stems}, arch)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_chunks_of_gradients_stay_in_registers(arch):
    tokens = dict(tokens=[4096], normalise=[False], arch=arch)
    sizes = {"shapes": [(24, 24), (64, 64)], "dtypes": ["float32", "bfloat16"]}
    found = instantiations(**FEW | sizes | tokens)
    assert_in_registers({"linear_grad": found["linear_grad"]}, arch)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_chunked_gradients_of_the_delta_rule_stay_in_registers(arch):
    made, made32 = delta_grad_tile.DeltaGradTile, delta_grad_tile.DeltaGradTile32
    tiles = [made(64, 64, 64, 2, True), made(128, 128, 64, 3, True), made(128, 128, 32, 2, True)]
    tiles += [made32(64, 64, 64, 2, True), made32(64, 64, 32, 2, True)]
    found: dict[str, list[str]] = {}
    limit = 99 * 1024
    for tile in tiles:
        if max(tile.walk_bytes, tile.token_bytes) > limit and arch == "sm_120":
            continue  # no plan chooses it
        found.setdefault(tile.stem, []).extend(delta_grad.expressions(tile, True))
    assert_in_registers({stem: sorted(set(names)) for stem, names in found.items()}, arch)


# Sizes off the table that take a few bytes: 16 on sm_120, and 8 on sm_100.
SPILLING = {
    "linear32<float, 1, 128, 64, 2, 3, 3, 32, 32, 32, 32, 2, 2, kThree, 1, true>",
    "step<bfloat16_t, bfloat16_t, bfloat16_t, float, kDelta, true, 96, 80, 8, 8, 3, 8>",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_all_kernels_stay_in_registers(arch):
    """But those that take seconds to compile: other tests have those of the usual sizes."""
    found = instantiations(**MANY, normalise=[False, True], arch=arch)
    long = (
        "linear_grad",
        "delta",
        "delta_sm90",
        "delta16",
        "delta32",
        "delta_grad",
        "delta_grad32",
    )
    rest = {stem: sorted(set(found[stem]) - SPILLING) for stem in found if stem not in long}
    assert_in_registers(rest, arch)


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_spills_are_seen(arch):
    found = nvrtc.usage(PLANTED, ["keep<16>", "keep<200>", "shares"], arch)
    assert found["keep<16>"].stack == found["keep<16>"].spill_stores == 0
    assert found["keep<200>"].registers <= 64
    assert found["keep<200>"].spill_stores >= 100
    assert found["keep<200>"].spill_loads >= 100
    assert (found["shares"].shared, found["shares"].stack) == (1024, 0)


def test_local_arrays_are_seen():
    found = nvrtc.usage(PLANTED, ["local_array<16>", "local_array<2000>", "calls"], "sm_80")
    assert found["local_array<16>"].stack == 64
    assert found["local_array<2000>"].stack == 8000
    assert found["calls"].stack >= 64
    assert all(u.spill_stores == 0 for u in found.values())


def test_errors_name_their_place():
    with pytest.raises(RuntimeError, match=r'sm_80: (.|\n)*identifier "y" is undefined'):
        nvrtc.usage("__global__ void f(float* x) { *x = y; }", ["f"], "sm_80")
