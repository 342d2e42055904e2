"""A small Gated DeltaNet block trained to recall: linear against delta rule, in torch.

The task is multi-query associative recall (Arora et al., "Zoology", 2023, arXiv:2312.04927): a
sequence lists pairs of a key and a value, then asks for the value of each key once, in another
order. Pairs are drawn anew for every sequence, so nothing can be learned by heart: the block has to
store the pairs in its state and read them back.

The block is that of Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464): a short
causal convolution over q, k and v, which lets a value meet the key before it; q and k of unit
length; a gate and a beta for each token and head; the rule; a norm and a gate on what comes out.
Both rules train on the same sequences with the same weights at the start. "recalled" is the share
of right answers on sequences that were not trained on; a rule stops once that is above 99.5 %, or
when its steps are used up. Both rules get there at these sizes, since q and k learn to be nearly
orthogonal; which one needs fewer steps differs from seed to seed.
"""

import argparse
import pathlib
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cupy_gdelta import gated_delta_rule, gated_linear_attention

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ModuleNotFoundError:
    torch = None

VOCABULARY = 32  # keys, and as many values
WIDTH, HEADS, CONVOLUTION = 64, 2, 4
BATCH, LOOK = 32, 25  # sequences in a step; steps between two looks at the accuracy
RATE, ENOUGH = 1e-2, 0.995


def sequences(count, pairs, generator):
    """Tokens [count, 3 pairs]: key, value, key, value ..., then the keys again; and the answers."""
    order = torch.rand(count, VOCABULARY, generator=generator).argsort(dim=1)
    keys = order[:, :pairs]
    values = torch.randint(VOCABULARY, (count, pairs), generator=generator)
    asked = torch.rand(count, pairs, generator=generator).argsort(dim=1)
    listed = torch.stack([keys, VOCABULARY + values], dim=2).flatten(1)
    return torch.cat([listed, keys.gather(1, asked)], dim=1), values.gather(1, asked)


def make(rule):
    """A model of one block that reads tokens and scores values."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.mix = nn.Conv1d(
                3 * WIDTH, 3 * WIDTH, CONVOLUTION, groups=3 * WIDTH, padding=CONVOLUTION - 1
            )
            self.strengths = nn.Linear(WIDTH, 2 * HEADS)  # gate and beta
            self.norm = nn.RMSNorm(WIDTH // HEADS)
            self.open = nn.Linear(WIDTH, WIDTH)
            self.leave = nn.Linear(WIDTH, WIDTH, bias=False)
            with torch.no_grad():
                self.strengths.bias[:HEADS] = 4.0  # a gate of 0.98: keep, at first

        def forward(self, x):
            B, T, _ = x.shape
            mixed = self.mix(self.project(x).transpose(1, 2))[..., :T].transpose(1, 2)
            q, k, v = F.silu(mixed).reshape(B, T, 3, HEADS, -1).unbind(2)  # [B, T, H, D] each
            gate, beta = self.strengths(x).sigmoid().chunk(2, dim=-1)  # [B, T, H] each
            if rule == "delta":
                y = gated_delta_rule(q, k, v, gate, beta, qk_l2norm=True)
            else:
                q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
                y = gated_linear_attention(q, k, v, gate, beta)
            y = self.norm(y).flatten(2) * F.silu(self.open(x))
            return x + self.leave(y)

    return nn.Sequential(
        nn.Embedding(2 * VOCABULARY, WIDTH),
        Block(),
        nn.RMSNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY, bias=False),
    )


def train(rule, pairs, steps, device, seed, tick):
    """Losses of all steps, (step, accuracy) of each look, and the seconds that it took."""
    torch.manual_seed(seed)
    model = make(rule).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    unseen = [x.to(device) for x in sequences(256, pairs, torch.Generator().manual_seed(seed + 1))]
    losses, looks, begin = [], [], time.perf_counter()
    for step in range(1, steps + 1):
        tokens, answers = (x.to(device) for x in sequences(BATCH, pairs, generator))
        scores = model(tokens)[:, -pairs:]
        loss = F.cross_entropy(scores.flatten(0, 1), answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rates.step()
        losses.append(loss.item())
        tick(losses[-1])
        if step % LOOK == 0 or step == steps:
            with torch.no_grad():
                right = model(unseen[0])[:, -pairs:].argmax(-1) == unseen[1]
            looks.append((step, right.float().mean().item()))
            if looks[-1][1] >= ENOUGH:
                break
    return losses, looks, time.perf_counter() - begin


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=400, help="most steps a rule may take")
    parser.add_argument("--pairs", type=int, default=24, help=f"to recall, up to {VOCABULARY}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="draw the losses")
    options = parser.parse_args(argv)
    if torch is None:
        line = "torch is not installed: pip install torch"
        print(f"{parser.prog}: {line}", file=sys.stderr)
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if not 1 <= options.pairs <= VOCABULARY:
        parser.error(f"--pairs must be from 1 to {VOCABULARY}")
    if options.plot:
        import matplotlib  # noqa: F401 (before the work, should it be missing)

        if options.plot.is_dir() or not options.plot.parent.is_dir():
            parser.error(f"{options.plot} cannot be written")

    console, found = Console(highlight=False), {}
    columns = ("{task.description}", "loss {task.fields[loss]:.3f}")
    bar = [TextColumn(columns[0]), BarColumn(), MofNCompleteColumn(), TextColumn(columns[1])]
    with Progress(*bar, TimeElapsedColumn(), console=console, transient=True) as progress:
        for rule in ("linear", "delta"):
            task = progress.add_task(f"{rule} rule", total=options.steps, loss=float("nan"))

            def tick(loss, task=task):
                progress.update(task, advance=1, loss=loss)

            settings = (options.pairs, options.steps, options.device, options.seed)
            found[rule] = train(rule, *settings, tick)
    table = Table("rule")
    for column in ("steps", "loss", "recalled", "seconds"):
        table.add_column(column, justify="right")
    for rule, (losses, looks, seconds) in found.items():
        last = sum(losses[-LOOK:]) / len(losses[-LOOK:])
        table.add_row(
            rule, str(len(losses)), f"{last:.3f}", f"{looks[-1][1]:.1%}", f"{seconds:.0f}"
        )
    console.print(f"{options.pairs} pairs in a sequence, guessing recalls {1 / VOCABULARY:.1%}")
    console.print(table)
    if options.plot:
        draw(found, options.plot)
    return 0


def draw(found, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, (rule, (losses, looks, _)) in zip(("C0", "C1"), found.items(), strict=True):
        left.plot(range(1, len(losses) + 1), losses, color=color, label=f"{rule} rule")
        steps, accuracies = zip(*looks, strict=True)
        right.plot(steps, accuracies, color=color, marker=".", label=f"{rule} rule")
    left.set_yscale("log")
    left.set_ylabel("loss (nats)")
    right.axhline(0.99, color="0.6", linestyle=":", label="99 %")
    right.set_ylabel("recalled")
    right.set_ylim(0, 1.02)
    for axis in (left, right):
        axis.set_xlabel("step")
        axis.legend()
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
