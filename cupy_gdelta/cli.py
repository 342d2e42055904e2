"""The command ``cupy-gdelta``: parsing, dispatch, and one line where something is at fault."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from . import __version__
from .refusal import Refusal, missing

PROGRAM = "cupy-gdelta"
APPLY = """
IN holds q, k [B,T,Hq,K], v [B,T,H,V] and, where wanted, gate or log_gate and beta [B,T,H],
initial_state [N,H,K,V] and cu_seqlens [N+1]. OUT gets y [B,T,H,V] in q's dtype and state [N,H,K,V];
rename that state to initial_state to go on from it in a later run. Arrays are read and y is
written a piece at a time, so memory does not grow with T (except for .npz arrays in Fortran
order). bfloat16 needs .safetensors. OUT appears when all of it is written, or not at all.
"""
RULES = "linear: S = gate S + beta k v^T; delta: S = R + beta k (v - k^T R)^T with R = gate S"


class Parser(argparse.ArgumentParser):
    """An error is one line on stderr, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Run a command; its exit code: 0, 1 for a miss of ``check``, 2 for bad input, 130 for ^C."""
    try:
        try:
            with _terminated():
                return _run(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout:  # None where the shell has closed it
                sys.stdout.flush()
    except SystemExit as stop:  # of argparse, --help among them, and of rich at a broken pipe
        if isinstance(stop.code, str):
            return _complain(stop.code)
        return stop.code or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone
        _drop_stdout()
        return 1
    except Refusal as refusal:
        return _complain(str(refusal))
    except MemoryError as error:  # of an example's sizes
        return _complain(f"out of memory: {error}".strip(": "))
    except OSError as error:
        if not error.filename and _stdout_fails():
            return _complain(f"standard output: cannot be written: {error.strerror}")
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _stdout_fails() -> bool:
    """Whether its disk is full, say; what could not be written is then dropped."""
    try:
        print(flush=True)
    except OSError:
        _drop_stdout()
        return True
    return False


def _drop_stdout() -> None:
    """Or the interpreter would complain at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(line: str) -> int:
    print(f"{PROGRAM}: {line}", file=sys.stderr)
    return 2


@contextmanager
def _terminated() -> Iterator[None]:
    """End a run that is told to (by a batch system, or a terminal that is closed) as ^C would:
    with its files removed. What is ignored, as under nohup, stays so."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]

    def stop(number: int, _: object) -> NoReturn:
        for n in numbers:  # one is enough: another would end the tidying
            signal.signal(n, signal.SIG_IGN)
        raise SystemExit(128 + number)

    try:
        before = {n: signal.signal(n, stop) for n in numbers}
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def _run(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except ModuleNotFoundError as error:
        raise missing(error) from error
    except (TypeError, ValueError) as error:
        # of an example's sizes: the library's refusal, or NumPy's where no address can count them
        if str(error).startswith(("gated_", "array is too big", "Maximum allowed dimension")):
            raise Refusal(str(error)) from error
        raise


def _parser() -> Parser:
    from .bench import options

    parser = Parser(prog=PROGRAM, description="Gated linear recurrences over arrays in files.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    apply = commands.add_parser(
        "apply",
        help="a rule over the arrays of a .npz or .safetensors file",
        description=f"Apply a rule to the arrays of a file. {RULES}.",
        epilog=APPLY,
    )
    apply.add_argument("source", metavar="IN", type=Path, help=".npz or .safetensors")
    apply.add_argument("-o", "--output", metavar="OUT", type=Path, required=True, help="likewise")
    apply.add_argument("--rule", choices=("linear", "delta"), default="linear")
    apply.add_argument(
        "--array",
        choices=("auto", "numpy", "cupy", "torch"),
        default="auto",
        help="what computes; auto is cupy where a CUDA device works, else numpy",
    )
    apply.add_argument("--precision", choices=("highest", "tf32"), default="highest")
    apply.add_argument("--scale", type=float, default=1.0, help="factor of y (default 1)")
    apply.add_argument("--qk-l2norm", action="store_true", help="unit q and k (delta rule)")
    apply.add_argument(
        "--piece",
        metavar="TOKENS",
        type=_positive,
        help="tokens to compute at a time (default 64 MiB of arrays on the CPU, 512 MiB on a GPU)",
    )
    apply.add_argument("--quiet", action="store_true", help="no progress bar, no last line")
    apply.set_defaults(command=_apply)

    listing = commands.add_parser("list", help="the examples")
    listing.set_defaults(command=_list)

    run = commands.add_parser("run", help="an example; run NAME --help shows its options")
    run.add_argument("name", metavar="NAME", help="one of the names that list shows")
    rest = run.add_argument("options", nargs=argparse.REMAINDER, help="passed on to the example")
    rest.required = False
    run.set_defaults(command=_example)

    info = commands.add_parser("info", help="versions, devices, what each can do, kernel cache")
    info.set_defaults(command=_info)

    check = commands.add_parser(
        "check",
        help="both rules against float64 on this machine's CPU and GPUs",
        description="Compare both rules with a float64 loop over time; exit code 1 on a miss.",
    )
    check.add_argument("--device", choices=("all", "cpu", "gpu"), default="all")
    check.add_argument("--quick", action="store_true", help="fewer and shorter cases")
    check.set_defaults(command=_check)

    options.add(commands.add_parser("bench", help=options.SUMMARY))
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number of tokens; got {text}")
    return int(text)


def _apply(arguments: argparse.Namespace) -> int:
    from . import apply

    options = {"scale": arguments.scale, "precision": arguments.precision}
    if arguments.qk_l2norm:
        if arguments.rule != "delta":
            raise Refusal("--qk-l2norm belongs to --rule delta")
        options["qk_l2norm"] = True
    job = apply.Job(
        arguments.source,
        arguments.output,
        arguments.rule,
        arguments.array,
        options,
        arguments.piece,
    )
    line = apply.run(job, arguments.quiet)
    if not arguments.quiet:
        print(line)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from . import programs

    summaries = programs.summaries()
    width = max(map(len, summaries))
    for name, summary in summaries.items():
        print(f"{name:{width}}  {summary}")
    return 0


def _example(arguments: argparse.Namespace) -> int:
    from . import programs

    return programs.run(arguments.name, arguments.options, Parser)


def _info(arguments: argparse.Namespace) -> int:
    from . import info

    return info.show()


def _check(arguments: argparse.Namespace) -> int:
    from . import check

    return check.run(arguments.device, arguments.quick)
