"""Results in JSON files: written whole or not at all, read back, joined."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..refusal import Refusal

FORMAT = 1
_KEYS = ("rule", "shape", "precision", "bytes", "copy_rate", "floor_us", "contenders")


def key(result: dict[str, Any]) -> tuple[str, bool, str, str]:
    name = result["shape"]["name"]
    return result["rule"], result.get("backward", False), name, result["precision"]


def saved(
    machine: dict[str, Any], results: list[dict[str, Any]], host: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """What a file holds; ``host`` is what calls of decode steps cost there."""
    found = {"format": FORMAT, "machine": machine, "results": results}
    return found | {"host": host} if host else found


def save(path: Path, found: dict[str, Any]) -> None:
    """Write under another name and rename, so that ``path`` is never half written."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """What :func:`save` has written; a Refusal for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise Refusal(f"{path}: has format {found['format']}; this version reads {FORMAT}")
        for part in ("gpu", "versions"):
            found["machine"][part]
        for result in found["results"]:
            for name in _KEYS:
                result[name]
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{path}: holds no results of bench") from error
    return found


def join(paths: list[Path]) -> dict[str, Any]:
    """One of several files from one machine; of a rule and shape in two, the later counts."""
    files = [load(path) for path in paths]
    machine = files[0]["machine"]
    versions: dict[str, str] = {}
    results: dict[tuple[str, bool, str, str], dict[str, Any]] = {}
    for path, found in zip(paths, files, strict=True):
        other = found["machine"]
        for name in ("gpu", "driver", "cuda_runtime"):
            if other.get(name) != machine.get(name):
                raise Refusal(
                    f"{path}: measured with {name} {other.get(name)}, "
                    f"{paths[0]} with {machine.get(name)}: ratios of two machines do not mix"
                )
        for name, version in other["versions"].items():
            if versions.setdefault(name, version) != version:
                raise Refusal(
                    f"{path}: measured with {name} {version}, other files with {versions[name]}"
                )
        results |= {key(result): result for result in found["results"]}
    host = next((found["host"] for found in reversed(files) if "host" in found), None)
    return saved({**machine, "versions": versions}, list(results.values()), host)
