"""Problem -> which kernel, which tile: pure functions of sizes, tested without a GPU.

Counts are of warp instructions and cycles on the multiprocessors of sm_80 to sm_120, which issue
one instruction a cycle on each of four schedulers. They rank tiles; they do not predict times.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

SCHEDULERS = 4
STATE_WORDS = 32  # 4-byte registers a thread may spend on its part of the state
STAGE_WORDS = 32  # and on tokens under way
FETCH_WARPS = 4  # at least so many warps fetch, whatever number computes
MAX_WARPS = 8
LONG_SUM = 4096  # tokens; float32 sums over more would lose more than the contract allows
SHUFFLE = 25  # cycles from one lane to another


@dataclass(frozen=True)
class Tile:
    """How ``recurrent`` splits one head: see cuda/recurrent.cu for the names."""

    rows: int
    cols: int
    warps: int
    threads: int
    tokens: int
    shared_bytes: int

    @property
    def block_cols(self) -> int:
        return self.warps * (32 // self.rows) * self.cols


@dataclass(frozen=True)
class Plan:
    """The kernel that a call runs, and why it is that one."""

    kernel: str
    sums: str  # dtype that sums are made in
    tile: Tile
    reason: str


def choose(rule: str, dtype: str, T: int, items: int, K: int, V: int, multiprocessors: int) -> Plan:
    """Plan for ``items`` = N * H independent recurrences of at most T tokens."""
    sums, reason = "float32", "sums in float32"
    if dtype == "float64":
        sums, reason = "float64", "sums in float64, the dtype of the inputs"
    elif dtype == "float32" and T > LONG_SUM:
        sums = "float64"
        reason = f"sums in float64: over more than {LONG_SUM} tokens float32 would lose digits"
    tile = best_tile(rule, sums, K, V, items, multiprocessors)
    return Plan("recurrent", sums, tile, f"token by token, {reason}")


@functools.lru_cache(maxsize=4096)
def best_tile(rule: str, sums: str, K: int, V: int, items: int, multiprocessors: int) -> Tile:
    """The tile with the least estimated time; fewest lanes a column where two are equal."""
    candidates = [
        make_tile(K, V, sums, rows, cols)
        for rows in (1, 2, 4, 8, 16, 32)
        for cols in (1, 2, 4)
        if fits(K, V, sums, rows, cols)
    ]
    return min(candidates, key=lambda tile: cycles(tile, rule, sums, K, V, items, multiprocessors))


def rows_each(K: int, rows: int) -> int:
    return -(-K // rows)


def fits(K: int, V: int, sums: str, rows: int, cols: int) -> bool:
    """Whether a thread's part of the state fits its registers and the tile is not mostly idle."""
    words = rows_each(K, rows) * cols * (2 if sums == "float64" else 1)
    idle_rows = rows > 1 and rows // 2 >= K
    idle_cols = cols > 1 and (32 // rows) * cols // 2 >= V
    return words <= STATE_WORDS and not idle_rows and not idle_cols


def make_tile(K: int, V: int, sums: str, rows: int, cols: int) -> Tile:
    """Warps, threads and tokens a block for a split of the state over lanes."""
    warp_cols = (32 // rows) * cols
    needed = -(-V // warp_cols)
    blocks = -(-needed // MAX_WARPS)
    warps = -(-needed // blocks)
    threads = 32 * max(warps, FETCH_WARPS)
    words = 2 if sums == "float64" else 1
    each = 2 * K + warps * warp_cols
    tokens = 32
    while tokens > 4 and tokens * each * words > STAGE_WORDS * threads:
        tokens //= 2
    padded = rows * rows_each(K, rows)
    shared = 2 * tokens * (2 * padded + warps * warp_cols + 2) * 4 * words
    return Tile(rows, cols, warps, threads, tokens, shared)


def cycles(
    tile: Tile, rule: str, sums: str, K: int, V: int, items: int, multiprocessors: int
) -> float:
    """Estimated cycles a token: the longer of a warp's dependent chain and its scheduler's work."""
    words = 2 if sums == "float64" else 1
    each = rows_each(K, tile.rows)
    run = next(n for n in (4 // words, 2, 1) if each % n == 0)
    hops = tile.rows.bit_length() - 1
    passes = 4 if rule == "delta" else 3
    sums_made = 2 if rule == "delta" else 1
    work = words * passes * each * tile.cols  # multiply-adds
    work += 2 * each / run + sums_made * tile.cols * 2 * hops * words  # k and q; sums over lanes
    work += 12 + 4 * tile.cols + words * each * V / 32 / V  # scalars, y, loop, fetching
    chain = 30 + 4 * each * (2 if rule == "delta" else 1)
    chain += SHUFFLE * hops * sums_made
    blocks = items * -(-V // tile.block_cols)
    busy = -(-blocks // multiprocessors) * -(-tile.warps // SCHEDULERS)
    return max(float(chain), work * busy)
