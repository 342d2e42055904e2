"""Tiles of the chunked kernel cuda/linear.cu: pure functions of sizes, tested without a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

CHUNK = 64  # tokens
MAX_K = 128
SHORTEST = 64  # tokens; shorter sequences are faster token by token
SHORTEST_SMALL, SMALL = 192, 2048  # the same for states of fewer numbers
PIECE_CHUNKS = 8  # a piece has at least so many chunks, to be worth its state
DECAY_BYTES = 4 * (6 * 64 + 16 + 64 * 20 + 4)  # sizeof(Decay)
GATE_BYTES = 4 * 2 * 12 * 64  # sizeof(GateRing)


def in_pieces(pieces: int) -> str:
    """How a tile cuts sequences, in words."""
    return "whole sequences" if pieces == 1 else f"sequences in {pieces} pieces"


@dataclass(frozen=True)
class ChunkTile:
    """How ``linear`` splits one head: see cuda/linear.cu for the names."""

    K: int
    block_cols: int
    stages: int
    wide: bool
    pieces: int
    piece_size: int

    @property
    def reason(self) -> str:
        return in_pieces(self.pieces)

    @property
    def threads(self) -> int:
        return 128 + self.state_threads

    @property
    def state_threads(self) -> int:
        """Of the kernel that makes states alone."""
        tiles = -(-self.K // 16)
        down = next(n for n in (4, 2, 1) if tiles % n == 0)
        return 32 * (down * min(4 // down, self.block_cols // 16) + 4)

    @property
    def shared_bytes(self) -> int:
        return self._bytes(outputs=True)

    @property
    def state_bytes(self) -> int:
        return self._bytes(outputs=False)

    def _bytes(self, outputs: bool) -> int:
        key_row, value_row = -(-self.K // 16) * 16 + 8, self.block_cols + 8
        stage = CHUNK * ((2 if outputs else 1) * key_row + value_row)
        numbers = self.stages * stage
        if outputs:
            numbers += 2 * (key_row - 8) * value_row
            numbers += CHUNK * value_row
        return 2 * numbers + 3 * DECAY_BYTES + GATE_BYTES


@functools.lru_cache(maxsize=4096)
def best_tile(
    T: int, items: int, K: int, V: int, multiprocessors: int, aligned: bool, shared_limit: int
) -> ChunkTile | None:
    """The widest and deepest tile that fits; None where none does, or tokens are too few for it.

    Heads that are too few to fill the chip are cut along T, into pieces that fill one wave.
    """
    shortest = SHORTEST if K * V >= SMALL else SHORTEST_SMALL
    if K > MAX_K or shortest > T:
        return None
    wide = aligned and K % 8 == 0 and V % 8 == 0
    chunks = -(-T // CHUNK)
    for block_cols in (64, 32) if V > 32 and K <= 64 else (32,):
        blocks = items * -(-V // block_cols)
        pieces = max(1, min(multiprocessors // max(blocks, 1), chunks // PIECE_CHUNKS))
        size = -(-chunks // pieces) * CHUNK
        for stages in (4, 3, 2):
            tile = ChunkTile(K, block_cols, stages, wide, pieces, size)
            if tile.shared_bytes <= shared_limit:
                return tile
    return None
