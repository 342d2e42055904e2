"""Results as a picture: how many times the memory floor each contender takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import what


def draw(found: dict[str, Any], path: Path) -> None:
    """Write a PNG: a panel for each rule, a group of bars for each shape, on a log scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = found["results"]
    kinds = list(dict.fromkeys(map(what, results)))
    names = list(dict.fromkeys(e["name"] for r in results for e in _timed(r)))
    most = max(sum(1 + _rows(r) for r in results if what(r) == kind) for kind in kinds)
    size = (5.5 * len(kinds), 1.4 + 0.19 * most)
    figure, axes = plt.subplots(1, len(kinds), figsize=size, layout="constrained", squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=True):
        _panel(axis, kind, [r for r in results if what(r) == kind], names)
    handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(names))]
    columns = min(len(names), 3 * len(kinds))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(found["machine"]["gpu"])
    figure.savefig(path, format="png", dpi=150)
    plt.close(figure)


def _panel(axis: Any, kind: str, results: list[dict[str, Any]], names: list[str]) -> None:
    """Bars from the floor (1) to a contender's multiple of it, with that number beside."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    y, ticks, labels, most = 0.0, [], [], 1.0
    for result in results:
        entries, rows = _timed(result), _rows(result)
        first = y + (rows - len(entries)) / 2
        for i, entry in enumerate(entries):
            times = entry["times_floor"]
            color = f"C{names.index(entry['name'])}"
            axis.barh(first + i, times - 1, left=1, height=0.9, color=color)
            text = f"{times:.2f}" if times < 10 else f"{times:.0f}"
            axis.text(1.04 * max(times, 1), first + i, text, va="center", fontsize=7)
            most = max(most, times)
        ticks.append(y + (rows - 1) / 2)
        labels.append(_label(result))
        y += rows + 1
    axis.set_xscale("log")
    axis.set_xlim(0.9, 1.5 * most)
    axis.set_xticks([n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if n <= 1.5 * most])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(ticks, labels)
    axis.invert_yaxis()
    axis.set_xlabel("time of a call, times the memory floor")
    axis.set_title(kind)


def _timed(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in result["contenders"] if entry["us"] is not None]


def _rows(result: dict[str, Any]) -> int:
    """Bars, or as many as the lines of the label take up with the gap after them."""
    return max(len(_timed(result)), _label(result).count("\n"))


def _label(result: dict[str, Any]) -> str:
    shape = result["shape"]
    name = "" if "," in shape["name"] else f"{shape['name']}\n"
    precision = "" if result["precision"] == "highest" else f"\n{result['precision']}"
    sizes = ",".join(str(shape[n]) for n in "BTHKV")
    return f"{name}{sizes}\n{shape['dtype']}{precision}"
