"""y and the final state into a .npz or .safetensors file, y a piece at a time."""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
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

    _path: Path
    _file: IO[bytes]

    def write(self, y: np.ndarray) -> None:
        with _worded(self._path):
            self._write(y)

    def close(self, state: np.ndarray) -> None:
        with _worded(self._path):
            self._close(state)
            self._file.close()

    @abstractmethod
    def abandon(self) -> None:
        """Called instead of close when the run failed; the file goes away."""

    @abstractmethod
    def _write(self, y: np.ndarray) -> None: ...

    @abstractmethod
    def _close(self, state: np.ndarray) -> None: ...


class _Archive(Target):
    def __init__(self, path: Path, file: IO[bytes], y: Form) -> None:
        self._path, self._file = path, file
        self._zip = zipfile.ZipFile(file, "w")
        self._y = self._member("y", *y)

    def _member(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> IO[bytes]:
        member = self._zip.open(f"{name}.npy", "w", force_zip64=True)
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
        return member

    def _write(self, y: np.ndarray) -> None:
        self._y.write(y.tobytes())

    def _close(self, state: np.ndarray) -> None:
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

    def __init__(self, path: Path, file: IO[bytes], y: Form, state: Form) -> None:
        self._path, self._file = path, file
        names = {name: code for code, name in SAFETENSORS.items()}
        header, end = {}, 0
        for name, (shape, dtype) in {"state": state, "y": y}.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            kind = names[dtype.name]
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._state_at = 8 + len(text)
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(self._state_at + math.prod(state[0]) * state[1].itemsize)

    def _write(self, y: np.ndarray) -> None:
        self._file.write(y.tobytes())

    def _close(self, state: np.ndarray) -> None:
        self._file.seek(self._state_at)
        self._file.write(state.tobytes())

    def abandon(self) -> None:
        """Nothing is open but the file."""


@contextmanager
def writing(path: Path, y: Form, state: Form) -> Iterator[Target]:
    """A target that appears as ``path`` when the block ends well, and otherwise leaves nothing.

    The file that it replaces hands its permissions on.
    """
    final = Path(os.path.realpath(path))
    temporary = final.with_name(f".cupy-gdelta-{secrets.token_hex(8)}.tmp")
    try:
        with _worded(path):
            file = open(temporary, "xb")  # noqa: SIM115 (closed below, where its error is told)
        try:
            with _worded(path):
                if final.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(final.stat().st_mode))
                npz = path.suffix == ".npz"
                target = _Archive(path, file, y) if npz else _Tensors(path, file, y, state)
            try:
                yield target
            except BaseException:
                target.abandon()
                raise
        finally:
            with suppress(OSError):  # where all went well, the target has closed it
                file.close()
        with _worded(path):
            os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _worded(path: Path) -> Iterator[None]:
    """The error of a disk that is full does not name the file by itself."""
    try:
        yield
    except OSError as error:
        raise Refusal(f"{path}: cannot be written: {error.strerror or error}") from error
