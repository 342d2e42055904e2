"""The options of ``cupy-gdelta bench``. Imports no array library."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..refusal import Refusal
from . import Request, decode, run, shapes

SUMMARY = "time on a GPU beside the memory floor, and beside other libraries"
DESCRIPTION = """
Time both rules on a GPU: CUDA events, L2 flushed before each call, the median of --repeat calls,
and a CUDA graph's replay. The floor is the time to read the inputs and write y once at the rate of
a device-to-device copy, measured in the same run. The error is that of y against float64 on a
sample.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--rule", choices=("linear", "delta"), help="default: both")
    parser.add_argument(
        "--shape",
        metavar="NAME|B,T,H,K,V,dtype",
        dest="shapes",
        type=_shape,
        action="append",
        help=f"one of {', '.join(shapes.NAMED)}, or sizes; may be repeated (default: "
        f"{', '.join(shape.name for shape in shapes.USUAL)})",
    )
    parser.add_argument(
        "--decode",
        action="store_true",
        help=f"decode steps, {', '.join(decode.NAMED)}, and what a call costs the host",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also fla, jla, flash_qla, mamba_ssm and flashinfer, those that can be imported",
    )
    parser.add_argument(
        "--backward",
        action="store_true",
        help="y and then the gradients; the error is the largest of those of q, k and v",
    )
    parser.add_argument("--precision", choices=("highest", "tf32"), default="highest")
    parser.add_argument("--repeat", metavar="N", type=_positive, default=30, help="default 30")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the results, shape by shape"
    )
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw times the floor")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument(
        "--from",
        metavar="FILE.json",
        dest="sources",
        type=Path,
        action="append",
        help="show saved results instead of measuring; may be repeated, to join runs",
    )
    parser.set_defaults(command=_bench)


def _shape(text: str) -> shapes.Shape:
    if text in decode.NAMED:
        return decode.NAMED[text]
    try:
        return shapes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number of calls; got {text}")
    return int(text)


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.sources and arguments.peers:
        raise Refusal("--peers is for measuring; --from shows what its files hold")
    steps = arguments.decode or any(s.name in decode.NAMED for s in arguments.shapes or ())
    if arguments.backward and any(
        getattr(x, "layout", "") or getattr(x, "Hq", 0) for x in arguments.shapes or ()
    ):
        raise Refusal("--backward goes with dense shapes of H = Hq")
    if steps and arguments.backward:
        raise Refusal("--backward goes with sequences; decode steps have no gradients")
    if arguments.decode and not all(s.name in decode.NAMED for s in arguments.shapes or ()):
        raise Refusal(f"--decode goes with the shapes {', '.join(decode.NAMED)}")
    if arguments.sources and arguments.backward:
        raise Refusal("--backward is for measuring; --from shows what its files hold")
    return run(
        Request(
            rules=(arguments.rule,) if arguments.rule else ("linear", "delta"),
            shapes=tuple(dict.fromkeys(arguments.shapes or ())),
            decode=arguments.decode,
            peers=arguments.peers,
            precision=arguments.precision,
            repeat=arguments.repeat,
            json=arguments.json,
            plot=arguments.plot,
            markdown=arguments.markdown,
            sources=tuple(arguments.sources or ()),
            backward=arguments.backward,
        )
    )
