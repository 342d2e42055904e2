"""``cupy-gdelta apply``: a rule over the arrays of a file, in pieces that carry the state."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import api, devices, files, problem
from .devices import Backend
from .refusal import Refusal
from .target import writing

TOKENS = ("q", "k", "v", "gate", "log_gate", "beta")  # [B, T, ...]: read and cut along T
NAMES = (*TOKENS, "initial_state", "cu_seqlens")
FUNCTIONS = {"linear": api.gated_linear_attention, "delta": api.gated_delta_rule}
PIECE_BYTES = {False: 64 << 20, True: 512 << 20}  # on the CPU, on a GPU
CHUNK = 64  # tokens that the chunked forms take together: a whole number of them in a piece


@dataclass(frozen=True)
class Job:
    """What the command line asks for."""

    source: Path
    target: Path
    rule: str = "linear"
    array: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the library call
    piece: int | None = None  # tokens


def run(job: Job, quiet: bool = False) -> str:
    """Do the job and say in a line what was written."""
    _check_target(job)
    with _memory(), files.reading(job.source) as sources:
        p, whole = _check(job, sources)
        backend = devices.pick(job.array)
        y_dtype = sources["q"].dtype
        if y_dtype.name == "bfloat16" and job.target.suffix == ".npz":
            raise Refusal(f"{job.target}: a .npz cannot hold bfloat16, use .safetensors")
        shape = (p.N, p.H, p.K, p.V)
        state = _zeros(job, shape, p.state_dtype)
        if "initial_state" in whole:
            state[...] = whole["initial_state"]
        tokens = job.piece or _tokens(sources, backend.on_gpu)
        ends = p.cu_seqlens if isinstance(p.cu_seqlens, np.ndarray) else None
        with (
            writing(job.target, (p.v.shape, y_dtype), (shape, state.dtype)) as target,
            _progress(p.B * p.T, quiet) as advance,
        ):
            for rows, span in _pieces(p.B, p.T, tokens) if p.H else ():
                inputs = {n: sources[n].piece(rows, span) for n in TOKENS if n in sources}
                target.write(_step(job, backend, inputs, state, rows, span, ends))
                advance((rows.stop - rows.start) * (span.stop - span.start))
            for name in TOKENS:
                if name in sources:
                    sources[name].finish()
            target.close(state)
    return (
        f"{job.target}: y {p.v.shape} {y_dtype.name}, state {shape} {state.dtype.name} "
        f"({job.rule} rule, {backend.name})"
    )


def _check_target(job: Job) -> None:
    target = job.target
    if target.suffix not in files.FORMATS:
        raise Refusal(f"{target}: the output must be a {' or '.join(files.FORMATS)} file")
    if not target.parent.is_dir():
        raise Refusal(f"{target}: there is no folder {target.parent}")
    if target.is_dir():
        raise Refusal(f"{target}: is a folder")
    if target.exists() and not target.is_file():
        raise Refusal(f"{target}: is no regular file, and nothing else is replaced")
    if target.exists() and job.source.exists() and os.path.samefile(target, job.source):
        raise Refusal(f"{target}: the output would replace the input")


def _check(job: Job, sources: dict[str, files.Source]) -> tuple[problem.Problem, dict[str, Any]]:
    """Refuse what the library refuses, before q, k and v are read; also the arrays read whole."""
    for name in sources:
        if name == "state":
            raise Refusal(f"{job.source}: to go on from state, rename it to initial_state")
        if name not in NAMES:
            raise Refusal(f"{job.source}: {name} is none of the arrays {', '.join(NAMES)}")
    for name in ("q", "k", "v"):
        if name not in sources:
            raise Refusal(f"{job.source}: there is no array {name}")
    whole = {n: x.whole() for n, x in sources.items() if n not in TOKENS}
    arguments: dict[str, Any] = {"gate": None, "beta": None, **whole, **job.options}
    name = FUNCTIONS[job.rule].__name__
    try:
        for n in (n for n in TOKENS if n in sources):  # arrays without values
            arguments[n] = np.broadcast_to(np.zeros((), sources[n].dtype), sources[n].shape)
        return problem.check(name, job.rule, **arguments), whole
    except (TypeError, ValueError) as error:
        text = devices.first_line(error).removeprefix(f"{name}: ")
        raise Refusal(f"{job.source}: {text}") from error


def _zeros(job: Job, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    try:
        return np.zeros(shape, dtype)
    except (MemoryError, ValueError) as error:  # ValueError: more bytes than an address can count
        raise Refusal(f"{job.source}: a state of shape {shape} does not fit in memory") from error


def _tokens(sources: dict[str, files.Source], on_gpu: bool) -> int:
    """Tokens whose arrays, y among them, fill a piece."""
    shapes = [sources[n] for n in (*TOKENS, "v") if n in sources]  # v a second time for y
    size = sum(int(np.prod(x.shape[2:], dtype=np.int64)) * x.dtype.itemsize for x in shapes)
    return max(1, PIECE_BYTES[on_gpu] // max(1, size) // CHUNK) * CHUNK


def _pieces(B: int, T: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Cut [B, T] in the order of the file: several whole rows, or parts of a single one."""
    rows = max(1, tokens // max(1, T))
    for b in range(0, B, rows):
        for t in range(0, T, tokens):
            yield slice(b, min(b + rows, B)), slice(t, min(t + tokens, T))


def _step(
    job: Job,
    backend: Backend,
    inputs: dict[str, np.ndarray],
    state: np.ndarray,
    rows: slice,
    span: slice,
    ends: np.ndarray | None,
) -> np.ndarray:
    """y of one piece; the states of its sequences are carried in ``state``."""
    options = dict(job.options)
    if ends is not None:
        first = int(np.searchsorted(ends[1:], span.start, "right"))
        last = max(first, int(np.searchsorted(ends[:-1], span.stop, "left")))
        rows = slice(first, last)
        options["cu_seqlens"] = np.clip(ends[first : last + 1], span.start, span.stop) - span.start
    y, final = FUNCTIONS[job.rule](
        **{name: backend.put(x) for name, x in inputs.items()},
        initial_state=backend.put(state[rows]),
        return_state=True,
        **options,
    )
    state[rows] = backend.get(final)
    return backend.get(y)


@contextmanager
def _memory() -> Iterator[None]:
    """A device or host that runs out of memory as one line; CuPy and torch name the error alike."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            line = devices.first_line(error)
            raise Refusal(f"out of memory, try a smaller --piece: {line}") from error
        raise


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over the tokens on a terminal's stderr, gone at the end; rich draws it."""
    if quiet or not importlib.util.find_spec("rich"):
        yield lambda tokens: None
        return
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("tokens"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    hidden = not console.is_terminal
    with progress.Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=total)
        yield lambda tokens: bar.advance(task, tokens)
