"""``cupy-gdelta bench``: both rules on a GPU beside the memory floor and other libraries.

``options`` holds the command line, ``shapes`` what is measured, ``peers`` and, with gradients,
``backward`` who takes part, ``decode`` both for decode steps, ``timing`` how a call is timed,
``measure`` one rule at one shape; ``store``, ``report`` and ``plot`` keep and show results,
``readme`` puts them into the README. ``ranks`` is a program of its own: one sequence over several
GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import devices
from ..refusal import Refusal
from . import decode, shapes, store


@dataclass(frozen=True)
class Request:
    """What to measure, or which files to show, and where the results go.

    Parameters
    ----------
    rules : tuple of str
        "linear", "delta" or both.
    shapes : tuple of Shape
        Empty: all that have a name, or with ``sources`` all that these hold.
    sources : tuple of Path
        Saved results to show instead of measuring.
    decode : bool
        Measure decode steps instead of sequences, and what their calls cost the host.
    """

    rules: tuple[str, ...] = ("linear", "delta")
    shapes: tuple[shapes.Shape, ...] = ()
    peers: bool = False
    precision: str = "highest"
    repeat: int = 30
    json: Path | None = None
    plot: Path | None = None
    markdown: bool = False
    sources: tuple[Path, ...] = ()
    decode: bool = False
    backward: bool = False


def run(request: Request) -> int:
    """Print, save and draw; 1 where the library itself has failed at a shape, else 0."""
    from rich.console import Console

    from . import report

    if request.plot:
        import matplotlib  # noqa: F401 (missing? then say so before measuring)
    for path in (request.json, request.plot):
        if path and not path.parent.is_dir():
            raise Refusal(f"{path}: there is no folder {path.parent}")
    console = Console(highlight=False, markup=False)
    found: dict[str, Any] = {}
    shown = 0
    for found in _saved(request) if request.sources else _measured(request):
        for result in found["results"][shown:] if not request.markdown else ():
            if shown == 0:
                console.print(report.machine(found), soft_wrap=True)
            report.show(console, result)
            shown += 1
        if request.json:
            store.save(request.json, found)
    if request.markdown:
        print(report.markdown(found), end="")
    elif found.get("host"):
        report.show_host(console, found["host"])
    if request.plot:
        from . import plot

        plot.draw(found, request.plot)
    ours = [r["contenders"][0] for r in found["results"]]
    return 0 if all(entry["us"] is not None for entry in ours) else 1


def _saved(request: Request) -> Iterator[dict[str, Any]]:
    """The results of files that are wanted, growing by one."""
    joined = store.join(list(request.sources))
    names = {shape.name for shape in request.shapes}
    results = [
        result
        for result in joined["results"]
        if result["rule"] in request.rules and (not names or result["shape"]["name"] in names)
    ]
    if not results:
        raise Refusal(f"{request.sources[0]}: holds no results of that rule and shape")
    for count in range(1, len(results) + 1):
        yield store.saved(joined["machine"], results[:count], joined.get("host", []))


def _measured(request: Request) -> Iterator[dict[str, Any]]:
    """Results as they are measured, growing by one."""
    why = devices.why_no_gpu()
    if why:
        raise Refusal(f"bench needs a CUDA device: {why}")
    import cupy

    from . import measure, timing

    machine = measure.machine(request.peers)
    timer = timing.Timer(request.repeat)
    results: list[dict[str, Any]] = []
    usual = decode.NAMED.values() if request.decode else shapes.USUAL
    for rule in request.rules:
        for shape in request.shapes or usual:
            options = (request.precision, request.peers, timer, request.backward)
            results.append(measure.measure(rule, shape, *options))
            cupy.get_default_memory_pool().free_all_blocks()
            yield store.saved(machine, results)
    if request.decode:
        yield store.saved(machine, results, decode.host_costs(request.peers))
