"""Plans are pure functions of sizes: they are right for every head dim, on any device."""

import pytest

from cupy_gdelta import arrays

plan = pytest.importorskip("cupy_gdelta.gpu.plan", reason="CuPy cannot be imported")

HEAD_DIMS = [1, 2, 3, 5, 8, 9, 17, 24, 31, 32, 33, 40, 63, 64, 65, 80, 96, 100, 127, 128, 129]
HEAD_DIMS += [160, 192, 200, 255, 256]
SMALLEST_SHARED_LIMIT = 99 * 1024  # sm_86, sm_89 and sm_120, bytes a block


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_every_head_dim_has_a_tile_that_covers_it(rule, dtype):
    for K in HEAD_DIMS:
        for V in HEAD_DIMS:
            for items in (1, 100, 100_000):
                tile = plan.choose(rule, dtype, 64, items, K, V, 132).tile
                words = 2 if dtype == "float64" else 1
                assert tile.rows * plan.rows_each(K, tile.rows) >= K
                assert plan.rows_each(K, tile.rows) * tile.cols * words <= plan.STATE_WORDS
                assert 32 * tile.warps <= tile.threads <= 256
                assert tile.threads >= tile.tokens >= 4
                assert tile.shared_bytes <= SMALLEST_SHARED_LIMIT


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("limit", [SMALLEST_SHARED_LIMIT, plan.SHARED_LIMIT])
def test_every_head_dim_has_a_tile_for_gradients(rule, dtype, limit):
    for K in HEAD_DIMS:
        for V in HEAD_DIMS:
            for items in (1, 100_000):
                chosen = plan.choose_grad_by_tokens(
                    rule, dtype, 64, items, K, V, 132, shared_limit=limit
                )
                tile = chosen.tile
                assert tile.rows * plan.rows_each(K, tile.rows) >= K
                assert 32 <= tile.threads <= 256
                assert tile.tokens in (4, 8, 16, 32)
                assert tile.block_cols % tile.wide == K % tile.wide == V % tile.wide == 0
                assert tile.shared_bytes <= limit


def test_the_whole_chip_is_used_when_heads_are_few():
    few, many = (plan.best_tile("linear", "float32", 128, 128, n, 132, 4) for n in (4, 4096))
    lanes = [tile.rows / tile.cols for tile in (few, many)]
    assert lanes[0] > lanes[1], "few heads: more lanes a column; many heads: more work a lane"


@pytest.mark.parametrize(
    ("dtype", "log_gate", "longest"),
    [
        ("float32", False, 256),
        ("float32", True, 32),
        ("float16", False, 8192),
        ("bfloat16", True, 65536),
    ],
)
def test_long_sums_are_made_in_float64(dtype, log_gate, longest):
    for T, sums in ((longest, "float32"), (longest + 1, "float64")):
        chosen = plan.choose("delta", dtype, T, 8, 200, 64, 132, log_gate=log_gate)
        assert chosen.sums == sums
        assert sums in chosen.reason
    assert plan.choose("delta", "float64", 8, 8, 6, 64, 132).sums == "float64"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("limit", [SMALLEST_SHARED_LIMIT, 163 * 1024, plan.SHARED_LIMIT])
def test_chunks_of_the_delta_rule_fit(limit, dtype):
    for K in HEAD_DIMS:
        for V in HEAD_DIMS:
            for aligned in (16, 4):
                sizes = (1000, 100, K, V, 132, aligned)
                chosen = plan.choose("delta", dtype, *sizes, shared_limit=limit)
                tile = chosen.tile
                assert tile.shared_bytes <= limit
                if chosen.kernel == "recurrent":
                    assert K > 128 or limit < plan.SHARED_LIMIT
                    continue
                assert tile.threads <= 512
                assert K % tile.wide == V % tile.wide == 0
                assert tile.stages > tile.slots >= tile.teams
                assert (chosen.kernel == "delta16") == (max(K, V) <= 64)
                if chosen.kernel == "delta16":
                    continue
                assert tile.cols * tile.col_blocks >= V


def test_plans_say_why():
    assert plan.choose("delta", "float32", 16, 8, 64, 64, 132).reason.startswith("token by token")


def test_alignment_is_that_of_every_row():
    from cupy_gdelta.arrays import View

    def view(ptr, shape, strides, dtype="float32"):
        return View(None, "numpy", -1, None, shape, strides, dtype, ptr)

    rows = (2, 5, 3, 24)
    assert plan.alignment(view(256, rows, (360, 72, 24, 1))) == 16
    assert plan.alignment(view(264, rows, (360, 72, 24, 1))) == 8
    assert plan.alignment(view(256, rows, (360, 75, 25, 1))) == 4
    assert plan.alignment(view(256, (1, 5, 1, 24), (7, 72, 13, 1))) == 16, "no step along size 1"
    assert plan.alignment(view(256, rows, (0, 24, 0, 1))) == 16
    assert plan.alignment(view(256, rows, (-360, -72, 24, 1))) == 16
    half = view(258, (1, 2, 1, 8), (16, 8, 8, 1), "float16")
    assert plan.alignment(view(256, rows, (360, 72, 24, 1)), half) == 2


@pytest.mark.parametrize(
    ("V", "strides", "first", "new"),
    [
        (16, (64 * 16, 2 * 16, 16, 1), 0, True),
        (16, (64 * 64, 2 * 64, 64, 1), 0, True),
        (16, (64 * 16, 2 * 16, 16, 1), 2, False),
        (16, (64 * 20, 2 * 20, 20, 1), 0, False),
        (16, (64 * 16, -2 * 16, 16, 1), 4096, False),
        (16, (64 * 32, 2 * 32, 32, 2), 0, False),
        (12, (64 * 12, 2 * 12, 12, 1), 0, True),
        (12, (64 * 16, 2 * 16, 16, 1), 0, False),  # the copy engine could write it, a new one not
        (3, (64 * 3, 2 * 3, 3, 1), 0, True),
    ],
)
def test_an_output_that_is_like_a_new_one(V, strides, first, new):
    like_new = pytest.importorskip("cupy_gdelta.gpu")._like_new
    y = arrays.View(None, "cupy", 0, None, (2, 32, 2, V), strides, "bfloat16", 1 << 20 | first)
    assert like_new(y) == new


def test_alignment_changes_nothing_but_the_fetch():
    for rule in ("linear", "delta"):
        for dtype in ("float16", "float32", "float64"):
            tiles = [
                plan.choose(rule, dtype, 64, 60, 40, 40, 132, aligned).tile
                for aligned in (16, 8, 4, 2)
            ]
            assert {(t.rows, t.cols, t.warps, t.threads) for t in tiles} == {
                (tiles[0].rows, tiles[0].cols, tiles[0].warps, tiles[0].threads)
            }
            assert tiles[0].wide > tiles[-1].wide == 1
