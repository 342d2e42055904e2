"""Tiles of the chunked kernel cuda/linear32.cu: pure functions of sizes, tested without a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..arrays import ITEMSIZE

CHUNK = 32  # tokens
MAX_K = 128
MAX_T = 2**30  # tokens are counted in 32 bits
SHORTEST, SHORTEST_SMALL, SMALL = 128, 256, 2048  # tokens; for states of fewer numbers than SMALL
PIECE_CHUNKS = 16  # a piece has at least so many chunks, to be worth its state
DECAY_BYTES = 4 * (2 * 32 + 2 * 16 + 2 * 16 * 20 + 4)  # sizeof(Decay)
ITEM_BYTES = 7 * 8 + 6 * 4  # sizeof(Item)
PRODUCTS = {"highest": "kThree", "tf32": "kOne"}  # of float32


@dataclass(frozen=True)
class Tile32:
    """How ``linear32`` splits one head: see cuda/linear32.cu for the names."""

    K: int
    V: int
    cols: int
    steps: int
    stages: int
    out_rows: int
    out_cols: int
    state_rows: int
    state_cols: int
    copy_warps: int
    decay_warps: int
    products: str
    wide: int
    pieces: int = 1
    piece_size: int = 0
    dtype: str = "float32"

    @property
    def reason(self) -> str:
        return "whole sequences" if self.pieces == 1 else f"sequences in {self.pieces} pieces"

    @property
    def col_blocks(self) -> int:
        return -(-self.V // self.cols)

    @property
    def out_warps(self) -> int:
        return self.steps * (CHUNK // self.out_rows) * -(-self._real_cols // self.out_cols)

    @property
    def state_warps(self) -> int:
        return -(-self.K // self.state_rows) * self._state_parts

    @property
    def threads(self) -> int:
        return 32 * self.out_warps + self.state_threads

    @property
    def state_threads(self) -> int:
        """Of the kernel that makes states alone."""
        return 32 * (self.state_warps + self.copy_warps + self.decay_warps)

    @property
    def shared_bytes(self) -> int:
        state = self._state_parts * self.state_cols * self._key_row
        return self._bytes(2) + 4 * 2 * self.steps * state

    @property
    def state_bytes(self) -> int:
        return self._bytes(1)

    @property
    def _real_cols(self) -> int:
        return min(self.cols, self.V)

    @property
    def _state_parts(self) -> int:
        return -(-self._real_cols // self.state_cols)

    @property
    def _key_row(self) -> int:
        return -(-self.K // 32) * 32

    def _bytes(self, key_rows: int) -> int:
        stage = CHUNK * (key_rows * self._key_row + -(-self.cols // 32) * 32)
        gates = 3 * self.steps * 2 * CHUNK
        return self.stages * (ITEMSIZE[self.dtype] * stage + DECAY_BYTES) + 4 * gates + ITEM_BYTES


@functools.lru_cache(maxsize=4096)
def best_tile(
    T: int,
    items: int,
    K: int,
    V: int,
    multiprocessors: int,
    aligned: bool,
    precision: str,
    shared_limit: int,
    dtype: str = "float32",
) -> Tile32 | None:
    """The deepest tile that fits; None where none does, or tokens are too few for it.

    Heads that are too few to fill the chip are cut along T, into pieces that fill one wave.
    """
    if K > MAX_K or T > MAX_T or (SHORTEST if K * V >= SMALL else SHORTEST_SMALL) > T:
        return None
    vector = 16 // ITEMSIZE[dtype]
    wide = vector if aligned and K % vector == 0 and V % vector == 0 else 1
    products = half_products(K, V) if dtype == "float16" else PRODUCTS[precision]
    for tile in shapes(K, V, products, wide, dtype):
        if tile.shared_bytes <= shared_limit:
            chunks, blocks = -(-T // CHUNK), items * tile.col_blocks
            pieces = max(1, min(multiprocessors // max(blocks, 1), chunks // PIECE_CHUNKS))
            return replace(tile, pieces=pieces, piece_size=-(-chunks // pieces) * CHUNK)
    return None


def half_products(K: int, V: int) -> str:
    """Of float16: what is rounded errs less than y does, and small heads can do without that."""
    return "kMixed" if _small(K, V) else "kOne"


def _small(K: int, V: int) -> bool:
    return K <= 32 and V <= 32


def shapes(K: int, V: int, products: str, wide: int, dtype: str = "float32") -> list[Tile32]:
    """Tiles for a head, the better ones first: many chunks a barrier, then copies far ahead."""
    small = _small(K, V)
    cols = 64 if K <= 64 and V > 32 else 32
    width = min(32, -(-V // 8) * 8)  # of what one warp puts out, and keeps
    state = (-(-K // 8) * 8, 16) if small else (32, 32)
    found = []
    for steps in (4, 2, 1) if small else (2, 1) if K <= 64 else (1,):
        # warps that copy, and that make decays: each those of some chunks; copies of single numbers
        # take more registers, which fewer threads have
        helpers = (2, steps if wide > 1 or small else 1)
        out = (32, width) if steps > 1 else (16, width if K <= 64 else min(16, width))
        for stages in range(3 * steps + 1, 3 * steps - 2, -1):
            sizes = (K, V, cols, steps, stages)
            found.append(Tile32(*sizes, *out, *state, *helpers, products, wide, dtype=dtype))
    return found
