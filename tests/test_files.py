"""Input files that cupy-gdelta apply must refuse, in one line and without a trace."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
from archives import BFLOAT16, arrays_of, refused, save


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
    before = sorted(tmp_path.iterdir())
    good = str(tmp_path / "out.npz")
    for given, out, text in (
        (tmp_path / "none.npz", good, "none.npz: No such file"),
        (tmp_path / "folder.npz", good, "folder.npz: Is a directory"),
        (tmp_path / "in.csv", good, "the input must be a .npz or .safetensors file"),
        (source, tmp_path / "out.csv", "the output must be a .npz or .safetensors file"),
        (source, tmp_path / "no" / "out.npz", "there is no folder"),
        (source, tmp_path / "folder.npz", "is a folder"),
        (source, source, "would replace the input"),
        (source, tmp_path / "same.npz", "would replace the input"),
    ):
        refused(capsys, tmp_path, ["apply", str(given), "-o", str(out)], text, before)
