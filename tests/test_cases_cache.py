"""Reported faults (see test_cases.py): the cache of compiled kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import python

CALL = """
    import hashlib
    import cupy
    import numpy
    import cupy_gdelta

    # made on the host: CuPy's own kernels know no way around a cache that fails
    x, x16 = (cupy.asarray(numpy.full((1, 33, 2, 24), 1 / 8, t)) for t in ("float32", "float16"))
    y = cupy_gdelta.gated_delta_rule(x, x, x)
    y16 = cupy_gdelta.gated_linear_attention(x16, x16, x16)
    print(hashlib.sha256(y.tobytes() + y16.tobytes()).hexdigest())
"""
FALLS_BACK = """
    import warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        {call}
    texts = [str(w.message) for w in seen if issubclass(w.category, RuntimeWarning)]
    assert any("kernel cache cannot be used" in text for text in texts), texts
"""


def falls_back(before: str = "") -> str:
    call = textwrap.indent(textwrap.dedent(before + CALL), "    ").strip()
    return textwrap.dedent(FALLS_BACK).format(call=call)


@pytest.mark.gpu
def test_E02_processes_that_compile_at_once(tmp_path):
    """They corrupted the cache, or read half an entry (DeepGEMM#301, NVIDIA/warp#1284)."""
    environment = os.environ | {"CUPY_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(CALL)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(8)
    ]
    results = {process.communicate(timeout=240)[0] for process in running}
    assert [process.returncode for process in running] == [0] * 8
    assert len(results) == 1
    entries = [x for x in tmp_path.rglob("*") if x.is_file()]
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    assert python(CALL, CUPY_CACHE_DIR=str(tmp_path)) in results


@pytest.mark.gpu
def test_E03_a_cache_folder_with_accents_and_no_toolkit(tmp_path):
    """No CUDA headers or an unusual path: the first compile failed (cupy/cupy#8466, #1807)."""
    folder = tmp_path / "été à la Noël"
    path = os.pathsep.join(x for x in os.environ["PATH"].split(os.pathsep) if "cuda" not in x)
    python(CALL, CUPY_CACHE_DIR=str(folder), CUDA_PATH=None, CUDA_HOME=None, PATH=path)
    assert any(x.is_file() for x in folder.rglob("*"))


def no_cache_folder(**environment) -> None:
    """CuPy itself cannot be imported then; who passes torch tensors must learn why from us."""
    code = """
        try:
            import cupy_gdelta.gpu
        except ImportError as error:
            assert "kernel cache" in str(error), error
            assert "CUPY_CACHE_DIR" in str(error), error
            print("refused")
    """
    assert python(code, **environment) == "refused\n"


def test_E03_a_home_that_cannot_be_written():
    no_cache_folder(CUPY_CACHE_DIR=None, HOME="/proc/self")


@pytest.mark.gpu
def test_E05_a_second_process_compiles_nothing(tmp_path):
    """Compiled kernels were never found again (cupy/cupy#10173)."""
    first = python(CALL, CUPY_CACHE_DIR=str(tmp_path))
    times = {x: x.stat().st_mtime_ns for x in tmp_path.rglob("*") if x.is_file()}
    assert times
    assert python(CALL, CUPY_CACHE_DIR=str(tmp_path)) == first
    assert {x: x.stat().st_mtime_ns for x in tmp_path.rglob("*") if x.is_file()} == times


def test_E06_a_cache_that_cannot_be_made(tmp_path):
    """A cache of another user ended the program (accelerated-computing-hub PR#263)."""
    blocked = tmp_path / "a file"
    blocked.write_text("")
    no_cache_folder(CUPY_CACHE_DIR=str(blocked / "cache"))


@pytest.mark.gpu
def test_E06_a_disk_that_is_full(tmp_path):
    """So did a full disk (httomo#243); here no file may grow."""
    full = """
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    """
    code = falls_back(full)
    assert python(code, CUPY_CACHE_DIR=str(tmp_path), CUDA_CACHE_DISABLE="1") == python(CALL)


def test_the_tests_of_caches_are_themselves_right(tmp_path):
    """What stands for a full disk and an unwritable home does raise OSError here."""
    code = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        try:
            with open(sys.argv[1], "w") as f:
                f.write("x")
        except OSError:
            print("full")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "full\n"
    with pytest.raises(OSError, match="/proc/self"):
        Path("/proc/self/.cupy").mkdir()
    compile(falls_back("    import os\n"), "falls_back", "exec")
