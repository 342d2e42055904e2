"""Messages through torch.distributed: gloo between CPUs, nccl between GPUs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import View
from .links import Messages, from_host, on_host


def known(group: Any) -> bool:
    """Whether torch.distributed still has ``group``."""
    try:
        sys.modules["torch"].distributed.get_global_rank(group, 0)
    except ValueError:
        return False
    return True


class GroupLink:
    """Arrays on a GPU travel by nccl where the group has it, else by gloo from the host."""

    def __init__(self, group: Any) -> None:
        self.torch = sys.modules["torch"]
        self.dist = self.torch.distributed
        self.group, self.rank, self.size = group, group.rank(), group.size()
        backends = str(self.dist.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
        self.backends = dict(x.split(":") for x in backends.split(","))
        self.nccl = self.backends.get("cuda") == "nccl"

    def refuses(self, v: View) -> str:
        if v.device < 0:
            return "" if "cpu" in self.backends else "on a GPU, for the group speaks nccl alone"
        if self.nccl and v.device != self._device():
            return f"on CUDA device {self._device()}, that of the group in this process"
        return ""

    def gather(self, record: bytes) -> list[bytes]:
        sent = self.torch.frombuffer(bytearray(record), dtype=self.torch.uint8)
        if "cpu" not in self.backends:
            sent = sent.to(f"cuda:{self._device()}")
        found = [self.torch.empty_like(sent) for _ in range(self.size)]
        self.dist.all_gather(found, sent, group=self.group)
        return [x.cpu().numpy().tobytes() for x in found]

    def exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        into = [(x, self._tensor(x, filled=False), rank) for x, rank in receives]
        outof = [(self._tensor(x, filled=True), rank) for x, rank in sends]
        operations = [self._operation(self.dist.irecv, tensor, rank) for _, tensor, rank in into]
        operations += [self._operation(self.dist.isend, tensor, rank) for tensor, rank in outof]
        if not operations:
            return lambda: None
        first = next(x for x, _ in (*sends, *receives))
        with self._on_stream(first):
            works = self.dist.batch_isend_irecv(operations)

        def wait() -> None:
            with self._on_stream(first):
                for work in works:
                    work.wait()
            outof.clear()  # which gloo reads until here
            for x, tensor, _ in into:
                self._arrived(x, tensor)

        return wait

    def broadcast(self, x: Any, root: int) -> None:
        tensor = self._tensor(x, filled=self.rank == root)
        with self._on_stream(x):
            source = self.dist.get_global_rank(self.group, root)
            self.dist.broadcast(tensor, source, group=self.group)
        if self.rank != root:
            self._arrived(x, tensor)

    def total(self, x: Any) -> None:
        tensor = self._tensor(x, filled=True)
        with self._on_stream(x):
            self.dist.all_reduce(tensor, group=self.group)
        self._arrived(x, tensor)

    def _device(self) -> int:
        """The CUDA device that the group works on in this process."""
        index = getattr(getattr(self.group, "bound_device_id", None), "index", None)
        return self.torch.cuda.current_device() if index is None else index

    def _operation(self, kind: Any, tensor: Any, rank: int) -> Any:
        peer = self.dist.get_global_rank(self.group, rank)
        return self.dist.P2POp(kind, tensor, peer, self.group)

    def _tensor(self, x: Any, *, filled: bool) -> Any:
        """A tensor for the group: over the memory of ``x`` where it can be, else on the host."""
        if isinstance(x, np.ndarray):
            return self.torch.from_numpy(x)
        if self.nccl:
            if isinstance(x, self.torch.Tensor):
                return x
            return self.torch.as_tensor(x, device=f"cuda:{x.device.id}")
        return self.torch.from_numpy(on_host(x) if filled else np.empty(tuple(x.shape), np.uint8))

    def _arrived(self, x: Any, tensor: Any) -> None:
        if not isinstance(x, np.ndarray) and not tensor.is_cuda:
            from_host(x, tensor.numpy())

    def _on_stream(self, x: Any) -> Any:
        """Let nccl follow the stream of CuPy; torch's it follows by itself."""
        if isinstance(x, (np.ndarray, self.torch.Tensor)) or not self.nccl:
            return contextlib.nullcontext()
        stream = sys.modules["cupy"].cuda.get_current_stream()
        foreign = self.torch.cuda.ExternalStream(stream.ptr, device=f"cuda:{x.device.id}")
        return self.torch.cuda.stream(foreign)
