"""The examples show what their docstrings claim, with the public functions alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from launch import mpi

import cupy_gdelta
from cupy_gdelta import programs, reference
from cupy_gdelta.cli import main

NAMES = ("recurrence", "recall", "forecast", "stream", "torch_tensors", "train")
SMALL = ["--batch", "2", "--time", "100", "--heads", "2", "--repeat", "1"]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(programs.folder()))
    monkeypatch.setenv("COLUMNS", "200")

    def named(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    return named


def cells(text):
    """Rows of the table that rich has drawn, without their frame."""
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


@pytest.mark.parametrize("name", NAMES)
def test_runs_alone_and_draws(tmp_path, name):
    if name in ("torch_tensors", "train"):
        pytest.importorskip("torch")
    plot = tmp_path / "figure.png"
    options = {
        "recurrence": SMALL,
        "stream": ["--block", "16"],
        "train": ["--steps", "3", "--pairs", "4"],
    }.get(name, [])
    done = subprocess.run(
        [sys.executable, str(programs.folder() / f"{name}.py"), *options, "--plot", str(plot)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(cupy_gdelta.__file__).parent.parent), "COLUMNS": "120"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert cells(done.stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [*NAMES, "long_sequence"])
def test_uses_public_names_only(name):
    tree = ast.parse((programs.folder() / f"{name}.py").read_text(encoding="utf-8"))
    public = {*cupy_gdelta.__all__, "parallel", "reference"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("cupy_gdelta"):
            assert node.module == "cupy_gdelta"
            assert {alias.name for alias in node.names} <= public


def test_recurrence(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    figures = tmp_path / "figures.json"
    command = ["run", "recurrence", *SMALL, "--array", "numpy", "--json", str(figures)]
    assert main(command) == 0
    table = cells(capsys.readouterr().out)
    rows = json.loads(figures.read_text())["rows"]
    assert [row["name"] for row in rows] == list(table) == ["cupy_gdelta", "NumPy loop"]
    assert all(row["error"] < 1e-6 and row["seconds"] > 0 for row in rows)


def test_the_loop_of_recurrence_is_the_rule(load):
    module = load("recurrence")
    arrays = module.inputs(2, 30, 3, 24)
    y, _ = reference.gated_linear_attention(*arrays)
    np.testing.assert_allclose(module.numpy_loop(*arrays), y, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("array", ["cupy", "torch"])
def test_recurrence_on_a_gpu(tmp_path, array):
    if array == "torch" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    figures = tmp_path / "figures.json"
    assert main(["run", "recurrence", *SMALL, "--array", array, "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert [row["name"] for row in found["rows"]] == ["cupy_gdelta", "user_kernel.cu"]
    assert all(row["error"] < 2e-6 and row["floor"] > 0 for row in found["rows"])
    assert found["copy_bytes_per_second"] > 1e10


def test_recall(capsys, load):
    module = load("recall")
    assert module.main(["--most", "64"]) == 0
    table = cells(capsys.readouterr().out)
    assert list(table) == ["1", "2", "4", "8", "16", "32", "64"]
    linear, delta = np.array([[float(x) for x in row[:2]] for row in table.values()]).T
    assert linear[0] == delta[0] == 0
    assert (delta[1:] < linear[1:]).all()
    assert delta.max() < 0.5
    assert linear[-1] > 5
    assert (linear[3:-1] < linear[4:]).all()
    assert int(table["64"][3]) > int(table["64"][2])


def test_recall_reads_without_writing(load, rng):
    module = load("recall")
    keys, values = module.unit(rng.standard_normal((8, 5))), rng.standard_normal((8, 3))
    one, many = module.recall("delta", keys, values, (1, 8))
    np.testing.assert_allclose(one, values[:1], atol=1e-12)
    np.testing.assert_allclose(many[-1], values[7], atol=1e-12)  # nothing has overwritten the last


def test_forecast(capsys, load):
    module = load("forecast")
    for series in module.SERIES:
        assert module.main(["--series", series]) == 0
        table = cells(capsys.readouterr().out)
        error = {name: float(row[0]) for name, row in table.items()}
        assert error["delta rule"] < 0.75 * error["persistence"]
        assert error["least squares"] < 0.75 * error["persistence"]


def test_forecast_looks_at_no_later_value(load, rng):
    module = load("forecast")
    z = rng.standard_normal(60)
    settings = [(0.99, 0.3), (1.0, 0.5)]
    whole = module.adaptive(z, 4, settings)
    assert whole.shape == (len(z) - 5, 2)
    later = z.copy()
    later[40:] += 100
    changed = module.adaptive(later, 4, settings)
    # Row i forecasts z[5 + i]; value 40 is first seen by the forecast of value 41.
    np.testing.assert_array_equal(changed[:36], whole[:36])
    assert (changed[36] != whole[36]).all()


def test_forecast_is_normalised_least_mean_squares(load, rng):
    module = load("forecast")
    z, lags, (gate, beta) = rng.standard_normal(50), 3, (0.9, 0.4)
    weights, expected = np.zeros(lags + 1), []
    for t in range(lags, len(z) - 1):
        x = np.append(z[t - lags : t], 1)
        weights = gate * weights
        weights = weights + beta * x * (z[t] - x @ weights) / (x @ x)
        expected.append(np.append(z[t - lags + 1 : t + 1], 1) @ weights)
    np.testing.assert_allclose(module.adaptive(z, lags, [(gate, beta)])[:, 0], expected, atol=1e-12)


def test_stream(capsys, load, tmp_path):
    module = load("stream")
    wav = tmp_path / "both.wav"
    assert module.main(["--block", "16", "--wav", str(wav)]) == 0
    out = capsys.readouterr().out
    snr = {name: float(row[0]) for name, row in cells(out).items()}
    assert snr["delta rule"] > snr["least squares"] + 3 > snr["with hum"] + 9
    assert "real-time factor" in out
    x, rate = module.read(wav)
    voice, _ = module.read(programs.folder() / "voice.wav")
    assert rate == 8000
    assert len(x) == 2 * len(voice) + rate // 2
    before, after = x[: len(voice)], x[-len(voice) :]
    late = slice(rate // 2, None)
    gained = module.decibels(voice[late], (after - voice)[late])
    assert gained == pytest.approx(snr["delta rule"], abs=0.1)
    assert module.decibels(voice[late], (before - voice)[late]) < 1


def test_stream_gives_the_same_for_every_block(load):
    module = load("stream")
    voice, rate = module.read(programs.folder() / "voice.wav")
    x = voice[:1000] + module.hum(1000, rate, 0.01)
    keys = module.reference(1001, rate)
    one = module.cancel(x, keys, 0.01, 1)
    np.testing.assert_allclose(module.cancel(x, keys, 0.01, 16), one, rtol=0, atol=1e-6)
    # normalised least mean squares, with weights read before each sample
    weights, expected = np.zeros(keys.shape[1]), []
    for sample, key in zip(x.astype(float), keys.astype(float), strict=False):
        expected.append(sample - key @ weights)
        weights += 0.01 * key * expected[-1]
    np.testing.assert_allclose(one, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--block", "17"], "--block must be from 1 to 16"),
        (["--beta", "0"], "--beta must be between 0 and 1"),
        (["--seconds", "0.5"], "--seconds must be more than 1"),
        (["--wav", "no/where.wav"], "no/where.wav cannot be written"),
    ],
)
def test_stream_refuses(capsys, words, text):
    assert main(["run", "stream", *words]) == 2
    assert text in capsys.readouterr().err


def test_torch_tensors(capsys, load):
    pytest.importorskip("torch")
    assert load("torch_tensors").main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert [row[-1] for row in cells(out).values()] == ["yes"] * 4
    assert "y of torch equals y of numpy: True" in out


@pytest.mark.gpu
def test_torch_tensors_on_a_gpu(load):
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    assert load("torch_tensors").main(["--device", "cuda"]) == 0


def test_train_poses_the_task_it_says(load):
    torch = pytest.importorskip("torch")
    module = load("train")
    tokens, answers = module.sequences(5, 7, torch.Generator().manual_seed(0))
    assert tokens.shape == (5, 21)
    for line, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        pairs = dict(zip(line[:14:2], line[1:14:2], strict=True))
        assert len(pairs) == 7, "a key is listed once"
        assert [pairs[key] - module.VOCABULARY for key in line[14:]] == wanted


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_train_looks_at_no_later_token(load, rule):
    torch = pytest.importorskip("torch")
    module = load("train")
    torch.manual_seed(0)
    model = module.make(rule)
    tokens, _ = module.sequences(2, 7, torch.Generator().manual_seed(0))
    later = tokens.clone()
    later[:, 12:] = 0
    torch.testing.assert_close(model(later)[:, :12], model(tokens)[:, :12])


@pytest.mark.slow
def test_train_recalls_in_two_minutes(load, tmp_path, capsys):
    pytest.importorskip("torch")
    begin = time.perf_counter()
    assert load("train").main(["--plot", str(tmp_path / "losses.png")]) == 0
    assert time.perf_counter() - begin < 120
    table = cells(capsys.readouterr().out)
    recalled = {rule: float(row[2].rstrip("%")) for rule, row in table.items()}
    assert recalled["delta"] >= 99
    assert recalled["linear"] >= 99


@pytest.mark.gpu
def test_train_on_a_gpu(load):
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    assert load("train").main(["--device", "cuda", "--steps", "30"]) == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--pairs", "33"], "--pairs must be from 1 to 32"),
        (["--device", "cuda"], "torch finds no CUDA device"),
    ],
)
def test_train_refuses(load, capsys, monkeypatch, words, text):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        load("train").main(words)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", ["torch_tensors", "train"])
def test_without_torch(name, capsys, load, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert load(name).main([]) == 2
    error = capsys.readouterr().err
    assert "pip install torch" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("ranks", [1, 3])
def test_long_sequence(tmp_path, ranks):
    file = tmp_path / "bytes"
    file.write_bytes(np.random.default_rng(0).integers(0, 4, 30_000).astype(np.uint8).tobytes())
    words = ["-m", "cupy_gdelta", "run", "long_sequence", "--file", str(file), "--tokens", "20000"]
    done = mpi(ranks, *words, module=False)
    assert (done.returncode, done.stderr) == (0, "")
    table = cells(done.stdout)
    assert sum(int(row[0].replace(",", "")) for row in table.values()) == 20_000
    assert len(table) == ranks
    assert float(done.stdout.split()[-1]) < 1e-6


def test_long_sequence_keeps_what_it_has_seen(load, tmp_path):
    pytest.importorskip("mpi4py")
    module = load("long_sequence")
    data = np.resize(np.frombuffer(b"abcdefgh", np.uint8), 200)
    y, _ = module.alone(data, 32, 0.999)
    wanted = module.bits(data[1:])
    assert ((y[0, 50:-1, 0] > 0) == (wanted[50:] > 0)).all()
    q, k, v = module.tokens(data, 100, 110, 32)
    whole = module.tokens(data, 0, 200, 32)
    for part, all_of_it in zip((q, k, v), whole, strict=True):
        np.testing.assert_array_equal(part, all_of_it[:, 100:110])


def test_long_sequence_makes_its_text(load, capsys):
    pytest.importorskip("mpi4py")
    module = load("long_sequence")
    for count, text in ((5000, "5,000"), (2, "2"), (3, "3")):
        assert module.main(["--tokens", str(count)]) == 0
        out = capsys.readouterr().out
        assert f"{text} bytes on 1 rank" in out
        assert "nan" not in out


@pytest.mark.parametrize("size", [0, 1])
def test_long_sequence_refuses_what_is_too_short(capsys, load, tmp_path, size):
    pytest.importorskip("mpi4py")
    module = load("long_sequence")
    file = tmp_path / "short"
    file.write_bytes(b"a" * size)
    for wrong in (["--tokens", "1"], ["--gate", "2"], ["--file", "nowhere"], ["--file", str(file)]):
        with pytest.raises(SystemExit, match="2"):
            module.main(wrong)
        assert "must" in capsys.readouterr().err or "nowhere" in wrong


def test_long_sequence_without_mpi4py(capsys, load, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert load("long_sequence").main([]) == 2
    assert "pip install mpi4py mpich" in capsys.readouterr().err


def test_the_data_is_named_and_small():
    folder = programs.folder()
    readme = (folder / "README.md").read_text(encoding="utf-8")
    data = [p for p in folder.iterdir() if p.suffix in (".npz", ".csv", ".wav")]
    assert len(data) == 4
    for path in data:
        assert f"`{path.name}`" in readme
        assert path.stat().st_size < 200_000
    for name in programs.summaries():
        assert f"`{name}.py`" in readme
