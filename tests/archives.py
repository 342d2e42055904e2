"""Files of arrays for the tests of the command line, and what every refusal of it must be."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from cupy_gdelta import accuracy
from cupy_gdelta.cli import main

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def save(path, arrays, compressed=False):
    if path.suffix == ".npz":
        (np.savez_compressed if compressed else np.savez)(path, **arrays)
    else:
        save_file({n: np.ascontiguousarray(x) for n, x in arrays.items()}, path)


def load(path):
    if path.suffix == ".safetensors":
        return load_file(path)
    with np.load(path) as archive:
        return dict(archive)


def arrays_of(rng, dtype=np.float32, packed=False, state=False, **sizes):
    wide = np.float64 if dtype == np.float64 else np.float32
    arrays = accuracy.inputs(rng, **{"B": 1 if packed else 2, "T": 100, "H": 4, "Hq": 2, **sizes})
    arrays = {n: x.astype(dtype if n in "qkv" else wide) for n, x in arrays.items()}
    count = arrays["q"].shape[0]
    if packed:
        arrays["cu_seqlens"] = np.array([0, 30, 30, 31, 90, 97])  # 3 tokens in no sequence
        count = 5
    if state:
        shape = (count, arrays["v"].shape[2], arrays["q"].shape[3], arrays["v"].shape[3])
        arrays["initial_state"] = rng.standard_normal(shape).astype(wide)
    return arrays


def one_line(capsys, command, text):
    """Exit code 2 and one line that names the fault."""
    assert main(command) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("cupy-gdelta: ")
    assert shown.err.count("\n") == 1
    assert text in shown.err


def refused(capsys, tmp_path, command, text, before):
    """The same, and no file that was not there."""
    one_line(capsys, command, text)
    assert sorted(tmp_path.iterdir()) == before
