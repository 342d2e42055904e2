"""The README is true: its snippets run, its commands work, its numbers are those of the package."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import numpy as np
import pytest
from compare import assert_close
from launch import mpi

from cupy_gdelta import accuracy, cli, reference

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()
]


def snippet(library: str, gradients: bool = False) -> str:
    """The code of whole sequences with this library, for the results or for their gradients."""
    some = [code for code in SNIPPETS if f"import {library}" in code and "_step" not in code]
    (found,) = (code for code in some if gradients == ("backward()" in code or "_grad(" in code))
    return found


def test_the_two_commands_are_those_of_ci():
    assert COMMANDS[0] == 'pip install -e ".[test]" && cupy-gdelta run recurrence'
    assert COMMANDS[1] == "python -m pytest"
    steps = (README.parent / ".ci" / "run").read_text()
    assert 'pip install -q -e ".[test]"' in steps
    assert "cupy-gdelta run recurrence" in steps
    assert "python -m pytest\n" in steps


def test_the_numpy_snippet():
    scope: dict = {}
    exec(snippet("numpy"), scope)
    assert scope["y"].shape == (2, 512, 4, 24)
    assert np.isfinite(scope["y"]).all()


def test_the_decode_snippet():
    (code,) = (code for code in SNIPPETS if "gated_delta_rule_step" in code)
    scope: dict = {}
    exec(code, scope)
    inputs = dict(zip(("q", "k", "v", "gate", "beta"), scope["inputs"], strict=True))
    y, state = reference.gated_delta_rule(**inputs, qk_l2norm=True)
    assert_close(scope["y"], y[:, 100], accuracy.TOLERANCE["delta", "float32"], "y")
    assert_close(scope["state"], state, accuracy.TOLERANCE["delta", "float32"], "state")


def test_the_numpy_snippet_with_gradients():
    scope: dict = {}
    exec(snippet("numpy", gradients=True), scope)
    for name in ("q", "k", "v", "gate", "beta"):
        assert getattr(scope["d"], name).shape == scope[name].shape
    assert scope["d"].initial_state is None


def test_the_torch_snippet_with_gradients():
    pytest.importorskip("torch")
    scope: dict = {}
    exec(snippet("torch", gradients=True), scope)
    for name in ("q", "k", "v", "log_gate"):
        assert scope[name].grad.isfinite().all()
        assert scope[name].grad.any()


@pytest.mark.gpu
def test_the_cupy_snippet():
    scope: dict = {}
    exec(snippet("cupy"), scope)
    assert scope["y2"].shape == (2, 212, 4, 64)
    assert bool(scope["cp"].isfinite(scope["y2"]).all())


def test_the_torch_snippet():
    torch = pytest.importorskip("torch")
    scope: dict = {}
    exec(snippet("torch"), scope)
    assert scope["y"].shape == (1, 512, 8, 64)
    assert scope["state"].shape == (2, 8, 64, 64)
    assert bool(torch.isfinite(scope["y"]).all())


def test_the_mpi_snippet(tmp_path):
    before = """
        import numpy as np
        rng = np.random.default_rng(0)
        q, k, v = (rng.random((1, 9, 2, 8), dtype=np.float32) / 8 for _ in range(3))
        gate, beta = (rng.random((1, 9, 2), dtype=np.float32) for _ in range(2))
    """
    after = """
        assert y.shape == v.shape
        assert (state is None) == (MPI.COMM_WORLD.rank == 0)
    """
    program = tmp_path / "program.py"
    code = (textwrap.dedent(before), snippet("MPI"), textwrap.dedent(after))
    program.write_text("\n".join(code))
    done = mpi(2, str(program))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", COMMANDS[2:])
def test_every_other_command(line, tmp_path, monkeypatch, capsys, rng):
    monkeypatch.chdir(tmp_path)
    inputs = {n: x.astype("float32") for n, x in accuracy.inputs(rng, T=100).items()}
    np.savez("in.npz", **inputs)
    program, *words = shlex.split(line)
    assert program == "cupy-gdelta"
    assert cli.main(words) == 0
    output = capsys.readouterr().out
    for name in re.findall(r"-o (\S+)|--plot (\S+)|--wav (\S+)", line):
        assert (tmp_path / "".join(name)).stat().st_size > 0
    assert output


def test_the_table_of_tolerances():
    for rule in ("linear", "delta"):
        (row,) = re.findall(rf"^\| {rule} rule \|(.*)\|$", TEXT, re.MULTILINE)
        stated = [float(x) for x in row.split("|")]
        dtypes = ("float64", "float32", "float16", "bfloat16")
        assert stated == [accuracy.TOLERANCE[rule, dtype] for dtype in dtypes]
    (row,) = re.findall(r"^\| gradients of either \|(.*)\|$", TEXT, re.MULTILINE)
    stated = [float(x) for x in row.split("|")]
    assert stated == [accuracy.GRADIENT_TOLERANCE[dtype] for dtype in dtypes]


def test_every_example_is_named():
    folder = README.parent / "examples"
    for path in folder.glob("*.py"):
        if path.stem != "__init__":
            assert f"`{path.stem}`" in TEXT, path.stem
