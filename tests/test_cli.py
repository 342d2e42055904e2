"""The command line: parsing, one line for what is at fault, info, check, list and run."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from archives import one_line

import cupy_gdelta
from cupy_gdelta import check, cli, devices, info, programs
from cupy_gdelta.cli import main

ROOT = Path(cupy_gdelta.__file__).resolve().parent.parent
NO_GPU = "no CUDA device that works: told so"


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(devices, "why_no_gpu", lambda: NO_GPU)


def python(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ([], "COMMAND"),
        (["aply"], "aply"),
        (["apply"], "IN"),
        (["apply", "in.npz"], "-o"),
        (["apply", "in.npz", "-o", "out.npz", "--rule", "gated"], "gated"),
        (["apply", "in.npz", "-o", "out.npz", "--array", "jax"], "jax"),
        (["apply", "in.npz", "-o", "out.npz", "--precision", "low"], "low"),
        (["apply", "in.npz", "-o", "out.npz", "--scale", "big"], "big"),
        (["apply", "in.npz", "-o", "out.npz", "--piece", "0"], "positive number of tokens; got 0"),
        (["apply", "in.npz", "-o", "out.npz", "--piece", "-3"], "--piece"),
        (
            ["apply", "in.npz", "-o", "out.npz", "--qk-l2norm"],
            "--qk-l2norm belongs to --rule delta",
        ),
        (["apply", "nowhere.npz", "-o", "out.npz"], "nowhere.npz: No such file"),
        (["check", "--device", "tpu"], "tpu"),
        (["info", "more"], "more"),
        (["run"], "the following arguments are required: NAME\n"),
        (["run", "nothing"], "there is no example nothing; there are forecast, long_sequence"),
        (["run", "recall", "--mots", "3"], "--mots"),
        (["run", "recall", "--most", "300"], "--most must be from 1 to 256"),
        (["run", "recall", "--plot", "no/where.png"], "no/where.png cannot be written"),
        (["run", "forecast", "--plot", "no/where.png"], "no/where.png cannot be written"),
        (["run", "forecast", "--lags", "0"], "--lags must be from 1 to"),
        (["run", "recurrence", "--plot", "no/where.png"], "no/where.png cannot be written"),
        (["run", "recurrence", "--json", "no/where"], "no/where cannot be written"),
        (["run", "recurrence", "--json", "."], ". cannot be written"),
        (["run", "recurrence", "--head-dim", "257"], "--head-dim at most 256"),
        (["run", "recurrence", "--time", "0"], "at least 1"),
        (["run", "recurrence", "--batch", "1000000000000"], "out of memory: "),
        (["run", "recurrence", "--batch", "1000000000000000000"], "array is too big"),
        (["run", "speed", "--shape", "1,2"], "must be five sizes of at least 1"),
        (["run", "speed", "--shape", "a"], "must be five sizes of at least 1"),
        (["run", "speed", "--shape", "1,1,1,1,257"], "K and V at most 256; got 1,1,1,1,257"),
        (["run", "speed", "--shape", "1,0,1,1,1"], "at least 1"),
        (["run", "speed", "--repeat", "0"], "--repeat must be at least 1; got 0"),
        (["run", "speed", "--repeat", "-1"], "--repeat must be at least 1; got -1"),
    ],
)
def test_one_line(capsys, tmp_path, monkeypatch, command, text):
    monkeypatch.chdir(tmp_path)
    one_line(capsys, command, text)
    assert not list(tmp_path.iterdir())


def test_no_gpu(capsys, tmp_path, no_gpu):
    source = tmp_path / "in.npz"
    x = np.zeros((1, 3, 1, 2), np.float32)
    np.savez(source, q=x, k=x, v=x)
    out = tmp_path / "out.npz"
    one_line(capsys, ["apply", str(source), "-o", str(out), "--array", "cupy"], NO_GPU)
    one_line(capsys, ["check", "--device", "gpu"], NO_GPU)
    assert list(tmp_path.iterdir()) == [source]
    assert main(["apply", str(source), "-o", str(out)]) == 0
    assert "numpy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "command", "text"),
    [
        ("rich", ["run", "recall"], "rich is not installed: pip install rich"),
        ("matplotlib", ["run", "recall", "--plot", "x.png"], "pip install matplotlib"),
        ("torch", ["apply", "IN", "-o", "o.npz", "--array", "torch"], "pip install torch"),
        ("torch", ["run", "recurrence", "--array", "torch"], "pip install torch"),
        ("safetensors", ["apply", "IN.safetensors", "-o", "o.npz"], "pip install safetensors"),
    ],
)
def test_missing_extra(capsys, tmp_path, monkeypatch, no_gpu, module, command, text):
    x = np.zeros((1, 3, 1, 2), np.float32)
    np.savez(tmp_path / "in.npz", q=x, k=x, v=x)
    (tmp_path / "in.safetensors").write_bytes(b"any")
    command = [w.replace("IN", "in.npz") if w == "IN" else w.replace("IN", "in") for w in command]
    monkeypatch.chdir(tmp_path)
    for name in [n for n in sys.modules if n.partition(".")[0] == module] or [module]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_an_import_error_of_our_own_is_not_hidden(monkeypatch):
    def broken():
        import no_such_module

        return no_such_module

    monkeypatch.setattr(info, "show", broken)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main(["info"])


def test_a_bug_is_not_hidden(monkeypatch):
    def broken():
        raise ValueError("a bug")

    monkeypatch.setattr(info, "show", broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["info"])


def test_interrupt(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run", interrupted)
    assert main(["check"]) == 130
    assert capsys.readouterr() == ("", "")


def test_interrupt_at_the_start(capsys, monkeypatch):
    done = python("-c", "import sys, cupy_gdelta.cli; print('cupy_gdelta.bench' in sys.modules)")
    assert done.stdout == "False\n"  # it is imported where ^C is silent

    def interrupted(name, *rest, **options):
        if name.startswith("bench"):
            raise KeyboardInterrupt
        return before(name, *rest, **options)

    before = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr() == ("", "")


def test_help_and_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cupy-gdelta {cupy_gdelta.__version__}\n"
    for command in ([], ["apply"], ["list"], ["run"], ["info"], ["check"], ["run", "recall"]):
        assert main([*command, "--help"]) == 0
        assert "usage: cupy-gdelta" in capsys.readouterr().out


def test_help_imports_no_array_library():
    code = "import sys; from cupy_gdelta.cli import main; main(['apply', '--help']); main(['list'])"
    heavy = "{'cupy', 'torch', 'rich', 'safetensors', 'matplotlib'}"
    done = python("-c", f"{code}; assert not {heavy} & set(sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")


def test_as_a_module(tmp_path):
    done = python("-m", "cupy_gdelta", "--version")
    assert (done.returncode, done.stdout) == (0, f"cupy-gdelta {cupy_gdelta.__version__}\n")
    done = python("-m", "cupy_gdelta", "apply", "no.npz", "-o", "out.npz", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cupy-gdelta: no.npz: No such file or directory\n"


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("command", [["list"], ["info"], ["apply", "in.npz", "-o", "out.npz"]])
def test_full_standard_output(tmp_path, command, buffered):
    x = np.zeros((1, 3, 1, 2), np.float32)
    np.savez(tmp_path / "in.npz", q=x, k=x, v=x)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": buffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cupy_gdelta", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
    line = "cupy-gdelta: standard output: cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)
    assert (tmp_path / "out.npz").is_file() == ("out.npz" in command)


def test_closed_standard_output():
    done = python("-c", "import sys, cupy_gdelta.cli as c; sys.stdout = None; c.main(['list'])")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [["list"], ["info"], ["run", "recall", "--most", "4"]])
def test_broken_pipe(command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "cupy_gdelta", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait() == 1


def test_list(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0] for line in lines}
    assert names >= {"recurrence", "recall", "forecast", "torch_tensors", "speed"}
    assert all(len(line.split()) > 4 for line in lines)


def test_run_puts_things_back():
    before = sys.argv, cli.argparse.ArgumentParser.error
    assert main(["run", "recall", "--help"]) == 0
    assert (sys.argv, cli.argparse.ArgumentParser.error) == before
    assert "recall_example" not in sys.modules


def test_the_examples_may_be_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "__file__", str(tmp_path / "package" / "programs.py"))
    one_line(capsys, ["list"], "the examples are not installed")
