"""What the work needs of an engine that carries messages between ranks, and which one a comm is.

Messages are flat arrays of bytes, whatever the engine: NumPy or CuPy arrays or torch CUDA tensors.
An engine that cannot reach the memory of a GPU gets a copy on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..arrays import View

Messages = Sequence[tuple[Any, int]]  # an array, and the rank that it goes to or comes from


class Link(Protocol):
    """This rank's end of a communicator."""

    rank: int
    size: int

    def refuses(self, v: View) -> str:
        """Why arrays like ``v`` cannot travel; empty where they can."""

    def gather(self, record: bytes) -> list[bytes]:
        """The records of all ranks, which are equally long, on all ranks."""

    def exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        """Start to send and to receive; what it returns waits for the end of both."""

    def broadcast(self, x: Any, root: int) -> None:
        """Fill ``x`` on all ranks with that of ``root``."""

    def total(self, x: Any) -> None:
        """Fill ``x``, numbers for once, on all ranks with the sum of all."""


def link(name: str, comm: Any) -> Link:
    """This rank's end of the caller's communicator."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    group = getattr(distributed, "ProcessGroup", None)
    if group is not None and isinstance(comm, group):
        from .groups import GroupLink, known

        if not known(comm):
            raise ValueError(f"{name}: comm must be a process group in use; got a destroyed one")
        return GroupLink(comm)
    if all(hasattr(comm, x) for x in ("Get_rank", "Isend", "Irecv", "Allgather", "Bcast")):
        if not comm:
            raise ValueError(f"{name}: comm must be a communicator in use; got a null or freed one")
        if comm.Is_inter():
            raise TypeError(f"{name}: comm must be an intracommunicator; got an intercommunicator")
        from .mpi import MPILink

        return MPILink(comm)
    outside = getattr(getattr(distributed, "GroupMember", None), "NON_GROUP_MEMBER", None)
    if outside is not None and type(comm) is type(outside) and comm == outside:
        raise ValueError(f"{name}: comm must be a group that this rank is in; got {outside!r}")
    raise TypeError(
        f"{name}: comm must be a communicator of mpi4py or a process group of torch.distributed; "
        f"got {type(comm).__name__}"
    )


def on_host(x: Any) -> np.ndarray:
    """A copy on the host of an array on a GPU, made when all before it on its stream is done."""
    return x.get() if hasattr(x, "get") else x.cpu().numpy()


def from_host(x: Any, host: np.ndarray) -> None:
    """Fill ``x`` on a GPU."""
    if hasattr(x, "get"):
        x.set(host)
    else:
        x.copy_(sys.modules["torch"].from_numpy(host))
