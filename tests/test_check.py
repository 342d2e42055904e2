"""cupy-gdelta check: what is right passes, and every kind of miss gives exit code 1."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from cupy_gdelta import accuracy, check, devices
from cupy_gdelta.cli import main

NO_GPU = "no CUDA device that works: told so"


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(devices, "why_no_gpu", lambda: NO_GPU)


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_check(capsys, wide, no_gpu):
    assert main(["check", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "linear rule" in out
    assert "35 of 35 within tolerance" in out.splitlines()[-1]
    assert f"no GPU was checked: {NO_GPU}" in out
    for dtype in check.DTYPES:
        assert dtype in out


def test_check_without_rich(capsys, monkeypatch, no_gpu):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["check", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["gate", *check.DTYPES]
    assert lines[2].startswith("tolerance    1.0e-13  2.0e-06")
    assert lines[-1] == "35 of 35 within tolerance"


@pytest.mark.slow
def test_check_in_full(capsys, wide):
    assert main(["check", "--device", "cpu"]) == 0
    assert "85 of 85 within tolerance" in capsys.readouterr().out


@pytest.mark.gpu
def test_check_of_the_gpus(capsys, wide):
    assert main(["check", "--device", "gpu"]) == 0
    assert "GPU 0" in capsys.readouterr().out


def test_check_misses_what_is_out_of_tolerance(capsys, wide, monkeypatch):
    tight = {**accuracy.TOLERANCE, ("delta", "float16"): 1e-9}
    monkeypatch.setattr(accuracy, "TOLERANCE", tight)
    assert main(["check", "--quick", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert out.count(" !") == 4
    assert "31 of 35 within tolerance" in out


@pytest.mark.parametrize("wrong", ["y", "state", "nan"])
def test_check_misses_a_wrong_result(capsys, wide, monkeypatch, wrong):
    right, loop = check.RULES["linear"]

    def function(**arguments):
        y, state = right(**arguments)
        if wrong == "state":
            state *= 1.01
        else:
            y[..., -1, :, :] *= np.nan if wrong == "nan" else 1.5
        return y, state

    monkeypatch.setitem(check.RULES, "linear", (function, loop))
    assert main(["check", "--quick", "--device", "cpu"]) == 1
    assert "20 of 35 within tolerance" in capsys.readouterr().out


def test_check_misses_what_cannot_run(capsys, wide, monkeypatch):
    def function(**_):
        raise RuntimeError("no kernel\nat all")

    monkeypatch.setitem(check.RULES, "delta", (function, check.RULES["delta"][1]))
    assert main(["check", "--quick", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "failed: RuntimeError: no kernel\n" in out
    assert "15 of 35 within tolerance" in out
