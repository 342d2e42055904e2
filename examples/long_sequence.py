"""Millions of bytes from one file, cut over MPI ranks: each reads its piece, the state crosses.

``mpiexec -n 4 cupy-gdelta run long_sequence``, with ``OMP_NUM_THREADS=1`` before it where the ranks
share a machine. The file (``--file``, or a made-up text) is mapped into memory, and each rank reads
its own piece alone. The delta rule keeps an associative memory from the last bytes, a random key
for each context of three, to the bits of the next byte: token t stores byte t under the bytes
before it, and its y is a guess at byte t + 1. What a rank guesses at first comes from the memory of
the ranks before it.

The table says how long each rank took to read its piece and for the call, waits included. The
lines below it say how many of the bits were guessed right, how long one rank takes for everything,
block by block, and how far the two results are apart, relative to their size.
"""

import argparse
import pathlib
import sys
import tempfile
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from cupy_gdelta import gated_delta_rule, parallel

try:
    from mpi4py import MPI
except ModuleNotFoundError:
    MPI = None

CONTEXT = 3  # bytes in a key
BLOCK = 1 << 18  # tokens at a time on one rank


def made_up(path, size):
    """A text of 2000 made-up words, some of which are frequent."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgk", np.uint8)
    words = [letters[rng.integers(0, len(letters), n)] for n in rng.integers(2, 9, 2000)]
    words = [word.tobytes() + b" " for word in words]
    chosen = rng.zipf(1.4, size // 3 + 1) % len(words)
    path.write_bytes(b"".join([words[i] for i in chosen])[:size])


def tokens(data, start, stop, width):
    """q, k, v [1, t, 1, ...] of tokens start to stop: byte t stored under those before it."""
    first = max(start - CONTEXT, 0)
    piece = np.concatenate([np.zeros(CONTEXT - (start - first), np.uint8), data[first:stop]])
    context = sum(piece[i : i + stop - start + 1].astype(np.int64) << 8 * i for i in range(CONTEXT))
    table = np.random.default_rng(1).standard_normal((4096, width), dtype=np.float32)
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    keys = table[context * 2654435761 % (1 << 32) >> 20][None, :, None]
    v = bits(piece[CONTEXT:])[None, :, None]
    return keys[:, 1:], keys[:, :-1], v


def bits(data):
    """-1 or 1 for each bit, [t, 8]."""
    return 2 * np.unpackbits(data[:, None], axis=1).astype(np.float32) - 1


def constants(t, gate):
    """gate and beta of t tokens, each one number in memory."""
    return [np.broadcast_to(np.float32(x), (1, t, 1)) for x in (gate, 0.5)]


def alone(data, width, gate):
    """y of all tokens on one rank, block by block, and the seconds of the calls."""
    state, parts, seconds = None, [], 0.0
    for start in range(0, len(data), BLOCK):
        stop = min(start + BLOCK, len(data))
        arrays = tokens(data, start, stop, width)
        begun = time.perf_counter()
        y, state = gated_delta_rule(
            *arrays, *constants(stop - start, gate), initial_state=state, return_state=True
        )
        seconds += time.perf_counter() - begun
        parts.append(y)
    return np.concatenate(parts, axis=1), seconds


def program(comm, options, path):
    if comm.rank == 0 and not options.file:
        made_up(path, options.tokens)
    comm.Barrier()
    begun = time.perf_counter()
    data = np.memmap(path, np.uint8, "r")[: options.tokens]
    start, stop = (len(data) * r // comm.size for r in (comm.rank, comm.rank + 1))
    q, k, v = tokens(data, start, stop, options.width)
    read = time.perf_counter()
    comm.Barrier()
    called = time.perf_counter()
    y = parallel.gated_delta_rule(q, k, v, *constants(stop - start, options.gate), comm=comm)
    done = time.perf_counter()
    facts = comm.gather((stop - start, read - begun, done - called))
    pieces = comm.gather(y)
    return report(data, facts, pieces, options) if comm.rank == 0 else 0


def report(data, facts, pieces, options):
    y = np.concatenate(pieces, axis=1)
    expected, seconds = alone(data, options.width, options.gate)
    right = np.mean((y[0, :-1, 0] > 0) == (bits(data[1:]) > 0))
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    table = Table("rank")
    for column in ("tokens", "read, s", "call, s"):
        table.add_column(column, justify="right")
    for rank, (count, read, call) in enumerate(facts):
        table.add_row(str(rank), f"{count:,}", f"{read:.2f}", f"{call:.2f}")
    console = Console(highlight=False)
    console.print(f"{len(data):,} bytes on {len(facts)} rank{'s' * (len(facts) > 1)}")
    console.print(table)
    console.print(f"{right:.1%} of the bits of the next byte guessed right")
    console.print(f"one rank alone: {seconds:.2f} s; relative difference {error:.1e}")
    return 0 if error < 5e-6 else 1


def wait(comm):
    """Until all ranks are here, without keeping a core busy that rank 0 could use."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.02)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=pathlib.Path, help="any file (default: a made-up text)")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="bytes of it (4,000,000)")
    parser.add_argument("--width", type=int, default=32, help="K, the length of a key (32)")
    parser.add_argument("--gate", type=float, default=0.999, help="what a token keeps (0.999)")
    options = parser.parse_args(argv)
    if MPI is None:
        line = "mpi4py is not installed: pip install mpi4py mpich"
        print(f"{parser.prog}: {line}", file=sys.stderr)
        return 2
    comm = MPI.COMM_WORLD
    if options.tokens < 2 or not 1 <= options.width <= 256 or not 0 <= options.gate <= 1:
        parser.error("--tokens must be 2 or more, --width from 1 to 256, --gate from 0 to 1")
    if options.file and not options.file.is_file():
        parser.error(f"there is no file {options.file}")
    if options.file and options.file.stat().st_size < 2:
        parser.error(f"{options.file} must have 2 bytes or more; it has fewer")
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = options.file or pathlib.Path(comm.bcast(folder)) / "text"
            code = program(comm, options, path)
            wait(comm)
    except Exception:
        if comm.size > 1:
            import traceback

            traceback.print_exc()
            comm.Abort(1)  # the others would wait for ever
        raise
    return comm.bcast(code)


if __name__ == "__main__":
    raise SystemExit(main())
