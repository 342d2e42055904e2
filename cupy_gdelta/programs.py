"""The example programs: found in the package or beside it, listed without running, run by name."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from pathlib import Path

from .refusal import Refusal


def folder() -> Path:
    """In an installed package, or beside it in a checkout, where importlib.resources fails."""
    package = Path(__file__).resolve().parent
    for place in (package / "examples", package.parent / "examples"):
        if (place / "recurrence.py").is_file():
            return place
    raise Refusal(f"the examples are not installed beside {package}")


def summaries() -> dict[str, str]:
    """Name and the first line of the docstring of each example, read without importing any."""
    found = {}
    for path in sorted(folder().glob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.stem] = doc.partition("\n")[0]
    return found


def run(name: str, options: list[str], parser: type[argparse.ArgumentParser]) -> int:
    """``main(options)`` of an example; a wrong option is reported as ``parser`` does."""
    names = list(summaries())
    if name not in names:
        raise Refusal(f"there is no example {name}; there are {', '.join(names)}")
    spec = importlib.util.spec_from_file_location(f"{name}_example", folder() / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    arguments, error = sys.argv, argparse.ArgumentParser.error
    sys.argv = [f"cupy-gdelta run {name}", *options]  # argparse shows it in --help
    argparse.ArgumentParser.error = parser.error  # type: ignore[method-assign]
    try:
        spec.loader.exec_module(module)
        return int(module.main(options) or 0)
    finally:
        sys.argv, argparse.ArgumentParser.error = arguments, error  # type: ignore[method-assign]
        del sys.modules[spec.name]
