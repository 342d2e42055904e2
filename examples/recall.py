"""Handwritten digits stored one by one in the state and read back: linear against delta rule.

A state of 64 x 64 numbers is an associative memory: each token stores a value (here a picture of
8 x 8 pixels) under a key (here the same picture, scaled to unit length), and a query with that key
reads it back. The average picture is subtracted first, or all keys would point the same way and the
linear rule would fail even sooner. Pictures of the same digit still have similar keys. The linear
rule adds all of them up, and its error grows with every picture; the delta rule writes only what is
missing, and its error stays below a half. It even falls once many are stored, because here a value
can be guessed from its key.

"error" is ||read - stored|| / ||stored|| over all stored pictures (1 is as bad as reading nothing),
"found" is how many of the pictures read are closest, by angle, to the one that was stored. At
32 the delta rule finds 30: what is stored later blurs what is there, and two of the pictures look
much like a later one. At 64 it finds all: by then the state maps keys to pictures well enough to
find even most of those that were never stored.
"""

import argparse
import itertools
import pathlib

import numpy as np
from rich.console import Console
from rich.table import Table

from cupy_gdelta import gated_delta_rule, gated_linear_attention

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RULES = {"linear": gated_linear_attention, "delta": gated_delta_rule}


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def recall(rule, keys, values, counts):
    """The first n values, read back from a memory of n, for each n of ``counts``.

    The memories are sequences of one packed call: 1 token, then 2, 4, ..., with a state for each.
    """
    ends = np.cumsum([0, *counts])
    chosen = np.concatenate([np.arange(n) for n in counts])
    k = keys[chosen][None, :, None]  # [B=1, T, H=1, K]
    v = values[chosen][None, :, None]  # [1, T, 1, V]
    _, state = RULES[rule](k, k, v, cu_seqlens=ends, return_state=True)
    # Read: gate 1 (the default) keeps the state and beta 0 writes nothing to it.
    nothing = np.zeros((1, len(chosen), 1), np.float32)
    y = RULES[rule](k, k, v, None, nothing, cu_seqlens=ends, initial_state=state)
    return [y[0, a:b, 0] for a, b in itertools.pairwise(ends)]


def score(read, values):
    """Relative error, and how many of the pictures read point to the right one."""
    stored = values[: len(read)]
    nearest = (unit(read) @ unit(stored).T).argmax(axis=1)
    error = np.linalg.norm(read - stored) / np.linalg.norm(stored)
    return float(error), int((nearest == np.arange(len(read))).sum())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most", type=int, default=128, help="digits to store, up to 256")
    parser.add_argument(
        "--plot", metavar="FILE.png", type=pathlib.Path, help="draw errors and pictures"
    )
    options = parser.parse_args(argv)
    counts = [n for n in COUNTS if n <= options.most]
    if not counts or options.most > COUNTS[-1]:
        parser.error(f"--most must be from 1 to {COUNTS[-1]}")
    if options.plot:
        import matplotlib  # noqa: F401 (before the work, should it be missing)

        if options.plot.is_dir() or not options.plot.parent.is_dir():
            parser.error(f"{options.plot} cannot be written")

    pictures = np.load(pathlib.Path(__file__).with_name("digits.npz"))["pictures"]
    pixels = pictures.reshape(len(pictures), 64).astype(np.float32) / 16
    mean = pixels.mean(axis=0)
    values = pixels - mean
    read = {rule: recall(rule, unit(values), values, counts) for rule in RULES}
    scores = {rule: [score(r, values) for r in read[rule]] for rule in RULES}

    table = Table()
    for column in ("stored", "linear error", "delta error", "linear found", "delta found"):
        table.add_column(column, justify="right")
    for n, linear, delta in zip(counts, scores["linear"], scores["delta"], strict=True):
        table.add_row(str(n), f"{linear[0]:.2f}", f"{delta[0]:.2f}", str(linear[1]), str(delta[1]))
    Console().print(table)
    if options.plot:
        draw(
            counts, scores, values + mean, {r: x[-1] + mean for r, x in read.items()}, options.plot
        )
    return 0


def draw(counts, scores, stored, read, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.6))
    axis = left.subplots()
    for rule, marker in (("linear", "o"), ("delta", "s")):
        errors = [error for error, _ in scores[rule]]
        axis.plot(counts, errors, marker=marker, label=f"{rule} rule")
    axis.axhline(1, color="0.6", linestyle=":", label="reading nothing")
    axis.set_xscale("log", base=2)
    axis.set_yscale("symlog", linthresh=1)
    axis.set_xticks(counts, [str(n) for n in counts])
    axis.set_yticks([0, 0.5, 1, 2, 5, 10, 20], ["0", "0.5", "1", "2", "5", "10", "20"])
    axis.set_ylim(-0.1, 1.5 * max(error for error, _ in scores["linear"]) + 1)
    axis.set_xlabel("digits stored")
    axis.set_ylabel("relative error of the pictures read")
    axis.legend()
    rows = {"stored": stored, "linear": read["linear"], "delta": read["delta"]}
    shown = range(min(10, counts[-1]))
    axes = right.subplots(3, len(shown), squeeze=False, gridspec_kw={"hspace": 0, "wspace": 0})
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        for i, axis in zip(shown, line, strict=True):
            axis.imshow(pictures[i].reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(name)
    right.suptitle(f"the first {len(shown)} of {counts[-1]} stored, and as read back")
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
