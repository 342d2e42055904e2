"""One sequence over many ranks: ranks.py in processes of its own, and what needs no other rank."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from conftest import python
from launch import ENVIRONMENT, PROGRAM, group, mpi

from cupy_gdelta import parallel
from cupy_gdelta.bench import ranks
from cupy_gdelta.parallel import model
from cupy_gdelta.parallel.pieces import share

SMALL = (
    "zeros",
    "states",
    "packed",
    "alone",
    "repeatable",
    "neighbours",
    "layouts",
    "not_a_number",
    "refusals",
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_over_mpi(ranks):
    names = (*SMALL, "lasting", "growing", "subgroup", "staging", "traffic", "wildcards")
    done = mpi(ranks, PROGRAM, "mpi", "numpy", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "".join(f"{name} passed\n" for name in names)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_cases(ranks):
    done = mpi(ranks, PROGRAM, "mpi", "numpy", "random")
    assert (done.returncode, done.stdout) == (0, "random passed\n"), done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [2, 4])
def test_torch_tensors_over_mpi(ranks):
    pytest.importorskip("torch")
    names = ("some", "layouts", "gradients", "differentiable")
    done = mpi(ranks, PROGRAM, "mpi", "torch", *names)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("ranks", "array"), [(2, "numpy"), (3, "torch")])
def test_over_torch_gloo(tmp_path, ranks, array):
    more = ("gradients", "differentiable") if array == "torch" else ()
    for code, log in group(
        ranks, tmp_path, "gloo", array, *SMALL, "some", "subgroup", "staging", *more
    ):
        assert code == 0, log


def test_a_dead_rank_ends_the_others():
    done = mpi(3, PROGRAM, "mpi", "numpy", "death")
    assert done.returncode != 0


def test_a_dead_rank_ends_a_torch_group(tmp_path):
    found = group(3, tmp_path, "gloo", "torch", "death")
    assert [code for code, _ in found][-1] == -9
    assert all(code != 0 for code, _ in found)
    assert all("RuntimeError" in log for _, log in found[:-1]), found


@pytest.mark.gpu
@pytest.mark.parametrize("array", ["torch-cuda", "cupy"])
def test_over_nccl(tmp_path, array):
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available():
        pytest.skip(f"needs two GPUs and nccl; torch finds {torch.cuda.device_count()} GPU")
    more = ("gradients", "differentiable") if array == "torch-cuda" else ()
    for code, log in group(
        2, tmp_path, "nccl", array, *SMALL, "lasting", "growing", "random", *more
    ):
        assert code == 0, log


@pytest.mark.gpu
@pytest.mark.parametrize("array", ["torch-cuda", "cupy"])
def test_gpu_arrays_through_the_host(tmp_path, array):
    """Two ranks may share a GPU, over gloo."""
    for code, log in group(2, tmp_path, "gloo", array, *SMALL, "lasting", "growing", "some"):
        assert code == 0, log


@pytest.mark.gpu
def test_cupy_arrays_over_mpi():
    done = mpi(2, PROGRAM, "mpi", "cupy", *SMALL, "some")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_torch_benchmark():
    pytest.importorskip("torch")
    sizes = {"tokens": 3000, "heads": 1, "width": 8, "dtype": "float32", "repeat": 1}
    words = [f"--{label}={x}" for label, x in sizes.items()]
    command = [sys.executable, "-W", "error", "-m", "cupy_gdelta.bench.ranks", "--cpu"]
    command += [*words, "--rule=delta"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks, CPU, gloo")
    assert [line.split()[:2] for line in lines[2:]] == [["delta", "decaying"], ["delta", "lasting"]]
    assert all("1 messages" in line and "efficiency" in line for line in lines[2:])


def test_the_torch_benchmark_without_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert ranks.main([]) == 2
    assert capsys.readouterr().err.endswith("torch is not installed: pip install torch\n")


def test_no_engine_is_imported():
    code = """
        import sys
        for name in ("cupy", "mpi4py", "torch"):
            sys.modules[name] = None
        import cupy_gdelta.parallel
        try:
            cupy_gdelta.parallel.gated_delta_rule(None, None, None, comm=object())
        except TypeError as error:
            print(error)
    """
    assert "comm must be a communicator of mpi4py or a process group" in python(code)


def test_a_comm_that_is_none():
    one = np.ones((1, 4, 1, 1), np.float32)
    with pytest.raises(TypeError, match=r"gated_delta_rule: comm must be .* got NoneType"):
        parallel.gated_delta_rule(one, one, one, comm=None)


def test_shares_of_random_pieces(rng):
    """Every sequence starts and ends on one rank each; a chain is the same to all its ranks."""
    for _ in range(1000):
        size = int(rng.integers(1, 7))
        lengths = rng.integers(0, 5, size) * rng.integers(0, 2, size)
        T, N = int(lengths.sum()), int(rng.integers(0, 6))
        offsets = np.sort(rng.integers(0, T + 1, N + 1))
        offsets[0] = 0
        pieces = share(lengths, 1, offsets)
        bounds = np.append(0, np.cumsum(lengths))
        started, ended = np.full(N, -1), np.full(N, -1)
        for r in range(size):
            part = pieces.part(r)
            started[part.first : part.last] = r
            first, stop = pieces.finished(r)
            assert (ended[first:stop] == -1).all()
            ended[first:stop] = r
            start, end = bounds[r : r + 2]
            enters = [n for n in range(N) if offsets[n] < start < offsets[n + 1]]
            leaves = [n for n in range(N) if offsets[n] < end < offsets[n + 1]]
            entering = min(offsets[enters[0] + 1], end) - start if enters else 0
            assert part.entering == entering
            assert part.leaves == bool(leaves and end > start)
            assert part.offsets is not None
            assert part.offsets[0] == 0
            dead = rng.random(size) < 0.3
            for leaving in (False, True):
                chain = pieces.chain(r, dead, leaving=leaving)
                assert bool(chain) == (part.leaves if leaving else part.entering > 0)
                for other in chain[1:]:
                    assert pieces.chain(other, dead, leaving=False) == chain
                for other in chain[:-1]:
                    assert pieces.chain(other, dead, leaving=True) == chain
        for n in range(N):
            if offsets[n] < offsets[n + 1]:
                first = np.searchsorted(bounds, offsets[n], "right") - 1
                last = np.searchsorted(bounds, offsets[n + 1] - 1, "right") - 1
                assert (started[n], ended[n]) == (first, last)
            else:
                assert started[n] == ended[n] >= 0


def test_the_table_of_the_model():
    assert model.table() in model.__doc__
    sizes = {"H": 16, "K": 128, "V": 128, "itemsize": 4}
    for rule in ("linear", "delta"):
        assert model.sent(rule, 1, 0, **sizes) == (0, 0)
        most = [max(model.sent(rule, n, r, **sizes).bytes for r in range(n)) for n in (512, 1024)]
        transition = 16 * 16 if rule == "linear" else 16 * 128 * (128 * 4 + 8)
        one = 16 * 128 * 128 * 4 + transition
        assert most[1] - most[0] == one, "a round more"
