"""torch tensors in, torch tensors out, without a copy: equal pointers show it.

The library reads tensors where they lie, on the CPU or a CUDA device, and returns tensors. Through
DLPack the same memory is an array of NumPy or CuPy as well: each line of the table names two
objects and says whether they start at one address. The lines below it compare the results, which
must be equal to the bit, and the times, which differ by noise: tensors cost nothing extra.
"""

import argparse
import pathlib
import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

from cupy_gdelta import gated_delta_rule

try:
    import torch
except ModuleNotFoundError:
    torch = None


def pointer(x):
    """Address of the first element, of a torch, NumPy or CuPy array."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    return x.data.ptr if hasattr(x.data, "ptr") else x.ctypes.data


def inputs(device, B=2, T=1024, H=4, D=64):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D, device=device) for _ in range(3))
    gate = torch.sigmoid(torch.randn(B, T, H, device=device) + 3)
    beta = torch.rand(B, T, H, device=device)
    return q / D**0.5, torch.nn.functional.normalize(k, dim=-1), v, gate, beta


def milliseconds(call, device, repeat=5):
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[1:])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="draw the times")
    options = parser.parse_args(argv)
    if torch is None:
        line = "torch is not installed: pip install torch"
        print(f"{parser.prog}: {line}", file=sys.stderr)
        return 2
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    if options.plot:
        import matplotlib  # noqa: F401 (before the work, should it be missing)

        if options.plot.is_dir() or not options.plot.parent.is_dir():
            parser.error(f"{options.plot} cannot be written")
    if device == "cuda":
        import cupy as library
    else:
        import numpy as library

    tensors = inputs(device)
    views = [library.from_dlpack(x) for x in tensors]
    y = gated_delta_rule(*tensors)
    out = torch.empty_like(y)
    returned = gated_delta_rule(*tensors, out=out)
    of_views = gated_delta_rule(*views)
    back = torch.from_dlpack(of_views)

    name = library.__name__
    pairs = {
        f"q of torch, its view in {name}": (tensors[0], views[0]),
        f"v of torch, its view in {name}": (tensors[2], views[2]),
        "out=, the tensor returned": (out, returned),
        f"y of {name}, its view in torch": (of_views, back),
    }
    table = Table("two objects", "first address", "second address", "shared")
    for what, (a, b) in pairs.items():
        same = "yes" if pointer(a) == pointer(b) else "no"
        table.add_row(what, hex(pointer(a)), hex(pointer(b)), same)
    console = Console(highlight=False)
    console.print(f"delta rule on torch {torch.__version__}, {y.device}: y is a {type(y).__name__}")
    console.print(table)
    console.print(f"out is the very object returned: {returned is out}")
    console.print(f"y of torch equals y of {name}: {torch.equal(y, back)}")
    times = {
        "a call with torch tensors": milliseconds(lambda: gated_delta_rule(*tensors), device),
        f"with their {name} views": milliseconds(lambda: gated_delta_rule(*views), device),
    }
    console.print(", ".join(f"{what}: {t:.2f} ms" for what, t in times.items()))
    if options.plot:
        draw(times, str(y.device), options.plot)
    shared = all(pointer(a) == pointer(b) for a, b in pairs.values())
    return 0 if shared and returned is out and torch.equal(y, back) else 1


def draw(times, device, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2), layout="constrained")
    axis = figure.subplots()
    bars = axis.barh(list(times), list(times.values()), color=["C0", "C1"])
    axis.bar_label(bars, fmt="%.3g", padding=3)
    axis.set_xlabel(f"median time on {device} (ms)")
    axis.margins(x=0.15)
    axis.invert_yaxis()
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
