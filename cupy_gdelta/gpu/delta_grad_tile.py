"""Tiles of cuda/delta_grad.cu and cuda/delta_grad32.cu: pure functions of sizes, without a GPU."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar

from . import chunks

MOST = 128  # K and V
MOST32 = 64
LEAST_K = 16  # among keys of fewer numbers many are nearly alike: writes cancel
SHORTEST = 64  # tokens; gradients of shorter sequences are faster token by token
BLOCKS = 10  # of 16 x 16 on and below the diagonal of a chunk of 64
BLOCK_BYTES = 512


@dataclass(frozen=True)
class DeltaGradTile:
    """How ``delta_grad`` splits one head: see cuda/delta_grad.cu for the names."""

    K: int
    V: int
    block_cols: int
    stages: int
    wide: bool

    stem: ClassVar[str] = "delta_grad"
    chunk: ClassVar[int] = 64  # tokens
    size: ClassVar[int] = 2  # bytes of a number
    pad: ClassVar[int] = 8  # numbers after each row in shared memory
    copiers: ClassVar[int] = 2  # warps
    prepare_threads: ClassVar[int] = 128
    token_threads: ClassVar[int] = 256
    weight_bytes: ClassVar[int] = 4 * (2 * 64 + 4)  # sizeof(ChunkWeights)
    prepared_bytes: ClassVar[int] = 5 * BLOCKS * BLOCK_BYTES + weight_bytes  # sizeof(Prepared)

    @property
    def column_blocks(self) -> int:
        return -(-self.V // self.block_cols)

    @property
    def walk_threads(self) -> int:
        return 32 * (self.parts * self.block_cols // 16 + self.copiers)

    @property
    def parts(self) -> int:
        """Of the rows of a state, a warp each."""
        return min(_tiles(self.K), 2)

    @property
    def sum_bytes(self) -> int:
        """Of what the parts exchange."""
        return 4 * self.chunk * self.block_cols * 2 if self.parts > 1 else 0

    @property
    def prepare_bytes(self) -> int:
        bench = 2 * BLOCKS * BLOCK_BYTES + 4 * 64 * 20  # sizeof(Workbench)
        return max(2 * self.size * self._rows(self.K), bench) + chunks.DECAY_BYTES + 16

    @property
    def walk_bytes(self) -> int:
        numbers = 2 * self._rows(self.K) + self.chunk * (self.block_cols + self.pad)
        tables = 3 * BLOCKS * BLOCK_BYTES + self.weight_bytes
        return self.stages * (self.size * numbers + tables) + self.sum_bytes

    @property
    def token_bytes(self) -> int:
        rows = self._rows(self.V)
        numbers = 2 * self._rows(self.K) + 2 * rows + max(rows, 2 * self.chunk**2)
        piece = _tiles(self.V) * (4 if _tiles(self.K) > 2 else 2) * BLOCK_BYTES
        sums = 4 * (15 * self.chunk + 8)  # sizeof(TokenSums)
        return self.size * numbers + piece + chunks.DECAY_BYTES + sums

    @property
    def miss_bytes(self) -> int:
        """Of what one chunk of a head writes, in the workspace."""
        return self.chunk * self.size * 16 * _tiles(self.V)

    @property
    def state_bytes(self) -> int:
        """Of one state in the workspace."""
        return self.size * 256 * _tiles(self.K) * _tiles(self.V)

    def _rows(self, numbers: int) -> int:
        return self.chunk * (16 * _tiles(numbers) + self.pad)


@dataclass(frozen=True)
class DeltaGradTile32(DeltaGradTile):
    """The same for cuda/delta_grad32.cu."""

    stem: ClassVar[str] = "delta_grad32"
    chunk: ClassVar[int] = 32
    size: ClassVar[int] = 4
    copiers: ClassVar[int] = 0
    prepare_threads: ClassVar[int] = 128
    token_threads: ClassVar[int] = 256
    weight_bytes: ClassVar[int] = 4 * (4 * 32 + 4)
    prepared_bytes: ClassVar[int] = 4 * 2 * 32 * 32 + weight_bytes
    pad: ClassVar[int] = 4
    pair_bytes: ClassVar[int] = 4 * 32 * (32 + pad)

    @property
    def prepare_bytes(self) -> int:
        row = 16 * _tiles(self.K) + 8
        pairs = 3 if row < self.chunk + self.pad else 2  # else the third in place of q
        sums = 24  # KeySums of two blocks
        return 8 * self.chunk * row + pairs * self.pair_bytes + self.weight_bytes + sums

    @property
    def walk_bytes(self) -> int:
        numbers = 2 * self._rows(self.K) + self.chunk * (self.block_cols + self.pad)
        stages = self.stages * (4 * numbers + 2 * self.pair_bytes)
        weights = (self.stages + 1) * self.weight_bytes
        return stages + weights + self.sum_bytes + 144  # kCopierBytes

    @property
    def token_bytes(self) -> int:
        numbers = 2 * self._rows(self.K) + 2 * self._rows(self.V)
        sums = self.weight_bytes + 16 + 4 * (21 * self.chunk + 8)  # sizeof(TokenSums)
        return 4 * numbers + 3 * self.pair_bytes + sums


def _tiles(numbers: int) -> int:
    return -(-numbers // 16)


@functools.lru_cache(maxsize=4096)
def best_tile(
    dtype: str,
    T: int,
    items: int,
    K: int,
    V: int,
    multiprocessors: int,
    aligned: bool,
    shared_limit: int,
) -> DeltaGradTile | None:
    """The widest tile that fills the chip; None where none fits or tokens are too few for it.

    Two blocks go through each head's columns, one forward and one back.
    """
    made, most, vector = DeltaGradTile, MOST, 8
    if dtype == "float32":
        made, most, vector = DeltaGradTile32, MOST32, 4
    if max(K, V) > most or K < LEAST_K or T < SHORTEST:
        return None
    wide = aligned and K % vector == 0 and V % vector == 0
    widths = [n for n in (64, 32, 16) if n == 16 or n < 2 * V]
    tiles = [made(K, V, cols, stages, wide) for cols in widths for stages in (3, 2)]
    fitting = [
        tile
        for tile in tiles
        if max(tile.walk_bytes, tile.token_bytes, tile.prepare_bytes) <= shared_limit
    ]
    for tile in fitting:
        blocks = 2 * items * tile.column_blocks
        if blocks >= 0.9 * multiprocessors:
            if dtype == "float32" and tile.stages == 3 and blocks > multiprocessors:
                return dataclasses.replace(tile, stages=2)  # two blocks find room
            return tile
    return fitting[-1] if fitting else None
