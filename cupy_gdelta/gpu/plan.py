"""Problem -> which kernel, which tile: pure functions of sizes, tested without a GPU.

Estimates count warp instructions and cycles on the multiprocessors of sm_80 to sm_120, which issue
one instruction a cycle on each of four schedulers. They rank tiles, and were fitted to times of all
tiles at ten shapes on an H200; they do not predict times.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..arrays import ITEMSIZE, View
from . import (
    chunks,
    chunks32,
    chunks_grad,
    delta_chunks16,
    delta_chunks32,
    delta_grad_tile,
    delta_tile,
    grad_tiles,
    keepers,
    warpgroups,
)
from .chunks import ChunkTile
from .chunks32 import Tile32
from .chunks_grad import ChunkGradTile
from .delta_chunks16 import DeltaTile16
from .delta_chunks32 import DeltaTile32
from .delta_grad_tile import DeltaGradTile
from .delta_tile import DeltaTile
from .grad_tiles import GradTile
from .keepers import KeeperTile
from .warpgroups import WarpgroupTile

STATE_WORDS = 32  # 4-byte registers a thread may spend on its part of the state
ROW_WORDS = {"linear": 96, "delta": 80}  # and on its parts of the state, of q and of k together
STAGE_WORDS = 24  # and on tokens under way
FETCH_WARPS = 4  # at least so many warps fetch, whatever number computes
MAX_WARPS = 8
# Tokens past which a float32 state could lose more than the contract allows: its errors need not
# average out, with data of one sign they grow with the number of tokens.
LONG_SUM = {"float16": 8192, "bfloat16": 65536, "float32": 256}
LONG_GRAD_SUM = {"float16": 8192, "bfloat16": 65536, "float32": 1024}
LONG_LOG_GATE = 32  # for float32: a rounded exponential errs alike at every equal gate
SHARED_LIMIT = 227 * 1024  # bytes a block on sm_90 and sm_100


@dataclass(frozen=True)
class Tile:
    """How ``recurrent`` splits one head: see cuda/recurrent.cu for the names."""

    rows: int
    cols: int
    warps: int
    threads: int
    tokens: int
    wide: int
    shared_bytes: int

    @property
    def block_cols(self) -> int:
        return self.warps * (32 // self.rows) * self.cols


@dataclass(frozen=True)
class Plan:
    """The kernel that a call runs, and why it is that one."""

    kernel: str
    sums: str  # dtype that sums are made in
    tile: (
        Tile
        | ChunkTile
        | Tile32
        | DeltaTile16
        | DeltaTile32
        | WarpgroupTile
        | DeltaTile
        | KeeperTile
        | GradTile
        | ChunkGradTile
        | DeltaGradTile
    )
    reason: str


def sums(dtype: str, T: int, log_gate: bool, backward: bool = False) -> tuple[str, str]:
    """The dtype that sums over T tokens are made in, and why."""
    if dtype == "float64":
        return "float64", "sums in float64, the dtype of the inputs"
    most = LONG_LOG_GATE * (8 if backward else 1)  # gradients may err ten times as much
    if dtype == "float32" and log_gate and most < T:
        return "float64", f"gates and sums in float64: more than {most} log gates"
    most = (LONG_GRAD_SUM if backward else LONG_SUM)[dtype]
    if most < T:
        return "float64", f"sums in float64: more than {most} tokens"
    return "float32", "sums in float32"


def choose(
    rule: str,
    dtype: str,
    T: int,
    items: int,
    K: int,
    V: int,
    multiprocessors: int,
    aligned: int = 16,
    log_gate: bool = False,
    shared_limit: int = SHARED_LIMIT,
    copied: bool = False,
    precision: str = "highest",
    packed: bool = False,
) -> Plan:
    """Plan for ``items`` = N * H independent recurrences of at most T tokens.

    ``aligned`` is the largest power of two, up to 16, that divides the address of every row of q,
    k, v and y, in bytes; ``shared_limit`` the bytes of shared memory that a block may have;
    ``copied`` whether the device is Hopper and its copy engine can read and write these arrays;
    ``packed`` whether the sequences may differ in length.
    """
    if rule == "linear" and dtype == "bfloat16" and copied:
        wide = warpgroups.best_tile(T, items, K, V, multiprocessors, shared_limit, packed)
        if wide is not None:
            return Plan("linear_sm90", "float32", wide, f"chunks on warpgroups, {wide.reason}")
    if rule == "linear" and dtype == "bfloat16":
        tile = chunks.best_tile(T, items, K, V, multiprocessors, aligned == 16, shared_limit)
        if tile is not None:
            return Plan("linear", "float32", tile, f"chunks on tensor cores, {tile.reason}")
    if rule == "linear" and dtype in ("float32", "float16"):
        sizes = (T, items, K, V, multiprocessors)
        how = (aligned == 16, precision, shared_limit, dtype, copied)
        split = chunks32.best_tile(*sizes, *how)
        if split is not None:
            return Plan("linear32", "float32", split, f"chunks on tensor cores, {split.reason}")
    if rule == "delta" and dtype in ("float32", "float16"):
        kind = (aligned == 16, precision, shared_limit, dtype)
        small = delta_chunks16.best_tile(T, K, V, *kind)
        if small is not None:
            return Plan("delta16", "float32", small, f"chunks on tensor cores, {small.reason}")
        own = delta_chunks32.best_tile(T, K, V, *kind)
        if own is not None:
            return Plan("delta32", "float32", own, f"chunks on tensor cores, {own.reason}")
    if rule == "delta" and dtype == "bfloat16" and copied:
        kept = keepers.best_tile(T, items, K, V, multiprocessors, packed, shared_limit)
        if kept is not None:
            return Plan("delta_sm90", "float32", kept, f"chunks on warpgroups, {kept.reason}")
    if rule == "delta" and dtype == "bfloat16":
        walk = delta_tile.best_tile(T, items, K, V, multiprocessors, aligned == 16, shared_limit)
        if walk is not None:
            return Plan("delta", "float32", walk, "chunks on tensor cores, whole sequences")
    return choose_by_tokens(rule, dtype, T, items, K, V, multiprocessors, aligned, log_gate)


def choose_by_tokens(
    rule: str,
    dtype: str,
    T: int,
    items: int,
    K: int,
    V: int,
    multiprocessors: int,
    aligned: int = 16,
    log_gate: bool = False,
) -> Plan:
    """The plan of ``choose`` where no chunked kernel is for it."""
    made_in, why = sums(dtype, T, log_gate)
    return _choose(rule, dtype, made_in, why, items, K, V, multiprocessors, aligned)


def choose_grad(
    rule: str,
    dtype: str,
    T: int,
    items: int,
    K: int,
    V: int,
    multiprocessors: int,
    aligned: int = 16,
    log_gate: bool = False,
    shared_limit: int = SHARED_LIMIT,
) -> Plan:
    """Plan for gradients; arguments are those of ``choose``, and ``aligned`` is that of dy too."""
    sizes = (T, items, K, V, multiprocessors)
    if rule == "linear":
        chunked = chunks_grad.best_tile(dtype, *sizes, aligned == 16, shared_limit)
        if chunked is not None:
            reason = f"chunks on tensor cores, {chunked.reason}"
            return Plan("linear_grad", "float32", chunked, reason)
    if rule == "delta" and dtype in ("bfloat16", "float32"):
        blocks = delta_grad_tile.best_tile(dtype, *sizes, aligned == 16, shared_limit)
        if blocks is not None:
            return Plan("delta_grad", "float32", blocks, "chunks on tensor cores")
    return choose_grad_by_tokens(rule, dtype, *sizes, aligned, log_gate, shared_limit)


def choose_grad_by_tokens(
    rule: str,
    dtype: str,
    T: int,
    items: int,
    K: int,
    V: int,
    multiprocessors: int,
    aligned: int = 16,
    log_gate: bool = False,
    shared_limit: int = SHARED_LIMIT,
) -> Plan:
    """Plan for gradients token by token; arguments are those of ``choose_grad``."""
    made_in, why = sums(dtype, T, log_gate, backward=True)
    size, words = ITEMSIZE[dtype], ITEMSIZE[made_in] // 4
    tile = grad_tiles.best_tile(rule, K, V, words, 16 // size, items, multiprocessors, shared_limit)
    # alignment decides how tokens are fetched and nothing else: it does not show in the result
    tile = replace(tile, wide=max(1, min(tile.wide, aligned // size)))
    return Plan("recurrent_grad", made_in, tile, f"token by token, {why}")


@functools.lru_cache(maxsize=4096)
def _choose(
    rule: str,
    dtype: str,
    made_in: str,
    why: str,
    items: int,
    K: int,
    V: int,
    multiprocessors: int,
    aligned: int,
) -> Plan:
    size = ITEMSIZE[dtype]
    tile = best_tile(rule, made_in, K, V, items, multiprocessors, 16 // size)
    # alignment decides how tokens are fetched and nothing else: it does not show in the result
    tile = replace(tile, wide=max(1, min(tile.wide, aligned // size)))
    return Plan("recurrent", made_in, tile, f"token by token, {why}")


def alignment(*views: View) -> int:
    """The largest power of two, up to 16, that divides every row's address, in bytes."""
    bits = 16
    for x in views:
        bits |= x.ptr
        for size, stride in zip(x.shape[:-1], x.strides[:-1], strict=True):
            if size > 1:
                bits |= stride * ITEMSIZE[x.dtype]
    return bits & -bits


def best_tile(
    rule: str, sums: str, K: int, V: int, items: int, multiprocessors: int, wide: int
) -> Tile:
    """The tile with the least estimated time."""
    return min(
        tiles(rule, K, V, sums, wide),
        key=lambda tile: cycles(tile, rule, sums, K, V, items, multiprocessors),
    )


def tiles(rule: str, K: int, V: int, sums: str, wide: int) -> list[Tile]:
    """Every split that fits a thread's registers and does not leave half the lanes idle."""
    words = 2 if sums == "float64" else 1
    return [
        make_tile(K, V, sums, wide, rows, cols)
        for rows in (1, 2, 4, 8, 16, 32)
        for cols in (1, 2, 4)
        if rows_each(K, rows) * cols * words <= STATE_WORDS
        and rows_each(K, rows) * (cols + 2) * words <= ROW_WORDS[rule]
        and (rows == 1 or rows // 2 < K)
        and (cols == 1 or 32 // rows * cols // 2 < V)
    ]


def rows_each(K: int, rows: int) -> int:
    return -(-K // rows)


def make_tile(K: int, V: int, sums: str, wide: int, rows: int, cols: int) -> Tile:
    """Warps, threads and tokens a block for a split of the state over lanes."""
    words = 2 if sums == "float64" else 1
    warp_cols = (32 // rows) * cols
    needed = -(-V // warp_cols)
    warps = -(-needed // -(-needed // MAX_WARPS))
    threads = 32 * max(warps, FETCH_WARPS)
    block_cols = warps * warp_cols
    tokens = 32
    while tokens > 4 and tokens * (2 * K + block_cols) * words > STAGE_WORDS * threads:
        tokens //= 2
    while wide > 1 and (K % wide or V % wide or block_cols % wide):
        wide //= 2
    padded = rows * rows_each(K, rows)
    shared = 2 * tokens * (2 * padded + block_cols + 2) * 4 * words
    return Tile(rows, cols, warps, threads, tokens, wide, shared)


def cycles(
    tile: Tile, rule: str, sums: str, K: int, V: int, items: int, multiprocessors: int
) -> float:
    """Estimated cycles a token: the longer of what schedulers issue and what one warp waits for."""
    words = 2 if sums == "float64" else 1
    each = rows_each(K, tile.rows)
    run = next(n for n in (4 // words, 2, 1) if each % n == 0)
    hops = tile.rows.bit_length() - 1  # from lane to lane, in a sum over rows
    delta = rule == "delta"
    work: float = words * (4 if delta else 3) * each * tile.cols  # multiply-adds
    work += 2 * each / run + 2 * tile.cols * words + 10  # reading q and k; y; scalars and the loop
    if delta:
        work += 2 * tile.cols * hops * words
    fetch = 30 * (2 * K + tile.block_cols) / tile.wide / tile.threads
    schedulers = 4
    issued = work * -(-tile.warps // schedulers) + fetch * tile.threads / 32 / schedulers
    chain = 3 * each * tile.cols * words + 5 * hops * (3 if delta else 1)
    waves = -(-items * -(-V // tile.block_cols) // multiprocessors)
    return max(issued * waves, (chain + issued / 2) * max(1.0, waves / 2))
