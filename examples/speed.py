"""What chunks are worth on a CPU: both rules against a loop over tokens and against PyTorch.

    python examples/speed.py
    python examples/speed.py --shape 1,4096,4,128,128 --repeat 9

The table gives, for each rule and each shape B,T,H,K,V (float32):

* "loop": NumPy, one token after the other, vectorised over batch and heads, in place;
* "torch": the chunked form in PyTorch, vectorised over batch, heads and chunks, with as many
  threads as PyTorch takes (left out where PyTorch is not installed);
* "cupy_gdelta": this library.

Times are medians; the contenders take turns, so that a busy machine slows all of them. The error is
that of the first tokens against the float64 reference, ||y - reference|| / ||reference||.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

import numpy as np

from cupy_gdelta import accuracy, gated_delta_rule, gated_linear_attention, reference

SHAPES = [(2, 4096, 8, 64, 64), (1, 65536, 1, 64, 64)]
SAMPLE = 512  # tokens that are compared with the reference
CHUNK = 64
Arrays = dict[str, np.ndarray]


def loop_linear(q, k, v, gate, beta):
    """S = gate S + beta k v^T; y = q S, token by token."""
    B, T, H, K = q.shape
    V = v.shape[3]
    state, write = np.zeros((B, H, K, V), v.dtype), np.empty((B, H, K, V), v.dtype)
    y = np.empty_like(v)
    k = k * beta[..., None]
    for t in range(T):
        state *= gate[:, t, :, None, None]
        np.multiply(k[:, t, :, :, None], v[:, t, :, None, :], out=write)
        state += write
        np.matmul(q[:, t, :, None, :], state, out=y[:, t, :, None, :])
    return y


def loop_delta(q, k, v, gate, beta):
    """S = gate S; S = S + beta k (v - k^T S)^T; y = q S, token by token."""
    B, T, H, K = q.shape
    V = v.shape[3]
    state, write = np.zeros((B, H, K, V), v.dtype), np.empty((B, H, K, V), v.dtype)
    y = np.empty_like(v)
    for t in range(T):
        state *= gate[:, t, :, None, None]
        u = v[:, t, :, None, :] - np.matmul(k[:, t, :, None, :], state)
        u *= beta[:, t, :, None, None]
        np.multiply(k[:, t, :, :, None], u, out=write)
        state += write
        np.matmul(q[:, t, :, None, :], state, out=y[:, t, :, None, :])
    return y


def _torch_chunks(*arrays: np.ndarray):
    """[B, T, H, ...] as tensors [B, H, T / CHUNK, CHUNK, ...], padded with zeros."""
    import torch

    for x in arrays:
        x = torch.from_numpy(x).transpose(1, 2)
        pad = x.new_zeros(*x.shape[:2], -x.shape[2] % CHUNK, *x.shape[3:])
        yield torch.cat([x, pad], 2).contiguous().unflatten(2, (-1, CHUNK))


def _torch_decays(gate):
    """Products of gates within each chunk: between two tokens, from its start, to its end."""
    import torch

    # one more factor of 1 on and above the diagonal, then products down the columns
    factors = torch.where(torch.ones(CHUNK, CHUNK).tril(-1).bool(), gate[..., :, None], 1.0)
    between = factors.cumprod(-2).tril_()
    return between, gate.cumprod(-1)[..., None], between[..., -1, :, None]


def torch_linear(q, k, v, gate, beta):
    """The linear rule in chunks, all of them at once but for the sum over states."""
    import torch

    T = q.shape[1]
    q, k, v, gate, beta = _torch_chunks(q, k, v, gate, beta)
    between, start, end = _torch_decays(gate)
    v = v * beta[..., None]
    inside = (q @ k.mT * between) @ v
    writes = (k * end).mT @ v
    states = torch.zeros_like(writes)
    chunks = [x.unbind(2) for x in (writes, start[..., -1:, :], states)]
    for write, keep, before, after in zip(*chunks, chunks[2][1:], strict=False):
        torch.addcmul(write, keep, before, out=after)
    y = torch.baddbmm(inside.flatten(0, 2), (q * start).flatten(0, 2), states.flatten(0, 2))
    return y.view_as(v).flatten(2, 3)[:, :, :T].transpose(1, 2).numpy()


def torch_delta(q, k, v, gate, beta):
    """The delta rule in chunks: one triangular solve for all, then a loop over the chunks."""
    import torch

    T, K = q.shape[1], q.shape[3]
    q, k, v, gate, beta = _torch_chunks(q, k, v, gate, beta)
    between, start, end = _torch_decays(gate)
    beta = beta[..., None]
    a = (k @ k.mT * between * beta).tril_(-1)
    right = torch.cat([k * start * beta, v * beta], -1)
    solved = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    w, u = solved[..., :K], solved[..., K:]
    scores, q, k = q @ k.mT * between, q * start, (k * end).mT
    state = torch.zeros(*q.shape[:2], K, v.shape[-1])
    y = torch.empty_like(v)
    chunks = [x.unbind(2) for x in (w, u, q, scores, k, start[..., -1:, :], y)]
    for w_c, u_c, q_c, scores_c, k_c, keep, y_c in zip(*chunks, strict=True):
        u_c = u_c - w_c @ state
        y_c[...] = q_c @ state + scores_c @ u_c
        state = state * keep + k_c @ u_c
    return y.flatten(2, 3)[:, :, :T].transpose(1, 2).numpy()


RULES: dict[str, tuple[Callable, dict[str, Callable]]] = {
    "linear": (
        reference.gated_linear_attention,
        {"loop": loop_linear, "torch": torch_linear, "cupy_gdelta": gated_linear_attention},
    ),
    "delta": (
        reference.gated_delta_rule,
        {"loop": loop_delta, "torch": torch_delta, "cupy_gdelta": gated_delta_rule},
    ),
}


def measure(contenders: dict[str, Callable], arrays: Arrays, repeat: int) -> dict[str, float]:
    """Median seconds of each contender, which take turns; one round before to warm up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeat + 1):
        for name, function in contenders.items():
            begin = time.perf_counter()
            function(**arrays)
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(x) for name, x in times.items()}


def rows(rule: str, shape: tuple[int, ...], repeat: int) -> list[list[str]]:
    """The lines of the table for one rule and shape."""
    sizes = dict(zip("BTHKV", shape, strict=True))
    made = accuracy.inputs(np.random.default_rng(0), **sizes)
    arrays = {name: x.astype(np.float32) for name, x in made.items()}
    exact, contenders = RULES[rule]
    if importlib.util.find_spec("torch") is None:
        contenders = {name: f for name, f in contenders.items() if name != "torch"}
    sample = {name: x[:, :SAMPLE] for name, x in arrays.items()}
    expected = exact(**sample)[0]
    seconds = measure(contenders, arrays, repeat)
    mine = seconds["cupy_gdelta"]
    lines = []
    for name, function in contenders.items():
        error = accuracy.error(function(**sample), expected)
        values = [f"{1e3 * seconds[name]:.1f}", f"{seconds[name] / mine:.2f}", f"{error:.1e}"]
        lines.append([rule, ",".join(map(str, shape)), name, *values])
    return lines


def sizes(text: str) -> tuple[int, ...]:
    """B,T,H,K,V of the command line."""
    words = text.split(",")
    shape = tuple(int(word) for word in words if word.isdecimal())
    if len(words) != 5 or len(shape) != 5 or min(shape) < 1 or max(shape[3:]) > 256:
        raise argparse.ArgumentTypeError(
            f"must be five sizes of at least 1, K and V at most 256; got {text}"
        )
    return shape


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--shape", action="append", type=sizes, metavar="B,T,H,K,V", help="may be repeated"
    )
    parser.add_argument("--repeat", type=int, default=5, help="timed rounds (default: 5)")
    options = parser.parse_args(argv)
    if options.repeat < 1:
        parser.error(f"--repeat must be at least 1; got {options.repeat}")
    from rich.console import Console
    from rich.table import Table

    columns = ("rule", "B,T,H,K,V", "contender", "ms", "times ours", "error")
    table = Table(*columns, title="float32 on this CPU")
    for shape in options.shape or SHAPES:
        for rule in RULES:
            for line in rows(rule, shape, options.repeat):
                table.add_row(*line)
            table.add_section()
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
