"""cuda/cut.cuh: walks along time in pieces, which are walked again where gates did not forget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compare import REFERENCE_GRAD, bits, host

pytest.importorskip("cupy", reason="CuPy cannot be imported")
import test_delta_grad
import test_linear_grad
from posed import needs_compiler, verify_grad
from test_infinite import on_a_gpu, on_the_cpu

from cupy_gdelta.gpu import chunks_grad, cut, delta_grad_tile, plan

SIZES: dict[str, Any] = {"T": 320, "H": 2, "Hq": 2, "piece": 1}
WALKS = [
    (test_linear_grad, test_linear_grad.Case("bfloat16", 24, 24, **SIZES)),
    (test_linear_grad, test_linear_grad.Case("float32", 24, 40, **SIZES)),
    (test_delta_grad, test_delta_grad.Case(24, 24, **SIZES)),
    (test_delta_grad, test_delta_grad.Case(24, 40, dtype="float32", **SIZES)),
]
KERNELS = pytest.mark.parametrize(
    ("tests", "case"),
    [pytest.param(*walk, id=f"{walk[0].__name__[5:]}-{walk[1]}") for walk in WALKS],
)


def inputs(case: Any, gate: float, rng: np.random.Generator) -> dict:
    x = case.inputs(rng)
    x["gate"][...] = gate
    return x


def assert_close_to_whole(tests: Any, case: Any, found: dict, expected: dict) -> None:
    """The same bits; float32 sums of the linear rule carry on what they round within a piece."""
    carried = tests is test_linear_grad and case.dtype == "float32"
    for name, got in found.items():
        if carried:
            want = host(expected[name])
            most = np.nanmax(abs(want))
            np.testing.assert_allclose(host(got), want, rtol=0, atol=5e-6 * most, err_msg=name)
        else:
            assert bits(got) == bits(expected[name]), f"d {name}"


def by_itself(tests: Any, case: Any, launcher: Any) -> tuple:
    """Ways to run a case in pieces and whole, in blocks of the same columns."""
    return launcher(tests, case), launcher(tests, replace(case, piece=0))


def verify_what_lasts(tests: Any, case: Any, rng: np.random.Generator, launcher: Any) -> None:
    run, run_whole = by_itself(tests, case, launcher)
    x = inputs(case, 0.9995, rng)
    assert_close_to_whole(tests, case, run(x), run_whole(x))


def verify_what_outlives_gates(
    tests: Any, case: Any, rng: np.random.Generator, launcher: Any
) -> None:
    """Numbers so large that the next pieces but one still see them, whatever gates are like."""
    run, run_whole = by_itself(tests, case, launcher)
    x = inputs(case, 0.5, rng)
    for name, start, stop in (("v", 0, 20), ("dy", 300, 320)):
        x[name][:, start:stop] = (x[name][:, start:stop].astype(np.float32) * 1e30).astype(
            case.dtype
        )
    assert_close_to_whole(tests, case, run(x), run_whole(x))


@needs_compiler
@KERNELS
def test_what_lasts_is_walked_again(tests, case, rng):
    verify_what_lasts(tests, case, rng, on_the_cpu)


@pytest.mark.gpu
@KERNELS
def test_what_lasts_is_walked_again_on_a_gpu(tests, case, rng):
    verify_what_lasts(tests, case, rng, on_a_gpu)


@needs_compiler
@KERNELS
def test_what_outlives_gates_is_walked_again(tests, case, rng):
    verify_what_outlives_gates(tests, case, rng, on_the_cpu)


@pytest.mark.gpu
@KERNELS
def test_what_outlives_gates_is_walked_again_on_a_gpu(tests, case, rng):
    verify_what_outlives_gates(tests, case, rng, on_a_gpu)


@needs_compiler
@KERNELS
def test_what_is_forgotten_is_walked_once(tests, case, rng):
    """The second launch is left out; and it counts, where something lasts."""
    run = on_the_cpu(tests, case)
    x = inputs(case, 0.2, rng)
    verify_grad(case, x, run(x, without="kAgain"), "walked once")
    x = inputs(case, 0.9995, rng)
    with pytest.raises(AssertionError):
        verify_grad(case, x, run(x, without="kAgain"), "walked once")


def verify_what_is_infinite(tests: Any, case: Any, rng: np.random.Generator, launcher: Any) -> None:
    """In the first column, whose pieces are walked again: those of the others are walked too."""
    case = replace(case, V=64)
    x = inputs(case, 0.2, rng)
    x["dy"][0, 310, 0, 0] = np.inf
    expected = launcher(tests, replace(case, piece=0))(x)["v"]
    got = launcher(tests, case)(x)["v"]
    assert np.isnan(got[:, :200, 0, 0].astype(np.float32)).all()
    assert bits(got[..., 1:]) == bits(expected[..., 1:])


@needs_compiler
@KERNELS
def test_what_is_infinite_does_not_hide_others(tests, case, rng):
    verify_what_is_infinite(tests, case, rng, on_the_cpu)


def verify_what_is_infinite_shows(
    tests: Any, case: Any, rng: np.random.Generator, launcher: Any
) -> None:
    """In pieces that gates would not let know of it, too."""
    run = launcher(tests, case)
    for name, token in (("v", 10), ("dy", 310)):
        x = inputs(case, 0.5, rng)
        x[name][0, token, 0, 5] = np.inf
        with np.errstate(all="ignore"):
            expected = REFERENCE_GRAD[case.rule](**{n: host(a) for n, a in x.items()})
        for output, got in run(x).items():
            wrong = ~np.isfinite(host(got))
            assert wrong[~np.isfinite(getattr(expected, output))].all(), f"{name} in {output}"
            assert not np.take(wrong, 1, 1 if output == "initial_state" else 2).any(), output


@needs_compiler
@KERNELS
def test_what_is_infinite_shows_in_later_pieces(tests, case, rng):
    verify_what_is_infinite_shows(tests, case, rng, on_the_cpu)


@pytest.mark.gpu
@KERNELS
def test_what_is_infinite_shows_in_later_pieces_on_a_gpu(tests, case, rng):
    verify_what_is_infinite_shows(tests, case, rng, on_a_gpu)


@needs_compiler
def test_gates_of_many_chunks_are_looked_at(rng):
    """37 of the 38 that a piece has suffice to forget."""
    case = test_linear_grad.LONG
    x = case.inputs(rng)
    found = on_the_cpu(test_linear_grad, case)(x, without="kAgain", check=True)
    verify_grad(case, x, found, "walked once")


@pytest.mark.parametrize("limit", [99 * 1024, plan.SHARED_LIMIT])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_few_heads_of_many_tokens_are_cut(dtype, limit, monkeypatch):
    monkeypatch.setattr(cut, "WORTH", 0.6)
    for tiles in (chunks_grad, delta_grad_tile):
        monkeypatch.setattr(tiles, "best_tile", tiles.best_tile.__wrapped__)
    for rule, sizes in (("linear", [(24, 24), (64, 64)]), ("delta", [(24, 24), (64, 64), (16, 8)])):
        for K, V in sizes:
            for items in (1, 2, 4, 10, 16):
                tile = plan.choose_grad(
                    rule, dtype, 32768, items, K, V, 132, shared_limit=limit
                ).tile
                assert isinstance(tile, (chunks_grad.ChunkGradTile, delta_grad_tile.DeltaGradTile))
                assert tile.cut is not None
                pieces = tile.cut.pieces(32768)
                assert 2 <= pieces <= 32
                assert pieces * tile.cut.chunks * tile.cut.chunk >= 32768
                wide = tile.of(cut.walks(tile.cut, 32768)[0])
                if rule == "linear":
                    assert max(wide.state_bytes, wide.shared_bytes) <= limit
                    assert 2 * items * pieces * wide.col_blocks <= 2 * 132
                else:
                    assert wide.walk_bytes <= limit
                    assert 2 * items * pieces * wide.column_blocks <= 2 * 132
            few = plan.choose_grad(rule, dtype, 2048, 4, K, V, 132, shared_limit=limit).tile
            many = plan.choose_grad(rule, dtype, 32768, 200, K, V, 132, shared_limit=limit).tile
            assert few.cut is many.cut is None
