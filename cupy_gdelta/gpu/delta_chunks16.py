"""Tiles of the chunked kernel cuda/delta16.cu: pure functions of sizes, tested without a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..arrays import ITEMSIZE
from .chunks32 import MAX_T, PRODUCTS, SHORTEST

CHUNK = 16  # tokens
MOST = 64  # numbers of a head
DECAY_BYTES = 4 * (16 * 20 + 2 * 16 + 4)  # sizeof(Decay)
ALIKE_BYTES = 4 * 16 * 20  # a chunk under way
ITEM_BYTES = 7 * 8 + 2 * 4  # sizeof(Item)


@dataclass(frozen=True)
class DeltaTile16:
    """How ``delta16`` splits one head: see cuda/delta16.cu for the names."""

    K: int
    V: int
    teams: int
    decay_warps: int
    stages: int
    slots: int
    products: str
    wide: int
    dtype: str = "float32"

    @property
    def reason(self) -> str:
        return f"{self.teams} prepared at a time"

    @property
    def threads(self) -> int:
        return 32 * (self._state_warps + self.teams + self.decay_warps + 1)

    @property
    def shared_bytes(self) -> int:
        keys = 8 * -(-self.K // 8)
        wide = max(keys, 8 * -(-self.V // 8))
        row = wide + (8 if wide % 16 == 0 else 0)
        stage = 4 * 3 * CHUNK * row + DECAY_BYTES
        columns = 16 * self._state_warps
        slot = 4 * (CHUNK * row + CHUNK * (columns + keys + CHUNK))
        barriers = 8 * (3 * self.stages + 2 * self.slots)
        fixed = self.teams * ALIKE_BYTES + ITEM_BYTES + barriers
        return -(-(self.stages * stage + self.slots * slot + fixed) // 16) * 16

    @property
    def _state_warps(self) -> int:
        return -(-self.V // 16)


@functools.lru_cache(maxsize=4096)
def best_tile(
    T: int, K: int, V: int, aligned: bool, precision: str, shared_limit: int, dtype: str = "float32"
) -> DeltaTile16 | None:
    """The first tile that fits; None where none does, or tokens are too few for it."""
    if max(K, V) > MOST or not SHORTEST <= T <= MAX_T:
        return None
    vector = 16 // ITEMSIZE[dtype]
    wide = vector if aligned and K % vector == 0 and V % vector == 0 else 1
    products = PRODUCTS[precision if dtype == "float32" else "highest"]
    small = max(K, V) <= 32
    few = [(3, 2, 12, 8), (3, 2, 8, 4), (2, 2, 6, 4)]
    for sizes in few if small else [(4, 1, 8, 6), (4, 1, 6, 4), (2, 1, 4, 2)]:
        tile = DeltaTile16(K, V, *sizes, products, wide, dtype)
        if tile.shared_bytes <= shared_limit:
            return tile
    return None
