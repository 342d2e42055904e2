"""How a call is timed: CUDA events, L2 flushed before each call, the median; graphs of a call."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

FLUSH = 1 << 29  # bytes written before each call, or eight times the L2 where that is more
COPY = 1 << 29  # bytes of the buffer copied for the copy rate
WARM_UP = 3
Call = Callable[[], Any]


class Timer:
    """Times calls on the current device and stream.

    Before every call a buffer several times the L2 is written, as often as it takes the GPU to be
    busy until the host has issued the call: the figure is time on the GPU, and what the host needs
    to issue the call is a figure of its own.

    Parameters
    ----------
    repeat : int
        Calls that are timed; the median counts.
    """

    def __init__(self, repeat: int) -> None:
        import cupy

        self.cupy, self.repeat = cupy, repeat
        self.device = cupy.cuda.Device()
        cache = cupy.cuda.runtime.getDeviceProperties(self.device.id)["l2CacheSize"]
        self.buffer = cupy.empty(max(FLUSH, 8 * cache), "uint8")
        self.flush_us = 1.0
        self.flush_us = self._elapsed(self._flush, 1)

    def call(self, call: Call) -> tuple[float, float]:
        """Median microseconds of a call on the GPU, and on the host until it returns."""
        for _ in range(WARM_UP):
            call()
        host = []
        for _ in range(self.repeat):
            self.device.synchronize()
            begin = time.perf_counter()
            call()
            host.append(1e6 * (time.perf_counter() - begin))
        host_us = statistics.median(host)
        return self._elapsed(call, math.ceil(1.5 * host_us / self.flush_us)), host_us

    def back_to_back(self, call: Call, wait: Callable[[Any], Any]) -> float:
        """Microseconds of a call in a queue of ten, by the host's clock: JAX has its own stream."""
        wait(call())
        took = []
        for _ in range(self.repeat):
            begin = time.perf_counter()
            last = [call() for _ in range(10)]
            wait(last)
            took.append(1e5 * (time.perf_counter() - begin))
        return statistics.median(took)

    def copy_rate(self) -> float:
        """Bytes a second that a device-to-device copy reads and writes, both counted."""
        source = self.cupy.zeros(COPY, "uint8")
        target = self.cupy.empty_like(source)
        us = self._elapsed(lambda: self.cupy.copyto(target, source), 1)
        return 2 * COPY / us * 1e6

    def _flush(self) -> None:
        self.buffer.fill(0)

    def _elapsed(self, call: Call, flushes: int) -> float:
        events = []
        call()
        for _ in range(self.repeat):
            for _ in range(flushes):
                self._flush()
            start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            start.record()
            call()
            stop.record()
            events.append((start, stop))
        self.device.synchronize()
        elapsed = self.cupy.cuda.get_elapsed_time
        return 1e3 * statistics.median(elapsed(*pair) for pair in events)


def cupy_graph(call: Call) -> tuple[Call, Any]:
    """Capture a call that writes into an array of its own; a replay, and that array."""
    import cupy

    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(WARM_UP):  # also fills this stream's memory pool
            call()
        stream.begin_capture()
        try:
            y = call()
        finally:
            graph = stream.end_capture()
    stream.synchronize()
    return graph.launch, y


def torch_graph(call: Call) -> tuple[Call, Any]:
    """Capture a call on torch tensors; a replay, and the tensor that it writes."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    return graph.replay, y
