"""The linear rule on float32 [B, T, H, D] arrays, checked against float64 and timed.

The inputs are random with a fixed seed; only their shape matters to the time. On the CPU the
library is set beside a loop over the tokens in NumPy, on a GPU beside user_kernel.cu, a CUDA kernel
with one thread for each column of the state. "error" is ||y - y64|| / ||y64||, y64 from the float64
loop. On a GPU "floor" is how many times longer a call takes than reading the inputs and writing y
once would at the rate of a device-to-device copy, which is measured in the same run.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from cupy_gdelta import gated_linear_attention, reference


def inputs(B, T, H, D, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, T, H, D), dtype=np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gate = (1 / (1 + np.exp(-rng.normal(3, 1, (B, T, H))))).astype(np.float32)
    beta = rng.random((B, T, H), dtype=np.float32)
    return q, k, v, gate, beta


def numpy_loop(q, k, v, gate, beta):
    """The recurrence token by token, as one would write it first."""
    B, T, H, D = q.shape
    S = np.zeros((B, H, D, D), np.float32)
    y = np.empty_like(v)
    for t in range(T):
        S *= gate[:, t, :, None, None]
        S += (beta[:, t, :, None] * k[:, t])[..., None] * v[:, t, :, None, :]
        y[:, t] = (q[:, t, :, None, :] @ S)[:, :, 0]
    return y


def user_kernel(cp, arrays):
    """y by user_kernel.cu, as a function without arguments; CuPy reads torch tensors as well."""
    arrays = [cp.asarray(x) for x in arrays]
    B, T, H, D = arrays[0].shape
    code = pathlib.Path(__file__).with_name("user_kernel.cu").read_text()
    kernel = cp.RawModule(code=code, options=(f"-DHEAD_DIM={D}",)).get_function("user_recurrence")

    def run():
        y = cp.empty((B, T, H, D), cp.float32)
        kernel((B * H,), (D,), (*arrays, y, np.int32(T), np.int32(H)))
        return y

    return run


def seconds(call, repeat, cp=None):
    """Median time of a call; on a GPU of CUDA events, with a write that clears L2 before each."""
    times = []
    flush = cp.empty(1 << 29, cp.uint8) if cp else None  # long enough to hide the launch as well
    for _ in range(2 + repeat):
        if cp:
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            for _ in range(4):
                flush.fill(0)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(cp.cuda.get_elapsed_time(start, stop) / 1000)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def place(array):
    """CuPy where a GPU is to compute, else None; and what makes an array of the library chosen."""
    cp = None
    if array != "numpy" and importlib.util.find_spec("cupy"):
        import cupy

        cp = cupy if cupy.cuda.is_available() else None
    if array == "torch":
        import torch

        cp = cp if torch.cuda.is_available() else None
        return cp, lambda x: torch.as_tensor(x, device="cuda" if cp else "cpu")
    return cp, cp.asarray if cp else np.asarray


def measure(sizes, repeat, cp, put):
    """A row for each way to compute y, the library first; and the copy rate in bytes/s."""
    host = inputs(*sizes)
    arrays = [put(x) for x in host]
    ways = {"cupy_gdelta": lambda: gated_linear_attention(*arrays)}
    if cp:
        ways["user_kernel.cu"] = user_kernel(cp, arrays)
        source, target = cp.zeros(1 << 27, cp.float32), cp.empty(1 << 27, cp.float32)
        rate = 2 * source.nbytes / seconds(lambda: cp.copyto(target, source), repeat, cp)
    else:
        ways["NumPy loop"] = lambda: numpy_loop(*host)
    expected, _ = reference.gated_linear_attention(*host)
    rows = []
    for name, call in ways.items():
        y = cp.asnumpy(cp.asarray(call())) if cp else np.asarray(call())
        error = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
        rows.append({"name": name, "seconds": seconds(call, repeat, cp), "error": error})
        if cp:
            moved = sum(x.nbytes for x in host) + y.nbytes
            rows[-1]["floor"] = rows[-1]["seconds"] * rate / moved
    return rows, rate if cp else None


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, size in (("batch", 32), ("time", 2048), ("heads", 4), ("head-dim", 24)):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default {size}")
    parser.add_argument("--array", choices=("auto", "numpy", "cupy", "torch"), default="auto")
    parser.add_argument("--repeat", type=int, default=5, help="calls timed; the median is shown")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the figures too")
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="draw the times")
    options = parser.parse_args(argv)
    sizes = options.batch, options.time, options.heads, options.head_dim
    if min(*sizes, options.repeat) < 1 or options.head_dim > 256:
        parser.error("every size and --repeat must be at least 1, and --head-dim at most 256")
    for path in (options.json, options.plot):
        if path and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"{path} cannot be written")
    cp, put = place(options.array)
    if options.array == "cupy" and not cp:
        parser.error("--array cupy needs CuPy and a CUDA device")
    if options.plot:
        import matplotlib  # noqa: F401 (before the work, should it be missing)
    rows, rate = measure(sizes, options.repeat, cp, put)
    title = "linear rule, float32, B, T, H, D = " + ", ".join(map(str, sizes))
    unit, factor = ("us", 1e6) if cp else ("ms", 1e3)
    table = Table("", unit, "ratio", "error", *(["floor"] if cp else []))
    for row in rows:
        cells = f"{factor * row['seconds']:.1f}", f"{row['seconds'] / rows[0]['seconds']:.2f}"
        floor = [f"{row['floor']:.2f} x"] if cp else []
        table.add_row(row["name"], *cells, f"{row['error']:.1e}", *floor)
    print(title)
    Console().print(table)
    if cp:
        print(f"a device-to-device copy moves {rate / 1e12:.2f} TB/s")
    if options.json:
        figures = {"title": title, "copy_bytes_per_second": rate, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.plot:
        draw({row["name"]: factor * row["seconds"] for row in rows}, unit, title, options.plot)
    return 0


def draw(times, unit, title, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2), layout="constrained")
    axis = figure.subplots()
    bars = axis.barh(list(times), list(times.values()), color=["C0", "C1"])
    axis.bar_label(bars, fmt="%.1f", padding=3)
    axis.set_title(title)
    axis.set_xlabel(f"median time of a call ({unit})")
    axis.margins(x=0.15)
    axis.invert_yaxis()
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
