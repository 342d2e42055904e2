"""The wheel holds the kernels and the examples, and finds them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the contents of the wheel, as an installer would lay them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("cupy_gdelta", "cuda", "examples"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode and "requirement setuptools" in done.stderr:
        pytest.skip("pip cannot fetch setuptools to build with")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=installed.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_is_in_the_wheel(installed):
    for folder in ("cuda", "examples"):
        here = {x.name for x in (ROOT / folder).iterdir() if x.is_file()}
        there = {x.name for x in (installed / "cupy_gdelta" / folder).iterdir() if x.is_file()}
        assert here == there
        assert here
    modules = {x.relative_to(ROOT) for x in (ROOT / "cupy_gdelta").rglob("*.py")}
    assert modules <= {x.relative_to(installed) for x in installed.rglob("*.py")}
    assert not (ROOT / "cuda" / "__init__.py").exists(), "it would shadow NVIDIA's cuda namespace"


def test_the_kernels_are_found(installed):
    code = "from cupy_gdelta.gpu.loader import folder, source; "
    code += "print(folder(), len(source('recurrent')))"
    folder, size = run(installed, "-c", code).split()
    assert folder == str(installed / "cupy_gdelta" / "cuda")
    assert int(size) > 10_000


def test_the_examples_run(installed):
    assert "forecast" in run(installed, "-m", "cupy_gdelta", "list")
    assert "rror" in run(installed, "-m", "cupy_gdelta", "run", "recall")
