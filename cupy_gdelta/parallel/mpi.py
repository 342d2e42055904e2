"""Messages through MPI, by mpi4py."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import View
from .links import Messages, from_host, on_host

TAG = 24007  # of every message


class MPILink:
    """Arrays on a GPU travel as they are where the MPI says that it can read them."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = _own(comm), comm.Get_rank(), comm.Get_size()

    def refuses(self, v: View) -> str:
        return ""

    def gather(self, record: bytes) -> list[bytes]:
        found = np.empty((self.size, len(record)), np.uint8)
        self.comm.Allgather(np.frombuffer(record, np.uint8), found)
        return [row.tobytes() for row in found]

    def exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        into = [(x, _buffer(x, filled=False), rank) for x, rank in receives]
        outof = [(_buffer(x, filled=True), rank) for x, rank in sends]
        requests = [self.comm.Irecv(buffer, source=rank, tag=TAG) for _, buffer, rank in into]
        requests += [self.comm.Isend(buffer, dest=rank, tag=TAG) for buffer, rank in outof]

        def wait() -> None:
            for request in requests:
                request.Wait()
            outof.clear()  # which MPI reads until here
            for x, buffer, _ in into:
                if buffer is not x:
                    from_host(x, buffer)

        return wait

    def broadcast(self, x: Any, root: int) -> None:
        buffer = _buffer(x, filled=self.rank == root)
        self.comm.Bcast(buffer, root=root)
        if buffer is not x and self.rank != root:
            from_host(x, buffer)

    def total(self, x: Any) -> None:
        buffer = _buffer(x, filled=True)
        self.comm.Allreduce(sys.modules["mpi4py.MPI"].IN_PLACE, buffer)
        if buffer is not x:
            from_host(x, buffer)


def _own(comm: Any) -> Any:
    """A duplicate of ``comm``, in which no receive of the caller takes a message.

    The first call makes it, all ranks together; it is freed with ``comm``.
    """
    found = comm.Get_attr(_key())
    if found is None:
        found = comm.Dup()
        comm.Set_attr(_key(), found)
    return found


@functools.cache
def _key() -> int:
    """Of the attribute of a communicator that holds its duplicate, which its duplicates lack."""
    return sys.modules["mpi4py.MPI"].Comm.Create_keyval(delete_fn=lambda comm, key, own: own.Free())


def _buffer(x: Any, *, filled: bool) -> Any:
    """What MPI reads or writes: ``x`` itself or a host array, with the contents of ``x``."""
    if isinstance(x, np.ndarray):
        return x
    if not cuda_aware():
        return on_host(x) if filled else np.empty(tuple(x.shape), np.uint8)
    if hasattr(x, "get"):  # MPI knows nothing of streams
        sys.modules["cupy"].cuda.get_current_stream().synchronize()
    else:
        sys.modules["torch"].cuda.current_stream(x.device).synchronize()
    return x


@functools.cache
def cuda_aware() -> bool:
    """Whether the MPI below mpi4py says that it reads and writes the memory of CUDA devices."""
    try:
        library = ctypes.CDLL(sys.modules["mpi4py.MPI"].__file__)  # finds those it is linked to
        return bool(library.MPIX_Query_cuda_support())  # Open MPI's, and MPICH's too
    except (AttributeError, KeyError, OSError):
        return False
