"""cupy-gdelta apply: files in, files out, in pieces; nothing left behind where it refuses."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tracemalloc

import numpy as np
import pytest
from archives import BFLOAT16, arrays_of, load, refused, save
from compare import REFERENCE, assert_close

from cupy_gdelta import accuracy, apply, target
from cupy_gdelta.cli import main


def assert_right(result, arrays, rule="linear", dtype="float32", **options):
    y, state = REFERENCE[rule](**arrays, **options)
    assert set(result) == {"y", "state"}
    assert result["y"].dtype == arrays["q"].dtype
    assert result["state"].dtype == (np.float64 if dtype == "float64" else np.float32)
    assert_close(result["y"], y, accuracy.TOLERANCE[rule, dtype], "y")
    assert_close(result["state"], state, accuracy.TOLERANCE[rule, dtype], "state")


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("source", ["npz", "compressed", "safetensors"])
@pytest.mark.parametrize("target", ["npz", "safetensors"])
@pytest.mark.parametrize("packed", [False, True])
def test_pieces_are_right_and_equal_one_piece(tmp_path, rng, rule, source, target, packed):
    arrays = arrays_of(rng, packed=packed, state=True)
    path = tmp_path / ("in.safetensors" if source == "safetensors" else "in.npz")
    save(path, arrays, source == "compressed")
    results = []
    for piece in ("7", "150", "1000"):  # parts of a row, one row, all rows
        out = tmp_path / f"out{piece}.{target}"
        assert main(["apply", str(path), "-o", str(out), "--rule", rule, "--piece", piece]) == 0
        results.append(load(out))
        assert_right(results[-1], arrays, rule)
    for name in ("y", "state"):
        assert_close(results[0][name], results[-1][name], 1e-6, f"{name} in pieces")
    if packed:
        assert not results[0]["y"][:, 97:].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("array", ["numpy", "torch"])
def test_dtypes(tmp_path, rng, dtype, array):
    if array == "torch":
        pytest.importorskip("torch")
    arrays = arrays_of(rng, BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save(source, arrays)
    assert main(["apply", str(source), "-o", str(out), "--array", array, "--piece", "9"]) == 0
    assert_right(load(out), arrays, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_gpu(tmp_path, rng, dtype, rule):
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    arrays = arrays_of(rng, kind, packed=True, state=True)
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save(source, arrays)
    for array in ("auto", "cupy"):
        command = ["apply", str(source), "-o", str(out), "--rule", rule, "--array", array]
        assert main([*command, "--piece", "20"]) == 0
        assert_right(load(out), arrays, rule, dtype)


def test_options_reach_the_call(tmp_path, rng, capsys):
    arrays = arrays_of(rng)
    arrays["k"] *= 3
    arrays["log_gate"] = np.log(arrays.pop("gate"))
    source, out = tmp_path / "in.npz", tmp_path / "out.npz"
    save(source, arrays)
    command = ["apply", str(source), "-o", str(out), "--rule", "delta", "--precision", "tf32"]
    assert main([*command, "--scale", "0.25", "--qk-l2norm"]) == 0
    assert_right(load(out), arrays, "delta", "tf32", scale=0.25, qk_l2norm=True)
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{out}: y (2, 100, 4, 24) float32, state (2, 4, 24, 24) float32")
    assert shown.err == ""
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_gate_and_beta_may_be_left_out(tmp_path, rng):
    arrays = {n: x for n, x in arrays_of(rng).items() if n in "qkv"}
    save(tmp_path / "in.npz", arrays)
    assert main(["apply", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz")]) == 0
    assert_right(load(tmp_path / "out.npz"), arrays)


def test_a_later_run_goes_on_from_the_state(tmp_path, rng):
    whole = arrays_of(rng)
    first = {n: x[:, :37] for n, x in whole.items()}
    save(tmp_path / "first.npz", first)
    assert main(["apply", str(tmp_path / "first.npz"), "-o", str(tmp_path / "a.npz")]) == 0
    a = load(tmp_path / "a.npz")
    rest = {n: x[:, 37:] for n, x in whole.items()}
    save(tmp_path / "rest.npz", {**rest, "initial_state": a["state"]})
    assert main(["apply", str(tmp_path / "rest.npz"), "-o", str(tmp_path / "b.npz")]) == 0
    b = load(tmp_path / "b.npz")
    assert_right({"y": np.concatenate([a["y"], b["y"]], 1), "state": b["state"]}, whole)


def test_fortran_order_and_foreign_bytes(tmp_path, rng):
    arrays = arrays_of(rng)
    odd = {**arrays, "q": np.asfortranarray(arrays["q"]), "v": arrays["v"].astype(">f4")}
    save(tmp_path / "in.npz", odd)
    out = tmp_path / "out.npz"
    assert main(["apply", str(tmp_path / "in.npz"), "-o", str(out), "--piece", "30"]) == 0
    assert_right(load(out), arrays)


@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}])
@pytest.mark.parametrize("target", ["npz", "safetensors"])
def test_no_tokens(tmp_path, rng, sizes, target):
    save(tmp_path / "in.npz", arrays_of(rng, state=True, **sizes))
    out = tmp_path / f"out.{target}"
    assert main(["apply", str(tmp_path / "in.npz"), "-o", str(out)]) == 0
    result = load(out)
    assert result["y"].size == 0
    given = load(tmp_path / "in.npz")["initial_state"]
    np.testing.assert_array_equal(result["state"], given)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_memory_does_not_grow_with_time(tmp_path, rng, suffix):
    T = 200_000
    x = rng.standard_normal((1, T, 1, 16), dtype=np.float32) / 4
    save(tmp_path / f"in.{suffix}", {"q": x, "k": x, "v": x})  # 38 MB, and 13 MB of y
    del x
    command = ["apply", str(tmp_path / f"in.{suffix}"), "-o", str(tmp_path / f"out.{suffix}")]
    tracemalloc.start()
    try:
        assert main([*command, "--array", "numpy", "--quiet", "--piece", "2048"]) == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12e6
    assert load(tmp_path / f"out.{suffix}")["y"].shape == (1, T, 1, 16)


@pytest.mark.parametrize("mode", [None, 0o600, 0o640, 0o400])
def test_an_existing_output_is_replaced_and_keeps_its_permissions(tmp_path, rng, mode):
    save(tmp_path / "in.npz", arrays_of(rng))
    out = tmp_path / "out.npz"
    usual = (tmp_path / "in.npz").stat().st_mode
    if mode:
        out.write_bytes(b"old")
        out.chmod(mode)
    assert main(["apply", str(tmp_path / "in.npz"), "-o", str(out)]) == 0
    assert out.stat().st_mode == (usual & ~0o777 | mode if mode else usual)
    assert set(load(out)) == {"y", "state"}


def test_what_a_killed_run_left_is_no_hindrance(tmp_path, rng):
    save(tmp_path / "in.npz", arrays_of(rng))
    left = tmp_path / f".cupy-gdelta-{os.getpid()}.tmp"
    left.write_bytes(b"half")
    assert main(["apply", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz")]) == 0
    assert left.read_bytes() == b"half"


def test_a_full_disk(tmp_path, rng, capsys, monkeypatch):
    source = tmp_path / "in.npz"
    save(source, arrays_of(rng))

    def full(*_):
        raise OSError(28, "No space left on device")

    for part in ("_write", "_close"):
        for suffix, kind in (("npz", "_Archive"), ("safetensors", "_Tensors")):
            out = tmp_path / f"out.{suffix}"
            with monkeypatch.context() as patch:
                patch.setattr(f"cupy_gdelta.target.{kind}.{part}", full)
                text = f"{out}: cannot be written: No space left on device"
                refused(capsys, tmp_path, ["apply", str(source), "-o", str(out)], text, [source])


@pytest.mark.parametrize("room", [0, 100, 40_000, 77_000])  # y has 76800 bytes
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_file_that_cannot_grow(tmp_path, rng, capsys, room, suffix):
    source, out = tmp_path / "in.npz", tmp_path / f"out.{suffix}"
    save(source, arrays_of(rng))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        text = f"{out}: cannot be written: File too large"
        refused(capsys, tmp_path, ["apply", str(source), "-o", str(out)], text, [source])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_out_of_memory(tmp_path, rng, capsys, monkeypatch):
    source = tmp_path / "in.npz"
    save(source, arrays_of(rng))

    def fails(*_, **__):
        raise MemoryError("Unable to allocate 1 TiB")

    fails.__name__ = "gated_delta_rule"
    monkeypatch.setitem(apply.FUNCTIONS, "delta", fails)
    command = ["apply", str(source), "-o", str(tmp_path / "out.npz"), "--rule", "delta"]
    refused(capsys, tmp_path, command, "smaller --piece: Unable to allocate 1 TiB", [source])


@pytest.fixture
def heeded():
    """Signals as a program in the foreground has them: in the background a shell ignores ^C."""
    first = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in first.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["^C", "SIGTERM", "SIGHUP"],
)
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@pytest.mark.usefixtures("heeded")
def test_interrupted(tmp_path, rng, capsys, monkeypatch, number, code, suffix):
    source = tmp_path / "in.npz"
    save(source, arrays_of(rng))
    step, calls = apply._step, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(number)
        return step(*arguments)

    monkeypatch.setattr(apply, "_step", interrupted)
    out = tmp_path / f"out.{suffix}"
    assert main(["apply", str(source), "-o", str(out), "--piece", "10"]) == code
    assert capsys.readouterr().err == ""
    assert sorted(tmp_path.iterdir()) == [source]
    assert len(calls) == 3


def test_a_signal_that_is_ignored_stays_so(tmp_path, rng, monkeypatch):
    save(tmp_path / "in.npz", arrays_of(rng))
    step, handler = apply._step, signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does

    def hung_up(*arguments):
        signal.raise_signal(signal.SIGHUP)
        return step(*arguments)

    monkeypatch.setattr(apply, "_step", hung_up)
    try:
        assert main(["apply", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz")]) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("heeded")
def test_a_second_signal_does_not_end_the_tidying(tmp_path, rng, monkeypatch, number):
    source = tmp_path / "in.npz"
    save(source, arrays_of(rng))
    abandon = target._Archive.abandon

    def again(self):
        signal.raise_signal(signal.SIGHUP)
        abandon(self)

    monkeypatch.setattr(target._Archive, "abandon", again)
    monkeypatch.setattr(apply, "_step", lambda *_: signal.raise_signal(number))
    assert main(["apply", str(source), "-o", str(tmp_path / "out.npz")]) == 128 + number
    assert sorted(tmp_path.iterdir()) == [source]


def test_without_rich(tmp_path, rng, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    save(tmp_path / "in.npz", arrays_of(rng))
    out = tmp_path / "out.npz"
    assert main(["apply", str(tmp_path / "in.npz"), "-o", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{out}: y ")
    assert shown.err == ""
