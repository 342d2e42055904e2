"""Tiles of the Hopper kernel cuda/delta_sm90.cu: pure functions of sizes, tested without a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .chunks import CHUNK, DECAY_BYTES, PIECE_CHUNKS, SHORTEST
from .warpgroups import MAX_ITEMS, RING_BYTES, TILE_BYTES

MIN_K, MAX_K = 33, 128  # in fewer dimensions keys are so much alike that tiles would be half empty
COLUMNS = 64  # of V, of a block
THREADS = 512
TABLES, PREPARERS = 3, 2
REST_BYTES = 2 * 10 * 512  # sizeof(Rests)
STRAIN_BYTES = 16
WARM_UP = 10  # chunks that a piece begins early, with gates near 0.93; fewer where they are smaller


@dataclass(frozen=True)
class KeeperTile:
    """How ``delta`` of delta_sm90.cu splits one head: see there for the names."""

    K: int  # of the kernel
    column_blocks: int
    stages: int
    pieces: int
    piece_size: int

    @property
    def reason(self) -> str:
        return "whole sequences" if self.pieces == 1 else f"sequences in {self.pieces} pieces"

    @property
    def shared_bytes(self) -> int:
        """sizeof(Shared), and what it may take to begin at a multiple of 1024."""
        stages = self.stages * (2 * self.K // 64 + 1) * TILE_BYTES
        tables = TABLES * (2 * TILE_BYTES + STRAIN_BYTES) + PREPARERS * REST_BYTES
        weights = self.stages * (DECAY_BYTES + 4 * 5 * CHUNK)
        begin = 4 * (32 + 4)
        barriers = 8 * (4 * self.stages + 2 * TABLES)
        size = stages + tables + weights + RING_BYTES + begin + barriers
        return 1024 + -(-size // 1024) * 1024


@functools.lru_cache(maxsize=4096)
def best_tile(
    T: int, items: int, K: int, V: int, multiprocessors: int, packed: bool, shared_limit: int
) -> KeeperTile | None:
    """The tile of a call; None where the kernel is not for it, or tokens are too few.

    Heads that are too few to fill the chip are cut along T, into pieces that run all at once.
    """
    column_blocks = -(-V // COLUMNS)
    blocks = items * column_blocks
    if not MIN_K <= K <= MAX_K or T < SHORTEST or blocks > MAX_ITEMS:
        return None
    chunks = -(-T // CHUNK)
    pieces = 1 if packed else max(1, min(multiprocessors // max(blocks, 1), chunks // PIECE_CHUNKS))
    if -(-chunks // pieces) + WARM_UP > chunks:
        pieces = 1
    size = -(-chunks // pieces)
    tile = KeeperTile(
        64 if K <= 64 else 128,
        column_blocks,
        4 if K <= 64 else 3,
        -(-chunks // size),
        size * CHUNK,
    )
    return tile if tile.shared_bytes <= shared_limit else None
