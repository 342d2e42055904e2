"""Put a saved run into a README, between its markers, with the plot beside the JSON file.

python -m cupy_gdelta.bench.readme examples/bench_h200.json README.md

Results of decode steps have markers of their own.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from ..refusal import Refusal
from . import plot, report, store

KINDS = ("bench", "decode")


def kind(source: Path) -> str:
    """Which of a README's blocks a saved run belongs to."""
    return KINDS[all("state" in result["shape"] for result in store.load(source)["results"])]


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def block(source: Path, readme: Path) -> str:
    """The tables of a saved run and a link to its plot, markers included."""
    image = os.path.relpath(source.with_suffix(".png"), readme.parent)
    text = report.markdown(store.load(source))
    begin, end = markers(kind(source))
    return f"{begin}\n{text}\n![Times the memory floor]({Path(image).as_posix()})\n{end}"


def current(readme: str, name: str = "bench") -> str | None:
    """The block of that kind that a README's text has, if it has the markers."""
    begin, end = map(re.escape, markers(name))
    found = re.search(f"{begin}\n.*?{end}", readme, re.DOTALL)
    return found.group() if found else None


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print(f"usage: python -m {__spec__.name} RESULTS.json README.md", file=sys.stderr)
        return 2
    source, readme = map(Path, argv)
    try:
        new = block(source, readme)
        text = readme.read_text(encoding="utf-8")
        old = current(text, kind(source))
        if old is None:
            raise Refusal(f"{readme}: has no lines {' and '.join(markers(kind(source)))}")
        plot.draw(store.load(source), source.with_suffix(".png"))
        readme.write_text(text.replace(old, new), encoding="utf-8")
    except (Refusal, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
