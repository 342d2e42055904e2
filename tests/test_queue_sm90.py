"""cuda/longest_first.cuh: packed sequences dealt out longest first, by nobody but the device.

The GPU tests named test_case_* are small enough for compute-sanitizer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import test_delta_sm90
import test_linear_sm90
from conftest import Family
from host import simt

from cupy_gdelta import gated_delta_rule, gated_linear_attention

pytest.importorskip("cupy", reason="CuPy cannot be imported")
from posed import needs_compiler, random_inputs, verify
from test_linear_sm90 import hopper

from cupy_gdelta.gpu import call, delta_sm90, keepers, linear_sm90, loader, plan, warpgroups

ALONE = simt.Kernels(simt.HERE / "queue.cu", ["find_all"])
LENGTHS = {
    "one": [300],
    "none has tokens": [0] * 40,
    "one has tokens": [0] * 33 + [70] + [0] * 33,
    "all alike": [128] * 50,
    "one is huge": [3] * 40 + [100_000] + [65] * 30,
    "random": np.random.default_rng(1).integers(0, 3000, 64),
    "as fine as it gets": np.arange(64) * 64 + 1,
    "one more": np.arange(65) * 64 + 1,
    "a thousand": np.random.default_rng(2).integers(0, 40_000, 1000),
    "five thousand": np.random.default_rng(3).integers(0, 400, 5000),
}


def ask(lengths, H: int, states: bool, blocks: int, resumed: bool) -> np.ndarray:
    """What the queue has for each ticket, and for one too many: (n, h, start, stop)."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    args = np.zeros(1, np.dtype((np.void, call.ARGS.size)))
    words = [0] * 9 + [0] * 22 + [1, int(offsets[-1]) + 5, H, 1, len(lengths), 1.0, 0, 0, 8, 0]
    words[6] = offsets.ctypes.data
    words[8] = offsets.ctypes.data if states else 0  # which nobody reads
    args[0] = np.void(call.ARGS.pack(*words))
    items = np.full((len(lengths) * H + 1, 4), -2, np.int32)
    values = [args[0], items, np.int32(len(items)), np.int32(resumed)]
    ALONE.launch("find_all", blocks, 32, 0, values)
    return items


@needs_compiler
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("H", [1, 3])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_item_comes_once_and_long_ones_first(name, H, states):
    lengths = np.asarray(LENGTHS[name])
    items = ask(lengths, H, states, blocks=5, resumed=False)
    assert (ask(lengths, H, states, blocks=3, resumed=True) == items).all()
    there = items[items[:, 0] >= 0]
    assert (items[len(there) :, 0] == -1).all(), "an end among others"
    wanted = np.flatnonzero(lengths >= (0 if states else 1))
    assert {(n, h) for n, h, *_ in there} == {(n, h) for n in wanted for h in range(H)}
    assert len(there) == len(wanted) * H
    stops = np.cumsum(lengths)
    assert (there[:, 3] == stops[there[:, 0]]).all()
    assert (there[:, 3] - there[:, 2] == lengths[there[:, 0]]).all()
    chunks = -(-lengths[there[:, 0]] // 64)
    slack = 1 if len(lengths) <= 64 else 1.25 if len(lengths) <= 1024 else 2
    assert (np.maximum.accumulate(chunks[::-1])[::-1] <= slack * chunks).all()


@needs_compiler
def test_it_reads_nothing_but_offsets():
    lengths = np.array(LENGTHS["random"])[:40]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    args = np.zeros(1, np.dtype((np.void, call.ARGS.size)))
    words = [0] * 9 + [0] * 22 + [1, int(offsets[-1]), 2, 1, 40, 1.0, 0, 0, 8, 0]
    words[6] = offsets.ctypes.data
    args[0] = np.void(call.ARGS.pack(*words))
    items = np.full((80, 4), -2, np.int32)
    memory = {"reads": {"offsets": offsets}, "writes": {"items": items}}
    for order in simt.ORDERS:
        values = [args[0], items, np.int32(80), np.int32(1)]
        ALONE.launch("find_all", 3, 32, 0, values, order=order, check=True, **memory)
    assert (items[:, 0] >= 0).sum() == 2 * (lengths > 0).sum()


FUNCTIONS = {"linear": gated_linear_attention, "delta": gated_delta_rule}
TESTS = {"linear": test_linear_sm90, "delta": test_delta_sm90}
both = pytest.mark.parametrize("rule", TESTS)


def packed(rule: str, lengths, H: int = 2, K: int = 64, rest: int = 0):
    """A case of the rule's own tests."""
    offsets = [0, *np.cumsum(lengths).tolist()]
    options = {"cu_seqlens": offsets}
    return TESTS[rule].Case(K, K, T=offsets[-1] + rest, B=1, H=H, Hq=1, options=options)


RUN = {
    "one": {"lengths": [200]},
    "mostly nothing": {"lengths": [0] * 30 + [70] + [0] * 20 + [5] + [0] * 10, "rest": 3},
    "nothing": {"lengths": [0] * 5, "rest": 70},
    "all alike": {"lengths": [128] * 6},
    "one is long": {"lengths": [3, 700, 65, 1, 64], "K": 128},
    "many are short": {"lengths": [1, 2, 3, 64, 5, 6, 7, 8, 63, 10, 11, 12], "H": 3, "rest": 70},
    "more than are remembered": {"lengths": [1, 9] * 20, "H": 1, "rest": 5},
}


@cache
def kernels(rule: str) -> simt.Kernels:
    tiles = [packed(rule, **sizes).tile for sizes in RUN.values()]
    tiles += [replace(tile, queued=False) for tile in tiles]
    if rule == "linear":
        names = map(linear_sm90.expression, tiles)
    else:
        names = (delta_sm90.expression(tile, False) for tile in tiles)
    return simt.Kernels(loader.folder() / f"{rule}_sm90.cu", list(dict.fromkeys(names)))


def alone(case, x: dict):
    """Each sequence with tokens as a call of its own: its number, its tokens, case and arrays."""
    offsets = case.options["cu_seqlens"]
    for n in range(len(offsets) - 1):
        own = slice(offsets[n], offsets[n + 1])
        if own.start < own.stop:
            parts = {i: a[:, own] for i, a in x.items() if i != "initial_state"}
            parts["initial_state"] = x["initial_state"][n : n + 1]
            yield n, own, replace(case, T=own.stop - own.start, options={}), parts


@needs_compiler
@both
@pytest.mark.parametrize("name", RUN)
def test_packed_sequences_have_the_bits_of_sequences_alone(name, rule, rng):
    case = packed(rule, **RUN[name])
    x = random_inputs(case, rng, Family("numpy"))
    run = lambda *how, **more: TESTS[rule].on_this_cpu(kernels(rule), *how, **more)  # noqa: E731
    runs = [run(case, x, grid, order=order) for grid in (1, 3) for order in simt.ORDERS]
    y, state = runs[0]
    end = case.options["cu_seqlens"][-1]
    used = {i: a if i == "initial_state" else a[:, :end] for i, a in x.items()}
    verify(replace(case, T=end), used, y[:, :end], state, name)
    assert (y[:, end:] == 0).all()
    for other in runs[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(other, runs[0], strict=True))
    for n, own, part, arrays in alone(case, x):
        own_y, own_state = run(part, arrays, grid=2)
        assert (own_y == y[:, own]).all(), n
        assert (own_state[0] == state[n]).all(), n


def test_only_packed_sequences_that_are_whole_are_queued():
    def tile(items, packed):
        sizes = 8192, items, 128, 128, 132, plan.SHARED_LIMIT
        found = warpgroups.best_tile(*sizes, packed=packed)
        assert found is not None
        return found.queued, found.pieces > 1

    assert tile(1024, True) == (True, False)
    assert tile(1024, False) == (False, False)
    assert tile(16, True) == (False, True)
    for packed in (True, False):
        kept = keepers.best_tile(8192, 1024, 128, 128, 132, packed, plan.SHARED_LIMIT)
        assert kept is not None
        assert kept.queued == packed
    assert plan.choose("linear", "bfloat16", 999, 500, 64, 64, 132, copied=True, packed=True) != (
        plan.choose("linear", "bfloat16", 999, 500, 64, 64, 132, copied=True)
    )


@hopper
@both
@pytest.mark.parametrize("name", RUN)
def test_case_on_a_gpu(name, rule, rng):
    case, launch = packed(rule, **RUN[name]), TESTS[rule].launch
    x = random_inputs(case, rng, Family("cupy"))
    y, state = launch(case, x)
    for _ in range(5):
        again = launch(case, x)
        assert (again[0] == y).all()
        assert (again[1] == state).all()
    for n, own, part, arrays in alone(case, x):
        own_y, own_state = launch(part, arrays)
        assert (own_y == y[:, own]).all(), n
        assert (own_state[0] == state[n]).all(), n


@hopper
@both
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("name", [n for n in LENGTHS if n != "none has tokens"])
def test_any_lengths(name, K, rule, rng):
    lengths, launch = np.asarray(LENGTHS[name]), TESTS[rule].launch
    if lengths.sum() > 200_000:
        lengths = lengths // 100
    case = packed(rule, lengths, K=K, rest=9)
    x = random_inputs(case, rng, Family("cupy"))
    y, state = launch(case, x)
    for _ in range(3):
        again = launch(case, x)
        assert (again[0] == y).all()
        assert (again[1] == state).all()
    end = case.options["cu_seqlens"][-1]
    assert (y[:, end:] == 0).all()
    for n, own, part, arrays in list(alone(case, x))[:: max(1, len(lengths) // 40)]:
        own_y, own_state = launch(part, arrays)
        assert (own_y == y[:, own]).all(), n
        assert (own_state[0] == state[n]).all(), n
    empty = np.flatnonzero(lengths == 0)
    assert (state[empty] == x["initial_state"][empty]).all()


@hopper
@both
def test_the_queue_starts_anew_at_every_replay_of_a_graph(rule, rng):
    import cupy

    case, function = packed(rule, [70] * 100, H=4), FUNCTIONS[rule]
    x = random_inputs(case, rng, Family("cupy"))
    x["cu_seqlens"] = cupy.asarray(case.options["cu_seqlens"])
    expected = function(**x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        function(**x)
        stream.begin_capture()
        y = function(**x)
        graph = stream.end_capture()
        for _ in range(3):
            y.fill(0)
            graph.launch(stream)
            stream.synchronize()
            assert (y == expected).all()
