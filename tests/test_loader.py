"""How kernels are compiled and kept: with a stand-in for CuPy's compiler, so without a GPU."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

loader = pytest.importorskip("cupy_gdelta.gpu.loader", exc_type=ImportError)


class Function:
    """A kernel that notes how it is launched."""

    def __init__(self, expression: str, launched: list):
        self.expression, self.launched = expression, launched
        self.max_dynamic_shared_size_bytes = 48 * 1024

    def __call__(self, grid, block, args, shared_mem):
        self.launched.append((self.expression, grid, block, args, shared_mem))


class Device:
    """Remembers, for each thread, which device is the current one."""

    current = threading.local()
    compute_capability = "90"

    def __init__(self, number: int | None = None):
        self.number = number

    def __enter__(self):
        self.current.number = self.number

    def __exit__(self, *_):
        self.current.number = None


@pytest.fixture
def compiler(monkeypatch):
    """What is compiled, in order; ``meet`` may be a barrier for all who compile at once."""
    seen = SimpleNamespace(compiled=[], options=[], launched=[], devices=[], meet=None)
    seen.capturing = False

    class RawModule:
        def __init__(self, code, options, name_expressions, enable_cooperative_groups):
            (self.expression,) = name_expressions
            if seen.meet is not None:
                seen.meet.wait(timeout=20)
            if "CUPY_CACHE_IN_MEMORY" not in os.environ and self.expression in seen.broken:
                raise OSError("read-only")
            seen.compiled.append(self.expression)
            seen.options.append(options)
            seen.devices.append(Device.current.number)

        def get_function(self, expression):
            assert expression == self.expression
            return Function(expression, seen.launched)

    stream = SimpleNamespace(is_capturing=lambda: seen.capturing)
    cuda = SimpleNamespace(Device=Device, get_current_stream=lambda: stream)
    seen.broken = set()
    monkeypatch.setattr(loader, "cupy", SimpleNamespace(RawModule=RawModule, cuda=cuda))
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.delenv(loader.RACECHECK, raising=False)
    return seen


def launches(*names: str) -> list:
    return [loader.Launch(name, 2, 32, 65536 * i, (name,)) for i, name in enumerate(names)]


def test_missing_kernels_are_compiled_side_by_side_and_once(compiler):
    compiler.meet = threading.Barrier(3)  # breaks unless three compile at the same time
    wanted = launches("a", "b", "a", "c")
    loader.run("step", wanted, device=1)
    assert sorted(compiler.compiled) == ["a", "b", "c"]
    assert compiler.devices == [1] * 3
    assert [x[0] for x in compiler.launched] == ["a", "b", "a", "c"]  # in the order given
    assert compiler.launched[1] == ("b", (2,), (32,), ("b",), 65536)
    compiler.meet = None
    loader.run("step", wanted, device=1)
    assert len(compiler.compiled) == 3
    loader.run("step", wanted[:1], device=0)
    assert compiler.compiled[3:] == ["a"]


def test_kernels_may_have_as_much_shared_memory_as_they_ask_for(compiler):
    found = loader.kernels("step", {"a": 100, "b": 49153}, device=0)
    assert found["a"].max_dynamic_shared_size_bytes == 48 * 1024
    assert found["b"].max_dynamic_shared_size_bytes == 49153
    assert loader.kernel("step", "b", 0, 49153) is found["b"]


def test_threads_that_want_the_same_kernel_share_it(compiler):
    found = []
    call = threading.Barrier(4)

    def want():
        call.wait()
        found.append(loader.kernel("step", "a", 0, 0))

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.compiled == ["a"]
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("broken", [{"b"}, {"a", "b"}])
def test_all_are_compiled_in_memory_where_the_cache_cannot_be_used(compiler, broken):
    compiler.broken = broken
    with pytest.warns(RuntimeWarning, match="kernel cache cannot be used") as warned:
        loader.run("step", launches("a", "b"), device=0)
    assert len(warned) == 1
    assert [x[0] for x in compiler.launched] == ["a", "b"]
    assert "CUPY_CACHE_IN_MEMORY" not in os.environ


def test_nothing_is_compiled_during_a_capture(compiler):
    loader.run("step", launches("a"), device=0)
    compiler.capturing = True
    loader.run("step", launches("a"), device=0)
    with pytest.raises(RuntimeError, match="call once with the same arguments before capturing"):
        loader.run("step", launches("a", "b"), device=0)
    assert compiler.compiled == ["a"]
    assert len(compiler.launched) == 2


def test_racecheck_is_compiled_for(compiler, monkeypatch):
    loader.run("step", launches("a"), device=0)
    monkeypatch.setenv(loader.RACECHECK, "1")
    loader.run("step", launches("b"), device=0)
    plain, checked = map(set, compiler.options)
    assert checked - plain == {"-DEVERY_LANE_ARRIVES", "-lineinfo"}
