"""y and the final state into a .npz or .safetensors file, y a piece at a time."""

from __future__ import annotations

import json
import math
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from .files import SAFETENSORS
from .refusal import Refusal

Form = tuple[tuple[int, ...], np.dtype]  # of an array: its shape and dtype


class Target(ABC):
    """y, written in pieces that follow each other, and then the state."""

    @abstractmethod
    def write(self, y: np.ndarray) -> None: ...

    @abstractmethod
    def close(self, state: np.ndarray) -> None: ...

    @abstractmethod
    def abandon(self) -> None:
        """Called instead of close when the run failed; the file goes away."""


class _Archive(Target):
    def __init__(self, file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._zip = zipfile.ZipFile(file, "w")
        self._y = self._member("y", shape, dtype)

    def _member(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> IO[bytes]:
        member = self._zip.open(f"{name}.npy", "w", force_zip64=True)
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
        return member

    def write(self, y: np.ndarray) -> None:
        self._y.write(y.tobytes())

    def close(self, state: np.ndarray) -> None:
        self._y.close()
        with self._member("state", state.shape, state.dtype) as member:
            member.write(state.tobytes())
        self._zip.close()

    def abandon(self) -> None:
        for part in (self._y, self._zip):  # or they complain when they are collected
            with suppress(Exception):
                part.close()


class _Tensors(Target):
    """The library writes no file piece by piece: 8 bytes of header length, JSON, then the values.

    state comes first, as the library puts wider dtypes first to keep every tensor aligned.
    """

    def __init__(self, file: IO[bytes], y: Form, state: Form) -> None:
        names = {name: code for code, name in SAFETENSORS.items()}
        header, end = {}, 0
        for name, (shape, dtype) in {"state": state, "y": y}.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            kind = names[dtype.name]
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file, self._state_at = file, 8 + len(text)
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(self._state_at + math.prod(state[0]) * state[1].itemsize)

    def write(self, y: np.ndarray) -> None:
        self._file.write(y.tobytes())

    def close(self, state: np.ndarray) -> None:
        self._file.seek(self._state_at)
        self._file.write(state.tobytes())

    def abandon(self) -> None:
        """Nothing is open but the file."""


@contextmanager
def writing(path: Path, y: Form, state: Form) -> Iterator[Target]:
    """A target that appears as ``path`` when the block ends well, and otherwise leaves nothing."""
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".cupy-gdelta-{os.getpid()}.tmp")
    try:
        file = open(temporary, "xb")  # noqa: SIM115 (closed below; this try only words its error)
    except OSError as error:
        raise Refusal(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with file:
            target = _Archive(file, *y) if path.suffix == ".npz" else _Tensors(file, y, state)
            try:
                yield target
            except BaseException:
                target.abandon()
                raise
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
