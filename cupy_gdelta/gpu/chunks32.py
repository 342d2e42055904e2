"""Tiles of the chunked kernel cuda/linear32.cu: pure functions of sizes, tested without a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..arrays import ITEMSIZE
from .chunks import in_pieces

CHUNK = 32  # tokens
MAX_K = 128
MAX_T = 2**30  # tokens are counted in 32 bits
SHORTEST, SHORTEST_SMALL, SMALL = 128, 256, 2048  # tokens; for states of fewer numbers than SMALL
PIECE_CHUNKS = 16  # a piece has at least so many chunks, to be worth its state
DECAY_BYTES = 4 * (2 * 32 + 2 * 16 + 2 * 16 * 20 + 4)  # sizeof(Decay)
ITEM_BYTES = 8 * 8 + 6 * 4  # sizeof(Item)
PRODUCTS = {"highest": "kThree", "tf32": "kOne"}  # of float32
BOX_BYTES = 128  # of a row of a box
SINGLE, VECTORS, BOXES = 1, 16, 128  # copied at once: one number, or so many bytes


@dataclass(frozen=True)
class Tile32:
    """How ``linear32`` splits one head: see cuda/linear32.cu for the names."""

    K: int
    V: int
    cols: int
    turns: int
    stages: int
    slots: int
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
        return in_pieces(self.pieces)

    @property
    def boxes(self) -> bool:
        return self.wide == BOXES

    def by_copy_engine(self) -> Tile32:
        """The same where the engine can copy rows: if they are of whole vectors."""
        if self.wide != VECTORS:
            return self
        copiers, decays = _helpers(BOXES, self.stages)
        return replace(self, wide=BOXES, copy_warps=copiers, decay_warps=decays)

    @property
    def col_blocks(self) -> int:
        return -(-self.V // self.cols)

    @property
    def out_warps(self) -> int:
        return self.turns * (CHUNK // self.out_rows) * -(-self._real_cols // self.out_cols)

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
        state = self._state_parts * self.state_cols * -(-self.K // 32) * 32
        return self._bytes(2 * self._key_boxes, self.slots * state)

    @property
    def state_bytes(self) -> int:
        return self._bytes(self._key_boxes, 1)

    @property
    def _real_cols(self) -> int:
        return min(self.cols, self.V)

    @property
    def _state_parts(self) -> int:
        return -(-self._real_cols // self.state_cols)

    @property
    def _key_boxes(self) -> int:
        return self._boxes(self.K)

    def _boxes(self, cols: int) -> int:
        return -(-cols * ITEMSIZE[self.dtype] // BOX_BYTES)

    def _bytes(self, key_boxes: int, states: int) -> int:
        """sizeof(Shared), of so many boxes of q and k and so many numbers of states."""
        stage = CHUNK * BOX_BYTES * (key_boxes + self._boxes(self.cols))
        numbers = -(-(self.stages * stage + 4 * states) // 16) * 16  # Decay is aligned
        turns = 3 if self.K * self._real_cols < SMALL else 1  # ahead
        gates = 4 * turns * self.decay_warps * 2 * CHUNK
        barriers = 8 * (3 * self.stages + 2 * self.slots)
        size = numbers + self.stages * DECAY_BYTES + gates + ITEM_BYTES + barriers
        return -(-size // 16) * 16


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
    copied: bool = False,
) -> Tile32 | None:
    """The deepest tile that fits; None where none does, or tokens are too few for it.

    Heads that are too few to fill the chip are cut along T, into pieces that fill one wave.
    ``copied``: the device is Hopper, and its copy engine can read these arrays.
    """
    if K > MAX_K or T > MAX_T or (SHORTEST if K * V >= SMALL else SHORTEST_SMALL) > T:
        return None
    vector = 16 // ITEMSIZE[dtype]
    wide = VECTORS if aligned and K % vector == 0 and V % vector == 0 else SINGLE
    if copied and wide == VECTORS:
        wide = BOXES
    products = half_products(K, V) if dtype == "float16" else PRODUCTS[precision]
    chunks = -(-T // CHUNK)
    for tile in shapes(K, V, products, wide, dtype):
        blocks = items * tile.col_blocks
        too_few = K > 64 and tile.cols == 64 and blocks < multiprocessors
        if tile.shared_bytes <= shared_limit and not too_few:
            pieces = max(1, min(multiprocessors // max(blocks, 1), chunks // PIECE_CHUNKS))
            return replace(tile, pieces=pieces, piece_size=-(-chunks // pieces) * CHUNK)
    return None


def half_products(K: int, V: int) -> str:
    """Of float16: what is rounded errs less than y does, and small heads can do without that."""
    return "kMixed" if _small(K, V) else "kOne"


def _small(K: int, V: int) -> bool:
    return K <= 32 and V <= 32


def _helpers(wide: int, stages: int) -> tuple[int, int]:
    """Warps that copy and that make decays: each of these makes one of every so many stages."""
    return (1, min(3, stages)) if wide == BOXES else (2, 2)


def shapes(K: int, V: int, products: str, wide: int, dtype: str = "float32") -> list[Tile32]:
    """Tiles for a head, the better ones first: many chunks at a time, then copies far ahead."""
    width = min(32, -(-V // 8) * 8)  # of what one warp puts out, and keeps
    half, tall = dtype == "float16", K > 64
    found = []

    def add(cols, turns, slots, deepest, out, state=(32, 32)):
        for stages in range(deepest, turns, -1):
            sizes = (K, V, cols, turns, stages, slots)
            helpers = _helpers(wide, stages)
            found.append(Tile32(*sizes, *out, *state, *helpers, products, wide, dtype=dtype))

    if _small(K, V):
        for turns, slots in (4, 8), (2, 4), (2, 2):
            add(32, turns, slots, 10, (32, width), (16, 16))
        return found
    cols = 32 if tall or V <= 32 else 64
    if wide == BOXES and V > 32:
        # four warps for each of two or three parts: registers move to those that want them
        if half and K > 96:
            add(64, 2, 2, 4, (32, 32))
        elif 32 < K <= 64:  # one warp for all columns: it multiplies queries and keys once
            add(64, 4, 4, 9 if half else 6, (32, min(64, -(-V // 8) * 8)))
    if half and not tall:
        add(cols, 2, 4, 8, (32, width))
    for slots in 3, 2:
        add(cols, 2, slots, 6, (16 if tall and half else 32, width))
    for slots in 2, 1:
        add(cols, 1, slots, 6, (16, width if half or not tall else min(16, width)))
    return found
