"""One sequence over several GPUs against one of them: time, share of the ideal, bytes sent.

``python -m cupy_gdelta.bench.ranks --ranks 2`` starts a process for each rank, torch.distributed
with nccl between GPUs or, with ``--cpu``, gloo. Times are those of the slowest rank, by the host's
clock around a call that all start together, the median of ``--repeat``; efficiency is what one rank
takes for all tokens over the number of ranks times that. ``decaying`` gates are sigmoid(N(3, 1)),
``lasting`` ones 1; beta is uniform, keys are of unit length.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from .. import gated_delta_rule, gated_linear_attention, parallel
from ..arrays import FLOATS

ALONE = {"linear": gated_linear_attention, "delta": gated_delta_rule}
PARALLEL = {"linear": parallel.gated_linear_attention, "delta": parallel.gated_delta_rule}
WARM_UP = 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128, help="K and V")
    parser.add_argument("--dtype", choices=FLOATS, default="bfloat16")
    parser.add_argument("--rule", choices=ALONE, action="append", help="default: both")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--cpu", action="store_true", help="gloo between CPU processes")
    options = parser.parse_args(argv)
    if not importlib.util.find_spec("torch"):
        print("cupy_gdelta.bench.ranks: torch is not installed: pip install torch", file=sys.stderr)
        return 2
    if "RANK" in os.environ:
        return work(options)
    with tempfile.TemporaryDirectory() as folder:
        facts = {"WORLD_SIZE": str(options.ranks), "STORE": f"{folder}/store"}
        command = [sys.executable, "-m", "cupy_gdelta.bench.ranks", *(argv or sys.argv[1:])]
        started = [
            subprocess.Popen(command, env=os.environ | facts | {"RANK": str(rank)})
            for rank in range(options.ranks)
        ]
        return max(abs(x.wait()) for x in started)


def work(options: argparse.Namespace) -> int:
    """What each rank does."""
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{os.environ['STORE']}"
    if not options.cpu:
        torch.cuda.set_device(rank)
    engine = "gloo" if options.cpu else "nccl"
    dist.init_process_group(engine, init_method=store, rank=rank, world_size=ranks)
    device = "cpu" if options.cpu else f"cuda:{rank}"
    if rank == 0:
        name = "CPU" if options.cpu else torch.cuda.get_device_name(rank)
        print(f"{ranks} ranks, {name}, {engine}, torch {torch.__version__}")
        print(f"T {options.tokens}, H {options.heads}, K = V {options.width}, {options.dtype}")
    for rule in options.rule or ALONE:
        for gates in ("decaying", "lasting"):
            measure(options, rule, gates, device, rank, ranks)
    dist.destroy_process_group()
    return 0


def measure(
    options: argparse.Namespace, rule: str, gates: str, device: str, rank: int, ranks: int
) -> None:
    """Print a line on rank 0."""
    import torch.distributed as dist

    seconds = 0.0
    if rank == 0:  # alone, while the others wait
        whole = inputs(options, options.tokens, gates, device)
        seconds = median(lambda: ALONE[rule](**whole), options.repeat, device, together=False)
        del whole
    share = options.tokens * (rank + 1) // ranks - options.tokens * rank // ranks
    piece = inputs(options, share, gates, device)
    call = lambda: PARALLEL[rule](**piece, comm=dist.group.WORLD)  # noqa: E731
    messages, sent = counted(call)
    parted = median(call, options.repeat, device, together=True)
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, (parted, messages, sent))
    if rank == 0:
        slowest = max(x[0] for x in found)
        print(
            f"{rule:6} {gates:8} one rank {1e3 * seconds:9.3f} ms  {ranks} ranks "
            f"{1e3 * slowest:9.3f} ms  efficiency {seconds / ranks / slowest:4.0%}  "
            f"sent by a rank, at most: {max(x[1] for x in found)} messages, "
            f"{max(x[2] for x in found) / 1e6:.2f} MB",
            flush=True,
        )


def inputs(options: argparse.Namespace, tokens: int, gates: str, device: str) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = (1, tokens, options.heads)
    q, k, v = (torch.randn(*shape, options.width, dtype=dtype, device=device) for _ in range(3))
    for at in range(0, tokens, 1 << 16):  # in place and in parts, for there may be little room
        some = k[:, at : at + (1 << 16)]
        some /= some.norm(dim=-1, keepdim=True)
    gate = torch.ones(shape, dtype=wide, device=device)
    if gates == "decaying":
        gate = torch.sigmoid(torch.randn_like(gate) + 3)
    return {"q": q, "k": k, "v": v, "gate": gate, "beta": torch.rand_like(gate)}


def median(call: Callable[[], Any], repeat: int, device: str, *, together: bool) -> float:
    """Seconds of a call until its results are there."""
    import torch
    import torch.distributed as dist

    wait = (lambda: None) if device == "cpu" else torch.cuda.synchronize
    took = []
    for turn in range(WARM_UP + repeat):
        wait()
        if together:
            dist.barrier()
            wait()
        begin = time.perf_counter()
        call()
        wait()
        if turn >= WARM_UP:
            took.append(time.perf_counter() - begin)
    return statistics.median(took)


def counted(call: Callable[[], Any]) -> tuple[int, int]:
    """Messages that a call sends, and their bytes."""
    import torch.distributed as dist

    sizes: list[int] = []
    start = dist.batch_isend_irecv

    def batch(operations: list[Any]) -> Any:
        sizes.extend(x.tensor.nbytes for x in operations if x.op is dist.isend)
        return start(operations)

    dist.batch_isend_irecv = batch  # type: ignore[assignment]
    try:
        call()
    finally:
        dist.batch_isend_irecv = start
    return len(sizes), sum(sizes)


if __name__ == "__main__":
    raise SystemExit(main())
