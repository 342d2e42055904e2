"""Tiles of cuda/step.cu: pure functions of sizes, tested without a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..arrays import ITEMSIZE
from ..step_problem import MAX_TOKENS

ROW_BYTES = 128  # of a row of the state that one warp reads at once: a cache line
STATE_WORDS = 32  # 4-byte registers of a thread for its part of the state; twice that at K = 256
MAX_WARPS = 8
# Threads of a multiprocessor, for enough loads under way: as many as fit without spills.
RESIDENT = {"float32": 768, "long": 384, "packed": 768, "widened": 512}
MAX_LOADS = 8  # of a thread whose registers may be bounded for that: addresses take some, too


@dataclass(frozen=True)
class StepTile:
    """How ``step`` splits one head: see cuda/step.cu for the names."""

    K: int
    wide: int
    lanes: int
    warps: int
    resident: int = 1  # blocks

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def block_cols(self) -> int:
        return self.lanes * self.wide

    @property
    def slots(self) -> int:
        """Threads that share a column."""
        return 32 // self.lanes * self.warps

    def shared_bytes(self, T: int, sums: str) -> int:
        """Bytes of shared memory for T tokens, as many as either rule needs."""
        partial = _round_up(2 * self.warps * self.block_cols, 4)
        padded = _round_up(self.slots * -(-self.K // self.slots), 4)
        token = _round_up(2 * padded + self.block_cols + 3, 4)
        return ITEMSIZE[sums] * (2 * partial + T * token)


@functools.lru_cache(maxsize=4096)
def best_tile(
    K: int, V: int, kept: str, packed: bool, aligned: int, heads: int, multiprocessors: int
) -> StepTile:
    """For ``heads`` = B * H states of dtype ``kept``, rows at whole multiples of ``aligned`` bytes.

    ``packed`` is whether numbers of 16 bits stay two to a register, as those of one token do.
    ``aligned`` is that of one number where neighbouring columns do not lie side by side. Few heads
    are split among more blocks, with the same results to the last bit.
    """
    tile = _many_heads(K, V, kept, packed, aligned)
    while tile.warps % 2 == tile.lanes % 2 == 0:
        if 4 * heads * -(-V // tile.block_cols) > 3 * multiprocessors:
            break
        split = {"lanes": tile.lanes // 2, "warps": tile.warps // 2, "resident": 2 * tile.resident}
        tile = replace(tile, **split)
    return tile


def _many_heads(K: int, V: int, kept: str, packed: bool, aligned: int) -> StepTile:
    size = ITEMSIZE[kept]
    wide = 16 // size
    while wide > 1 and (V % wide or aligned < wide * size):
        wide //= 2
    packed = packed and kept == "bfloat16" and wide > 1
    twice = 2 if kept == "float32" and wide == 4 else 1  # longer rows in half as many blocks
    words = wide // 2 if packed else wide * max(1, size // 4)  # of a load in registers
    most = twice * STATE_WORDS // words  # loads of a thread
    lanes = min(32, twice * ROW_BYTES // (wide * size), 1 << (V // wide - 1).bit_length())
    warps = min(MAX_WARPS, -(-K // (32 // lanes * max(1, most))))
    tile = StepTile(K, wide, lanes, warps)
    loads = -(-K // tile.slots)
    if kept == "float64" or loads > min(most, twice * MAX_LOADS):
        return tile
    kind = "packed" if packed else "widened"
    if kept == "float32":
        kind = "long" if loads > MAX_LOADS else "float32"
    return replace(tile, resident=max(1, RESIDENT[kind] // tile.threads))


def most_shared(tile: StepTile, sums: str) -> int:
    """Bytes of shared memory for as many tokens as a call may have."""
    return tile.shared_bytes(MAX_TOKENS, sums)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
