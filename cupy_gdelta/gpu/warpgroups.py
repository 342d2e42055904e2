"""Tiles of the Hopper kernel cuda/linear_sm90.cu: pure functions of sizes, tested without a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .chunks import CHUNK, DECAY_BYTES, PIECE_CHUNKS, SHORTEST, in_pieces

MAX_DIM = 128
MAX_ITEMS = 2**31 - 2**12  # for which the kernel's 32 bits leave room
THREADS = 512
RING_BYTES = 4 * 2 * 12 * CHUNK  # sizeof(GateRing)
ITEMS, ITEM_BYTES = 4, 16  # of the queue
TILE_BYTES = 2 * CHUNK * 64


def dealing(pieces: int, queued: bool) -> str:
    """How blocks come by what they work on: Dealing of cuda/warpgroups.cuh."""
    return "kByQueue" if queued else "kInPieces" if pieces > 1 else "kInSteps"


def how(pieces: int, queued: bool) -> str:
    """The same for a reader of a plan."""
    return in_pieces(pieces) + (", longest first" if queued else "")


@dataclass(frozen=True)
class WarpgroupTile:
    """How ``linear`` of linear_sm90.cu splits one head: see there for the names."""

    dim: int  # K and V of the kernel
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
    def shared_bytes(self) -> int:
        """sizeof(Shared), and what it may take to begin at a multiple of 1024."""
        large = self.dim == 128
        across = self.dim // 64
        decays, states, outs = (3, 1, 1) if large else (6, 2, 2)
        tiles = self.stages * 3 * across + states * across**2 + outs * across
        barriers = 2 * (self.stages + decays + states + 1 + ITEMS)
        size = tiles * TILE_BYTES + decays * DECAY_BYTES + RING_BYTES
        size += 8 * barriers + 16 + ITEMS * ITEM_BYTES
        return 1024 + -(-size // 16) * 16


@functools.lru_cache(maxsize=4096)
def best_tile(
    T: int,
    items: int,
    K: int,
    V: int,
    multiprocessors: int,
    shared_limit: int,
    packed: bool = False,
) -> WarpgroupTile | None:
    """The deepest tile that fits; None where none does, or tokens are too few for it.

    Heads that are too few to fill the chip are cut along T, into pieces that run all at once.
    """
    if max(K, V) > MAX_DIM or shared_limit < 1024 or T < SHORTEST or items > MAX_ITEMS:
        return None
    dim = 64 if max(K, V) <= 64 else 128
    chunks = -(-T // CHUNK)
    pieces = max(1, min(multiprocessors // max(items, 1), chunks // PIECE_CHUNKS))
    size = -(-chunks // pieces) * CHUNK
    pieces = -(-chunks * CHUNK // size)  # the last ones may have nothing left
    for stages in (4, 3, 2):
        tile = WarpgroupTile(dim, stages, pieces, size, packed and pieces == 1)
        if tile.shared_bytes <= shared_limit:
            return tile
    return None
