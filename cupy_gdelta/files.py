"""Arrays out of .npz and .safetensors files a piece at a time.

Every array of a file is read once, from its beginning to its end, so memory does not grow with T:
a member of a .npz is read, and decompressed, as a stream (its checksum is verified at the end),
and a .safetensors is sliced. Only cu_seqlens, initial_state and .npz members in Fortran
order are loaded whole.
"""

from __future__ import annotations

import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .devices import bfloat16, first_line
from .refusal import Refusal

FORMATS = (".npz", ".safetensors")
BITS = (8, 16, 32, 64)
SAFETENSORS = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in BITS},
}


@contextmanager
def _damage(where: str) -> Iterator[None]:
    """Whatever a damaged file makes its reader raise, as one refusal."""
    try:
        yield
    except (ImportError, MemoryError, Refusal):
        raise
    except OSError as error:
        raise Refusal(f"{where}: cannot be read: {error.strerror or first_line(error)}") from error
    except Exception as error:
        raise Refusal(f"{where}: cannot be read: {first_line(error)}") from error


class Source(ABC):
    """One array of a file: its shape and dtype at once, its values in pieces, in order."""

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def piece(self, rows: slice, tokens: slice) -> np.ndarray:
        """``array[rows, tokens]``: one row, or all tokens of several, following the last piece."""
        with _damage(self.where):
            return self._piece(rows, tokens)

    def whole(self) -> np.ndarray:
        with _damage(self.where):
            return self._whole()

    @abstractmethod
    def finish(self) -> None:
        """Called after the last piece: refuse what only the end of the array can show."""

    @abstractmethod
    def _piece(self, rows: slice, tokens: slice) -> np.ndarray: ...

    @abstractmethod
    def _whole(self) -> np.ndarray: ...


class _Member(Source):
    """A .npy inside a .npz."""

    def __init__(self, where: str, archive: zipfile.ZipFile, member: str) -> None:
        self.where, self._archive, self._member = where, archive, member
        self._file: Any = archive.open(member)
        self._loaded: np.ndarray | None = None
        version = np.lib.format.read_magic(self._file)
        header = np.lib.format.read_array_header_1_0
        if version > (1, 0):
            header = np.lib.format.read_array_header_2_0
        self.shape, self._fortran, self._stored = header(self._file)
        if self._stored.str == "|V2":
            raise Refusal(f"{where} has dtype |V2: a .npz cannot hold bfloat16, use .safetensors")
        if self._stored.hasobject:
            raise ValueError("it holds Python objects")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"its shape is {self.shape}")
        size = math.prod(self.shape) * self._stored.itemsize
        excess = archive.getinfo(member).file_size - self._file.tell() - size
        if excess:
            raise ValueError("it ends early" if excess < 0 else "it is longer than its header says")
        self.dtype = self._stored.newbyteorder("=")

    def _piece(self, rows: slice, tokens: slice) -> np.ndarray:
        if self._fortran:
            self._loaded = self._whole() if self._loaded is None else self._loaded
            return self._loaded[rows, tokens]
        shape = (rows.stop - rows.start, tokens.stop - tokens.start, *self.shape[2:])
        size = math.prod(shape) * self._stored.itemsize
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("it ends early")
        return np.frombuffer(data, self._stored).reshape(shape).astype(self.dtype, copy=False)

    def _whole(self) -> np.ndarray:
        with self._archive.open(self._member) as file:
            return np.lib.format.read_array(file).astype(self.dtype, copy=False)

    def finish(self) -> None:
        with _damage(self.where):
            while not self._fortran and self._file.read(1 << 20):
                pass  # the last read, which finds nothing, verifies the CRC-32


class _Tensor(Source):
    """A tensor of a .safetensors.

    The library maps the whole file; opening it for each piece lets go of the pages read so far.
    """

    def __init__(self, where: str, path: Path, name: str) -> None:
        self.where, self._path, self._name = where, path, name
        with self._open() as file:
            header = file.get_slice(name)
        self.shape, code = tuple(header.get_shape()), header.get_dtype()
        kind = SAFETENSORS.get(code)
        if kind is None:
            raise ValueError(f"its dtype is {code}")
        self.dtype = bfloat16() if kind == "bfloat16" else np.dtype(kind)

    def _piece(self, rows: slice, tokens: slice) -> np.ndarray:
        with self._open() as file:
            return file.get_slice(self._name)[rows, tokens]

    def _whole(self) -> np.ndarray:
        with self._open() as file:
            return file.get_tensor(self._name)

    def _open(self) -> Any:
        from safetensors import safe_open

        return safe_open(self._path, "np")

    def finish(self) -> None:
        """Nothing: opening the file has compared its size with its header."""


@contextmanager
def reading(path: Path) -> Iterator[dict[str, Source]]:
    """The arrays of a file by name."""
    if path.suffix not in FORMATS:
        raise Refusal(f"{path}: the input must be a {' or '.join(FORMATS)} file")
    sources: dict[str, Source] = {}
    with open(path, "rb") as file:
        if path.suffix == ".npz":
            with _damage(str(path)):
                archive = zipfile.ZipFile(file)
            for member in archive.namelist():
                name = member.removesuffix(".npy")
                with _damage(f"{path}: {name}"):
                    sources[name] = _Member(f"{path}: {name}", archive, member)
            yield sources
            return
        from safetensors import safe_open

        with _damage(str(path)), safe_open(path, "np") as tensors:
            names = list(tensors.keys())
        for name in names:
            with _damage(f"{path}: {name}"):
                sources[name] = _Tensor(f"{path}: {name}", path, name)
        yield sources
