"""Input files that cupy-gdelta apply must refuse, in one line and without a trace."""

from __future__ import annotations

import io
import os
import zipfile

import numpy as np
import pytest
from archives import BFLOAT16, arrays_of, load, refused, save

from cupy_gdelta import files
from cupy_gdelta.cli import main
from cupy_gdelta.files import BITS


def drop(name):
    return lambda arrays: arrays.pop(name)


def put(name, change):
    return lambda arrays: arrays.update({name: change(arrays)})


REFUSED = {
    "no q": (drop("q"), "there is no array q"),
    "no v": (drop("v"), "there is no array v"),
    "misspelt": (put("gates", lambda a: a["gate"]), "gates is none of the arrays q, k, v, gate"),
    "time": (put("v", lambda a: a["v"][:, :-1]), "v must have shape (B, T, H, V)"),
    "rank": (put("q", lambda a: a["q"][0]), "q must have shape (B, T, Hq, K)"),
    "heads": (put("beta", lambda a: a["beta"][..., :2]), "beta must have shape (B, T, H)"),
    "scalar": (put("beta", lambda a: np.float32(1)), "beta must have shape (B, T, H)"),
    "dtype": (put("q", lambda a: a["q"].astype(int)), "q must have dtype"),
    "mixed": (put("k", lambda a: a["k"].astype("f8")), "k must have dtype"),
    "state of apply": (put("state", lambda a: a["q"]), "rename it to initial_state"),
    "both": (put("log_gate", lambda a: a["gate"]), "log_gate"),
    "state": (put("initial_state", lambda a: np.zeros((2, 4, 24, 23), "f4")), "initial_state must"),
    "offsets": (put("cu_seqlens", lambda a: np.array([0, 50])), "cu_seqlens must"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_bad_arrays(tmp_path, rng, capsys, case, suffix):
    change, text = REFUSED[case]
    arrays = arrays_of(rng)
    change(arrays)
    source = tmp_path / f"in.{suffix}"
    save(source, arrays)
    command = ["apply", str(source), "-o", str(tmp_path / "out.npz")]
    refused(capsys, tmp_path, command, text, [source])


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data[: len(data) // 2], "cannot be read"),
        (lambda data: b"", "cannot be read"),
        (lambda data: b"no archive" * 100, "cannot be read"),
    ],
    ids=["truncated", "empty", "garbage"],
)
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_damaged_files(tmp_path, rng, capsys, damage, text, suffix):
    source = tmp_path / f"in.{suffix}"
    save(source, arrays_of(rng))
    source.write_bytes(damage(source.read_bytes()))
    command = ["apply", str(source), "-o", str(tmp_path / "out.npz"), "--piece", "10"]
    refused(capsys, tmp_path, command, text, [source])


@pytest.mark.parametrize("compressed", [False, True])
def test_a_flipped_bit_of_a_npz(tmp_path, rng, capsys, compressed):
    source = tmp_path / "in.npz"
    save(source, arrays_of(rng), compressed)
    with zipfile.ZipFile(source) as archive:
        at = archive.getinfo("beta.npy").header_offset + 600
    data = bytearray(source.read_bytes())
    data[at] ^= 1
    source.write_bytes(data)
    command = ["apply", str(source), "-o", str(tmp_path / "out.npz"), "--piece", "10"]
    refused(capsys, tmp_path, command, "beta: cannot be read: ", [source])


def test_a_member_shorter_or_longer_than_its_header(tmp_path, rng, capsys):
    arrays = arrays_of(rng)
    for extra, text in ((-4, "v: cannot be read: it ends early"), (4, "v: cannot be read: it is")):
        source = tmp_path / "in.npz"
        save(source, arrays)
        with zipfile.ZipFile(source) as archive:
            members = {n: archive.read(n) for n in archive.namelist()}
        data = members["v.npy"]
        members["v.npy"] = data[:extra] if extra < 0 else data + b"\0" * extra
        with zipfile.ZipFile(source, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        command = ["apply", str(source), "-o", str(tmp_path / "out.safetensors")]
        refused(capsys, tmp_path, command, text, [source])


def header(descr, shape):
    file = io.BytesIO()
    fields = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue()


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ([(-1, 5, 1, 8)] * 3, "q: cannot be read: its shape is (-1, 5, 1, 8)"),
        ([(1, 10**18, 1, 8)] * 3, "q: cannot be read: it ends early"),
        ([(1, 10**30, 1, 8)] * 3, "q: cannot be read: it ends early"),
        ([(0, 10**18, 10**18, 8)] * 3, "array is too big"),
        ([(1, 0, 1, 8), (1, 0, 1, 8), (1, 0, 10**9, 256)], "does not fit in memory"),
        ([(1, 0, 1, 8), (1, 0, 1, 8), (1, 0, 10**15, 256)], "does not fit in memory"),
        ([(10**15, 0, 1, 256)] * 3, "does not fit in memory"),
    ],
)
def test_headers_of_absurd_sizes(tmp_path, capsys, shapes, text):
    source = tmp_path / "in.npz"
    with zipfile.ZipFile(source, "w") as archive:
        for name, shape in zip("qkv", shapes, strict=True):
            archive.writestr(f"{name}.npy", header("<f4", shape))
    for suffix in ("npz", "safetensors"):
        command = ["apply", str(source), "-o", str(tmp_path / f"out.{suffix}")]
        refused(capsys, tmp_path, command, text, [source])


def test_an_absurd_number_of_tokens_without_heads(tmp_path):
    for rule in ("linear", "delta"):
        for shape in ((1, 10**15, 0, 8), (10**15, 1, 0, 8)):
            with zipfile.ZipFile(tmp_path / "in.npz", "w") as archive:
                for name in "qkv":
                    archive.writestr(f"{name}.npy", header("<f4", shape))
            out = tmp_path / "out.npz"
            assert main(["apply", str(tmp_path / "in.npz"), "-o", str(out), "--rule", rule]) == 0
            assert load(out)["y"].shape == shape


@pytest.mark.parametrize("descr", ["<i4", "<U2", "|b1", [("a", "<f4")], ("<f4", (24,))])
def test_members_of_odd_dtypes(tmp_path, rng, capsys, descr):
    source = tmp_path / "in.npz"
    save(source, {n: x for n, x in arrays_of(rng).items() if n in "kv"})
    size = 2 * 100 * 2 * 24 * np.lib.format.descr_to_dtype(descr).itemsize
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr("q.npy", header(descr, (2, 100, 2, 24)) + bytes(size))
    command = ["apply", str(source), "-o", str(tmp_path / "out.npz")]
    refused(capsys, tmp_path, command, "", [source])


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@pytest.mark.parametrize("kind", [f"{sign}int{bits}" for sign in ("", "u") for bits in BITS])
def test_offsets_of_every_integer_dtype(tmp_path, rng, suffix, kind):
    arrays = arrays_of(rng, packed=True)
    outs = []
    for name, dtype in (("in", kind), ("same", "int64")):
        source, out = tmp_path / f"{name}.{suffix}", tmp_path / f"{name}-out.npz"
        save(source, {**arrays, "cu_seqlens": arrays["cu_seqlens"].astype(dtype)})
        assert main(["apply", str(source), "-o", str(out), "--piece", "40"]) == 0
        outs.append(load(out))
    for name in ("y", "state"):
        np.testing.assert_array_equal(outs[0][name], outs[1][name])


def test_an_input_that_cannot_be_read_further(tmp_path, rng, capsys, monkeypatch):
    source = tmp_path / "in.npz"
    save(source, arrays_of(rng))

    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files._Member, "_piece", fails)
    command = ["apply", str(source), "-o", str(tmp_path / "out.npz")]
    refused(capsys, tmp_path, command, "in.npz: q: cannot be read: Input/output error", [source])


def test_members_that_are_no_plain_arrays(tmp_path, rng, capsys):
    source = tmp_path / "in.npz"
    command = ["apply", str(source), "-o", str(tmp_path / "out.npz")]
    save(source, {**arrays_of(rng), "q": np.zeros((2, 100, 2, 24), BFLOAT16)})
    refused(capsys, tmp_path, command, "a .npz cannot hold bfloat16, use .safetensors", [source])
    save(source, {**arrays_of(rng), "cu_seqlens": np.array([0, None])})
    refused(capsys, tmp_path, command, "cu_seqlens: cannot be read", [source])
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("notes.txt", "hello")
    refused(capsys, tmp_path, command, "notes.txt: cannot be read", [source])


def test_bfloat16_is_not_written_to_npz(tmp_path, rng, capsys):
    source = tmp_path / "in.safetensors"
    save(source, arrays_of(rng, BFLOAT16))
    command = ["apply", str(source), "-o", str(tmp_path / "out.npz")]
    refused(capsys, tmp_path, command, "use .safetensors", [source])


def test_bad_paths(tmp_path, rng, capsys):
    source = tmp_path / "in.npz"
    save(source, arrays_of(rng))
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "same.npz").symlink_to(source)
    (tmp_path / "null.npz").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "fifo.npz")
    before = sorted(tmp_path.iterdir())
    good = str(tmp_path / "out.npz")
    for given, out, text in (
        (tmp_path / "none.npz", good, "none.npz: No such file"),
        (tmp_path / "folder.npz", good, "folder.npz: Is a directory"),
        (tmp_path / "in.csv", good, "the input must be a .npz or .safetensors file"),
        (source, tmp_path / "out.csv", "the output must be a .npz or .safetensors file"),
        (source, tmp_path / "no" / "out.npz", "there is no folder"),
        (source, tmp_path / "folder.npz", "is a folder"),
        (source, tmp_path / "fifo.npz", "is no regular file"),
        (source, tmp_path / "null.npz", "is no regular file"),
        (source, source, "would replace the input"),
        (source, tmp_path / "same.npz", "would replace the input"),
    ):
        refused(capsys, tmp_path, ["apply", str(given), "-o", str(out)], text, before)
