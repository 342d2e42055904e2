"""Tiles of the Hopper kernel cuda/delta_sm90.cu: pure functions of sizes, tested without a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .chunks import CHUNK, PIECE_CHUNKS, SHORTEST
from .warpgroups import MAX_ITEMS, TILE_BYTES, dealing, how

MIN_K, MAX_K = 33, 128  # in fewer dimensions keys are so much alike that tiles would be half empty
COLUMNS = 64  # of V, of a keeper
REST_BYTES = 2 * 10 * 512  # sizeof(Rests)
STRAIN_BYTES, PLACE_BYTES, CURSOR_BYTES = 16, 32, 64
TOKEN_BYTES = 4 * (2 * 6 + 4) * CHUNK  # sizeof(TokenDecays)
WEIGHT_BYTES = 4 * (4 * CHUNK + 4)  # sizeof(TokenWeights)
QUEUE_BYTES = 16 + 32 * 12 + 2 * 4  # sizeof(QueueState), and who claims
DEALT = 16  # items of a queue that are remembered
WARM_UP = 5  # chunks that a piece begins early, with gates near 0.95; fewer where they are smaller


@dataclass(frozen=True)
class KeeperTile:
    """How ``delta`` of delta_sm90.cu splits one head: see there for the names."""

    K: int  # of the kernel
    column_blocks: int
    stages: int
    pieces: int
    piece_size: int
    queued: bool = False  # sequences are dealt out longest first

    @property
    def dealing(self) -> str:
        return dealing(self.pieces, self.queued)

    @property
    def reason(self) -> str:
        return how(self.pieces, self.queued)

    @property
    def keepers(self) -> int:
        """Warpgroups that keep columns of the state."""
        return self.K // 64

    @property
    def preparers(self) -> int:
        """Warpgroups that prepare chunks by turns."""
        return 4 - self.keepers

    @property
    def rests(self) -> int:
        """Chunks of much the same keys that are at hand at a time."""
        return self.preparers if self.K == 64 else 1

    @property
    def weights(self) -> int:
        """Chunks whose tokens are weighed at a time."""
        return 8 if self.K == 64 else 5

    @property
    def threads(self) -> int:
        return 128 * (self.keepers + self.preparers)

    @property
    def states(self) -> int:
        """Numbers of the states of all column blocks of a piece, by both passes."""
        return 2 * self.column_blocks * self.keepers * self.K * COLUMNS

    @property
    def shared_bytes(self) -> int:
        """sizeof(Shared), and what it may take to begin at a multiple of 1024."""
        tiles = self.stages * (2 * self.K // 64 + self.keepers + 2)
        size = tiles * TILE_BYTES + self.rests * REST_BYTES + self.preparers * TOKEN_BYTES
        size += self.weights * WEIGHT_BYTES + self.stages * (STRAIN_BYTES + PLACE_BYTES)
        size += (4 * self.preparers + self.keepers) * CURSOR_BYTES + 4 * (2 * 32 + 8)
        size += self.keepers * (4 * 2 * 128 + 4)
        size += QUEUE_BYTES + DEALT * (4 + 8)
        size = -(-size // 8) * 8 + 8 * self.stages * 4
        return 1024 + -(-size // 1024) * 1024


@functools.lru_cache(maxsize=4096)
def best_tile(
    T: int, items: int, K: int, V: int, multiprocessors: int, packed: bool, shared_limit: int
) -> KeeperTile | None:
    """The tile of a call; None where the kernel is not for it, or tokens are too few.

    Heads that are too few to fill the chip are cut along T, into pieces that run all at once.
    """
    dim = 64 if K <= 64 else 128
    column_blocks = -(-V // dim)
    blocks = items * column_blocks
    if not MIN_K <= K <= MAX_K or T < SHORTEST or blocks > MAX_ITEMS:
        return None
    chunks = -(-T // CHUNK)
    pieces = 1 if packed else max(1, min(multiprocessors // max(blocks, 1), chunks // PIECE_CHUNKS))
    if -(-chunks // pieces) + WARM_UP > chunks:
        pieces = 1
    size = -(-chunks // pieces)
    tile = KeeperTile(
        dim,
        column_blocks,
        4 if K <= 64 else 3,
        -(-chunks // size),
        size * CHUNK,
        packed,
    )
    return tile if tile.shared_bytes <= shared_limit else None
