"""cupy-gdelta info: with a GPU, without one, and without CuPy."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import cupy_gdelta
from cupy_gdelta import info
from cupy_gdelta.cli import main


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_info(capsys, wide):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert cupy_gdelta.__version__ in out
    assert np.__version__ in out
    assert "kernel cache" in out


def test_info_without_rich(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"cupy_gdelta   {cupy_gdelta.__version__}"
    assert {line[12:14] for line in lines} == {"  "}


def test_a_plain_table(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    info.table([["a", "one\ntwo", "x"], ["long", "", "y !"]], ["name\nunit", "b", "c"], "title")
    expected = ["title", "name  b    c", "unit", "a     one  x", "      two", "long       y !"]
    assert capsys.readouterr().out.splitlines() == expected


def test_info_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    rows = dict(info.rows())
    assert rows["CuPy"].startswith("not installed: it comes with the extra")
    assert "kernel cache" not in rows


def test_info_names_the_kernels_of_a_device(monkeypatch):
    pytest.importorskip("cupy")
    from cupy_gdelta import gpu

    for hopper, kernel in ((True, "linear_sm90"), (False, "linear")):
        monkeypatch.setattr(gpu, "limits", lambda i, hopper=hopper: (132, 227 * 1024, hopper))
        text = info._plans(0)
        assert len(text.splitlines()) == 9
        assert "linear float32: " in text
        assert f"linear bfloat16: {kernel}, " in text

    def too_old(i):
        raise RuntimeError("cupy_gdelta: its kernels need a newer GPU")

    monkeypatch.setattr(gpu, "limits", too_old)
    assert info._plans(0).endswith("a newer GPU")


def test_info_counts_the_cache(monkeypatch, tmp_path):
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "kernel.cubin").write_bytes(b"x" * 2**20)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    assert info._cache() == f"{tmp_path}: 1 files, 1.0 MiB"


@pytest.mark.gpu
def test_info_of_a_gpu(capsys, wide):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "compute capability" in out
    assert "delta bfloat16" in out
