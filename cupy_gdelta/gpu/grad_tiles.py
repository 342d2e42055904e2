"""Tiles of cuda/recurrent_grad.cu: pure functions of sizes, tested without a GPU.

Estimates are of the kind of those in plan.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

STATE_WORDS = {"linear": 32, "delta": 28}  # 4-byte registers of a thread for its part of the state
# and on its parts of the state and its gradient, of q, k and their gradients together
ROW_WORDS = {"linear": 136, "delta": 112}
MAX_WARPS = 8
GROUP = 4  # tokens whose states are run again, to go back through them


@dataclass(frozen=True)
class GradTile:
    """How ``recurrent_grad`` splits one head: see cuda/recurrent_grad.cu for the names."""

    rows: int
    cols: int
    warps: int
    tokens: int
    wide: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def block_cols(self) -> int:
        return self.warps * (32 // self.rows) * self.cols

    def saved(self, K: int) -> int:
        """Numbers that one block keeps of one state."""
        return self.threads * -(-K // self.rows) * self.cols


def make_tile(
    K: int, V: int, words: int, wide: int, rows: int, cols: int, shared_limit: int, most: int = 32
) -> GradTile | None:
    """The most warps, then the most tokens of a block that shared memory has room for."""
    warp_cols, each = (32 // rows) * cols, -(-K // rows)
    needed = -(-V // warp_cols)
    most_warps = MAX_WARPS
    while most_warps:
        warps = -(-needed // -(-needed // most_warps))
        tokens = most
        while tokens >= GROUP:
            numbers = tokens * 2 * (rows * each + warps * warp_cols + 1)
            numbers += 2 * warps * GROUP * 2 * (rows * each + 1)
            numbers += tokens // GROUP * 32 * warps * each * cols
            if 4 * words * numbers <= shared_limit:
                while wide > 1 and (K % wide or V % wide or warps * warp_cols % wide):
                    wide //= 2
                return GradTile(rows, cols, warps, tokens, wide, 4 * words * numbers)
            tokens //= 2
        most_warps //= 2
    return None


def tiles(rule: str, K: int, V: int, words: int, wide: int, shared_limit: int) -> list[GradTile]:
    """Every split that fits registers and shared memory and leaves not half the lanes idle."""
    found = [
        make_tile(K, V, words, wide, rows, cols, shared_limit)
        for rows in (1, 2, 4, 8, 16, 32)
        for cols in (1, 2, 4)
        if -(-K // rows) * cols * words <= STATE_WORDS[rule]
        and -(-K // rows) * (2 * cols + 4) * words <= ROW_WORDS[rule]
        and (rows == 1 or rows // 2 < K)
        and (cols == 1 or 32 // rows * cols // 2 < V)
    ]
    return [tile for tile in found if tile is not None]


@functools.lru_cache(maxsize=4096)
def best_tile(
    rule: str,
    K: int,
    V: int,
    words: int,
    wide: int,
    items: int,
    multiprocessors: int,
    shared_limit: int,
) -> GradTile:
    """The tile with the least estimated time; ``words`` is that of one number of the sums."""
    return min(
        tiles(rule, K, V, words, wide, shared_limit),
        key=lambda tile: _cycles(tile, rule, K, V, words, items, multiprocessors),
    )


def _cycles(
    tile: GradTile, rule: str, K: int, V: int, words: int, items: int, multiprocessors: int
) -> float:
    """Estimated cycles a token, see plan.cycles."""
    each = -(-K // tile.rows)
    lane_cols = 32 // tile.rows
    hops = tile.rows.bit_length() - 1
    again = (GROUP - 1) / 2 + 2  # steps forward of the state
    delta = rule == "delta"
    work: float = words * each * tile.cols * (2 * again + (9 if delta else 6))
    work += words * 6 * each * (1 - 1 / lane_cols)  # sums over columns
    work += words * 4 * tile.cols * hops * (2 if delta else 1) + 15 * words + 60
    work += 2 * each * (again + 2) / 4
    work += 20 * (4 * K + 3 * tile.block_cols) / tile.wide / tile.threads
    issued = work * -(-tile.warps // 4)
    chain = 4 * work + 60 * hops
    waves = -(-items * -(-V // tile.block_cols) // multiprocessors)
    return max(issued, chain) * waves
