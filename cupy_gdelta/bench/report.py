"""Results as tables: for a terminal with rich, and in Markdown for the README."""

from __future__ import annotations

from typing import Any

COLUMNS = ("us", "in a graph", "host us", "x floor", "GB/s", "error")


def machine(found: dict[str, Any]) -> str:
    """One line: the GPU, the versions, the copy rate."""
    about = found["machine"]
    parts = [about["gpu"]]
    if about.get("driver"):
        parts.append(f"driver {about['driver']}")
    if about.get("cuda_runtime"):
        parts.append(f"CUDA {about['cuda_runtime']}")
    parts += [f"{name} {version}" for name, version in about["versions"].items()]
    rates = [result["copy_rate"] / 1e12 for result in found["results"]]
    span = dict.fromkeys(f"{rate:.2f}" for rate in (min(rates), max(rates)))
    parts.append(f"a device-to-device copy moves {' to '.join(span)} TB/s")
    return ", ".join(parts)


def what(result: dict[str, Any]) -> str:
    """The rule, and whether gradients are computed as well."""
    return f"{result['rule']} rule{', y and gradients' if result.get('backward') else ''}"


def title(result: dict[str, Any]) -> str:
    shape = result["shape"]
    return (
        f"{what(result)}, {_name(result)}: B, T, H, K, V = {_sizes(shape)}; floor "
        f"{result['floor_us']:.1f} us for {result['bytes'] / 1e6:.1f} MB at "
        f"{result['copy_rate'] / 1e12:.2f} TB/s"
    )


def show(console: Any, result: dict[str, Any]) -> None:
    """Print one rule and shape with rich: title, table, notes."""
    from rich.table import Table

    table = Table("")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for entry in result["contenders"]:
        table.add_row(entry["name"], *_cells(entry))
    console.print(title(result), soft_wrap=True)
    console.print(table)
    for entry in result["contenders"]:
        note = _note(entry)
        if note:
            console.print(f"{entry['name']}: {note}", soft_wrap=True)
    console.print()


def _cells(entry: dict[str, Any]) -> list[str]:
    forms = {"us": ".1f", "graph_us": ".1f", "host_us": ".1f", "times_floor": ".2f", "gbps": ".0f"}
    cells = [
        "-" if entry.get(name) is None else format(entry[name], form)
        for name, form in forms.items()
    ]
    return [*cells, _error(entry)]


def _error(entry: dict[str, Any]) -> str:
    if entry.get("error") is not None:
        return f"{entry['error']:.1e}"
    return "-" if entry.get("us") is None else "NaN"


def _note(entry: dict[str, Any]) -> str:
    parts = [entry.get("note")]
    if entry.get("no_graph"):
        parts.append(f"no graph: {entry['no_graph']}")
    return "; ".join(part for part in parts if part)


def show_host(console: Any, rows: list[dict[str, Any]]) -> None:
    """Print what a call of a decode step costs the host."""
    from rich.table import Table

    table = Table("host, us a call", *dict.fromkeys(row["array"] for row in rows))
    us = {(row["rule"], row["array"]): f"{row['us']:.1f}" for row in rows}
    for rule in dict.fromkeys(row["rule"] for row in rows):
        cells = (us.get((rule, name), "-") for name in dict.fromkeys(row["array"] for row in rows))
        table.add_row(f"{rule} rule", *cells)
    console.print(table)


def markdown(found: dict[str, Any]) -> str:
    """A table for each rule: shapes in rows, contenders in columns, then what is to be known."""
    parts = [f"Measured on one {machine(found)}."]
    for kind in dict.fromkeys(map(what, found["results"])):
        results = [result for result in found["results"] if what(result) == kind]
        error = "largest error" if results[0].get("backward") else "error of y"
        parts += [
            f"{kind.capitalize()}, microseconds (times the floor, {error}):",
            "\n".join(_rows(results)),
            _notes(results),
        ]
    if found.get("host"):
        parts += ["Microseconds of the host that a call costs at B = 1:", _host(found["host"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _host(rows: list[dict[str, Any]]) -> str:
    """A row for each rule, a column for each library whose arrays or kernels were used."""
    us = {(row["rule"], row["array"]): f"{row['us']:.1f}" for row in rows}
    rules, arrays = (list(dict.fromkeys(names)) for names in zip(*us, strict=True))
    table = [["rule", *arrays], ["---"] * (1 + len(arrays))]
    table += [[rule, *(us.get((rule, name), "-") for name in arrays)] for rule in rules]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def _rows(results: list[dict[str, Any]]) -> list[str]:
    entries = [entry for result in results for entry in result["contenders"]]
    names = dict.fromkeys(entry["name"] for entry in entries if entry["us"] is not None)
    rows = [["shape", "B, T, H, K, V", "floor", *names], ["---"] * (3 + len(names))]
    for result in results:
        by_name = {entry["name"]: entry for entry in result["contenders"]}
        cells = [_name(result), _sizes(result["shape"]), f"{result['floor_us']:.0f}"]
        rows.append([*cells, *(_cell(by_name.get(name)) for name in names)])
    return [f"| {' | '.join(row)} |" for row in rows]


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None or entry["us"] is None:
        return "-"
    error = "NaN" if entry["error"] is None else f"{entry['error']:.1e}".replace("e-0", "e-")
    return f"{entry['us']:.0f} ({entry['times_floor']:.2f}x, {error})"


def _notes(results: list[dict[str, Any]]) -> str:
    """One sentence with what is to be known of the contenders that have a time."""
    notes = {
        f"{entry['name']}: {entry['note']}": None
        for result in results
        for entry in result["contenders"]
        if entry["us"] is not None and entry["note"]
    }
    return f"{'. '.join(notes)}." if notes else ""


def _name(result: dict[str, Any]) -> str:
    name = result["shape"]["name"]
    name = "as given" if "," in name else name
    return name if result["precision"] == "highest" else f"{name}, {result['precision']}"


def _sizes(shape: dict[str, Any]) -> str:
    sizes = ", ".join(str(shape[name]) for name in ("B", "T", "H", "K", "V", "dtype"))
    if shape.get("Hq"):
        sizes += f", Hq {shape['Hq']}"
    return f"{sizes}, state {shape['state']}" if "state" in shape else sizes
