"""What a first call costs in a new process: its kernels compiled, or found in CuPy's cache.

``python -m cupy_gdelta.bench.first_call`` runs each rule at each shape in processes of their own,
once with an empty cache and then with the one this has filled. Inputs are made before the clock
starts, so that CuPy is imported and the device in use; it stops once the results are there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

from .. import devices, gated_delta_rule, gated_linear_attention
from ..refusal import Refusal
from . import shapes

FUNCTIONS = {"linear": gated_linear_attention, "delta": gated_delta_rule}
NAMES = ("seed24", "d64", "d128")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rule", choices=FUNCTIONS, action="append", help="default: both")
    parser.add_argument("--shape", action="append", help=f"default: {', '.join(NAMES)}")
    options = parser.parse_args(argv)
    given = options.shape or NAMES
    try:
        for shape in given:
            shapes.parse(shape)
        why = devices.why_no_gpu()
        if why:
            raise Refusal(f"cupy_gdelta.bench.first_call needs a CUDA device: {why}")
    except ValueError as error:
        print(f"cupy_gdelta.bench.first_call: --shape {error}", file=sys.stderr)
        return 2
    except Refusal as error:
        print(error, file=sys.stderr)
        return 2
    print("seconds of a first call, with an empty cache and with a filled one")
    for rule in options.rule or FUNCTIONS:
        for shape in given:
            with tempfile.TemporaryDirectory() as cache:
                empty, filled = (measured(rule, shape, cache) for _ in range(2))
            print(f"{rule:6} {shape:12} {empty:6.2f} {filled:6.2f}", flush=True)
    return 0


def measured(rule: str, shape: str, cache: str) -> float:
    """Seconds in a process of its own."""
    code = f"from cupy_gdelta.bench import first_call; first_call.work({rule!r}, {shape!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CUPY_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


def work(rule: str, shape: str) -> None:
    """Print the seconds of the first call in this process."""
    import cupy

    inputs = shapes.make(rule, shapes.parse(shape))
    cupy.cuda.Device().synchronize()
    begin = time.perf_counter()
    FUNCTIONS[rule](*inputs.arrays, **inputs.options)
    cupy.cuda.Device().synchronize()
    print(time.perf_counter() - begin)


if __name__ == "__main__":
    raise SystemExit(main())
