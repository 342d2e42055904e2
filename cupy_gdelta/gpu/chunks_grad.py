"""Tiles of chunked gradients, cuda/linear_grad.cu: pure functions of sizes, tested on no GPU."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

CHUNK = 64  # tokens
MAX_D = 128  # rows and columns of the state
SHORTEST = 64  # tokens; shorter sequences are faster token by token
MAX_WARPS = 8
PLACE_BYTES = 16  # where the first token of a chunk has its gradients
GATE_BYTES = 4 * 4 * 16 * 20  # of products of gates within blocks of 16 tokens
WEIGHT_BYTES = 4 * (CHUNK + 4)  # sizeof(ChunkWeights)
SHARED_BYTES = 228 * 1024  # of a multiprocessor of sm_90 and sm_100; a block may have 1 KB less
BLOCK_BYTES = 1024  # that every block takes beside its own


@dataclass(frozen=True)
class ChunkGradTile:
    """How ``chunk_states`` and ``chunk_grads`` split one head: see cuda/linear_grad.cu."""

    dtype: str
    K: int
    V: int
    cols: int
    wide: bool
    apart: bool = True
    parts: int = 1  # warps that share the columns of 16 rows
    roles: int = 1  # 2: other warps make gradients of queries than those of keys and values
    room: int = SHARED_BYTES  # shared memory of a multiprocessor

    reason = "states of chunks, then all chunks at once"

    @property
    def col_blocks(self) -> int:
        return -(-self.V // self.cols)

    @property
    def state_threads(self) -> int:
        tiles = -(-self.K // 16)
        down = next(n for n in (4, 2, 1) if tiles % n == 0)
        return 32 * down * min(MAX_WARPS // down, self.cols // 16)

    @property
    def state_bytes(self) -> int:
        stage = CHUNK * (self._row(self.K) + self._row(self.cols))
        ahead = max(self.state_threads // 32, 2)
        stages = 4 if self.wide and self._planes == 1 else 2
        return stages * stage * 2 + 2 * ahead * WEIGHT_BYTES

    @property
    def threads(self) -> int:
        return 2 * CHUNK * self.parts * self.roles

    @property
    def shared_bytes(self) -> int:
        padding = 16 * self.parts
        K, V = (-(-x // padding) * padding for x in (self.K, self.V))
        key, value = self._row(K), self._row(V)
        numbers = 2 * CHUNK * (key + value) + (2 if self.apart else 1) * K * value
        scalars = 6 * CHUNK + 4 + self.parts * (3 * CHUNK + 25 + 4 * self.roles)
        return numbers * 2 + PLACE_BYTES + GATE_BYTES + -(-scalars // 2) * 8

    @property
    def together(self) -> int:
        """Blocks of ``chunk_grads`` that share a multiprocessor, and its registers."""
        size = max(self.K, self.V)
        if self.parts * self.roles == 1:
            small = size <= (32 if self.dtype == "bfloat16" else 24)
            most = 3 + small - (not self.wide)  # for registers
        else:
            most = 2 if size <= 64 else 1
        return max(1, min(most, self.room // (self.shared_bytes + BLOCK_BYTES)))

    @property
    def state_size(self) -> int:
        """Bytes of a number of a state between the two kernels."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def _planes(self) -> int:
        return 1 if self.dtype == "bfloat16" else 2

    def _row(self, cols: int) -> int:
        return self._planes * -(-cols // 16) * 16 + 8


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
) -> ChunkGradTile | None:
    """The widest tile that fits; None where none does, or tokens are too few for it.

    Where heads are too few to fill the chip, more blocks share the columns of a state.
    """
    if dtype not in ("bfloat16", "float16", "float32") or max(K, V) > MAX_D or T < SHORTEST:
        return None
    step = 4 if dtype == "float32" else 8
    wide = aligned and K % step == 0 and V % step == 0
    if max(K, V) > 64 and not wide:
        return None  # there are no registers for copies number by number beside long rows
    parts = 2 if max(K, V) > 64 else 1  # one warp has not the registers for long rows
    # where registers are few enough for twice as many warps, and one warp has much to do
    roles = 2 if wide and max(K, V) <= 24 and dtype == "float32" else 1
    most = 64 if dtype == "bfloat16" or K <= 64 else 32  # for the registers of a warp
    room = shared_limit + BLOCK_BYTES
    widths = [cols for cols in (64, 32, 16) if cols == 16 or (cols <= most and cols < 2 * V)]
    for cols, apart in itertools.product(widths, (True, False)):
        tile = ChunkGradTile(dtype, K, V, cols, wide, apart, parts, roles, room)
        enough = 2 * items * tile.col_blocks >= 0.9 * multiprocessors or cols == widths[-1]
        if enough and max(tile.shared_bytes, tile.state_bytes) <= shared_limit:
            return tile
    return None
