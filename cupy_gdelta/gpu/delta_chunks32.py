"""Tiles of the chunked kernel cuda/delta32.cu: pure functions of sizes, tested without a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..arrays import ITEMSIZE
from .chunks32 import CHUNK, DECAY_BYTES, MAX_K, MAX_T, PRODUCTS

SHORTEST = 128  # tokens
LARGE = 200 * 1024  # bytes of shared memory; tiles for less need more registers than there are
PREPARERS = 4  # warps a chunk
BENCH_BYTES = 4 * (32 * 40 + 2 * 16 * 20)  # sizeof(Workbench)
ITEM_BYTES = 7 * 8 + 4 * 4  # sizeof(Item)


@dataclass(frozen=True)
class DeltaTile32:
    """How ``delta32`` splits one head: see cuda/delta32.cu for the names."""

    K: int
    V: int
    cols: int
    teams: int
    turns: int
    stages: int
    slots: int
    out_cols: int
    state_rows: int
    copy_warps: int
    products: str
    wide: int
    dtype: str = "float32"

    @property
    def reason(self) -> str:
        return f"{self.teams} prepared at a time" if self.teams > 1 else "one prepared at a time"

    @property
    def col_blocks(self) -> int:
        return -(-self.V // self.cols)

    @property
    def threads(self) -> int:
        outputs = self.turns * 2 * -(-self._real_cols // self.out_cols)
        state = self._state_parts * self._state_tiles
        rows = -(-max(outputs, state) // 2)  # of four warps, two of them for each of both
        late = max(0, 1 + self.copy_warps - (4 * rows - outputs - state))
        return 32 * (4 * rows + self.teams * PREPARERS + late)

    @property
    def shared_bytes(self) -> int:
        value_row = -(-self.cols // 32) * 32
        key_row = 64 * self._state_parts if self._state_parts > 1 else -(-self.K // 32) * 32
        stage = 4 * CHUNK * (2 * key_row + value_row) + DECAY_BYTES
        slot = 4 * key_row * (16 * self._state_tiles + CHUNK)
        barriers = 8 * 3 * (self.stages + self.slots)
        fixed = self.teams * BENCH_BYTES + ITEM_BYTES + barriers
        return -(-(self.stages * stage + self.slots * slot + fixed) // 16) * 16

    @property
    def _real_cols(self) -> int:
        return min(self.cols, self.V)

    @property
    def _state_parts(self) -> int:
        return -(-self.K // self.state_rows)

    @property
    def _state_tiles(self) -> int:
        return -(-self._real_cols // 16)


@functools.lru_cache(maxsize=4096)
def best_tile(
    T: int, K: int, V: int, aligned: bool, precision: str, shared_limit: int, dtype: str = "float32"
) -> DeltaTile32 | None:
    """The first tile that fits; None where none does, or tokens are too few for it."""
    if K > MAX_K or not SHORTEST <= T <= MAX_T or shared_limit < LARGE:
        return None
    vector = 16 // ITEMSIZE[dtype]
    wide = vector if aligned and K % vector == 0 and V % vector == 0 else 1
    products = PRODUCTS[precision if dtype == "float32" else "highest"]
    found = shapes(K, V, products, wide, dtype)
    return next((tile for tile in found if tile.shared_bytes <= shared_limit), None)


def shapes(K: int, V: int, products: str, wide: int, dtype: str = "float32") -> list[DeltaTile32]:
    """Tiles for a head, the better ones first: copies far ahead."""
    small = K <= 32 and V <= 32
    state_rows = min(64, -(-K // 8) * 8)  # of 16 columns, by one warp
    teams, turns, slots, most = (2, 2, 4, 10) if small else (1, 1, 2, 6)
    found = []
    for cols in (64, 32) if K <= 64 and V > 32 else (32,):
        across = -(-min(cols, V) // 8) * 8
        for stages in range(most, slots, -1):
            sizes = (K, V, cols, teams, turns, stages, slots, across, state_rows)
            found.append(DeltaTile32(*sizes, 1, products, wide, dtype))
    return found
