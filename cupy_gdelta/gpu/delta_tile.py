"""Tiles of the chunked kernel cuda/delta.cu: pure functions of sizes, tested without a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

CHUNK = 64  # tokens
MIN_K, MAX_K = 8, 128  # in fewer dimensions keys are too much alike for 16-bit numbers
SHORTEST = 64  # tokens; shorter sequences are faster token by token
TABLE_BYTES = 2 * (4 * 10 * 512 + 512 + 16) + (20 * 512 + 4 * 4 * 16 * 20)  # chunks, workbench
TABLE_BYTES += 3 * (4 * (6 * 64 + 16 + 64 * 20 + 4) + 4 * 64) + 4 * 2 * 12 * 64  # weights, gates


@dataclass(frozen=True)
class DeltaTile:
    """How ``delta`` splits one head: see cuda/delta.cu for the names."""

    K: int
    block_cols: int
    stages: int
    wide: bool

    @property
    def threads(self) -> int:
        return 32 * (self.block_cols // 16 + 4)

    @property
    def shared_bytes(self) -> int:
        key_row, value_row = -(-self.K // 16) * 16 + 8, self.block_cols + 8
        return 2 * self.stages * CHUNK * (2 * key_row + value_row) + TABLE_BYTES


@functools.lru_cache(maxsize=4096)
def best_tile(
    T: int, items: int, K: int, V: int, multiprocessors: int, aligned: bool, shared_limit: int
) -> DeltaTile | None:
    """The tile with the least estimated time; None where none fits, or tokens are too few."""
    if not MIN_K <= K <= MAX_K or T < SHORTEST:
        return None
    wide = aligned and K % 8 == 0 and V % 8 == 0
    fitting = []
    for block_cols in (64, 32, 16):
        if block_cols > 16 and block_cols // 2 >= V:
            continue
        tiles = (DeltaTile(K, block_cols, stages, wide) for stages in (4, 3))
        tile = next((tile for tile in tiles if tile.shared_bytes <= shared_limit), None)
        if tile is not None:
            waves = -(-items * -(-V // block_cols) // multiprocessors)
            fitting.append((waves * (48 + block_cols), tile))
    return min(fitting, key=lambda found: found[0])[1] if fitting else None
