"""Starts programs on many ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("ranks.py"))
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path]),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",  # Open MPI refuses it otherwise; containers run as root
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
LIMIT = 240  # seconds


def mpi(ranks: int, *words: str, module: bool = True) -> subprocess.CompletedProcess:
    """Python on some ranks, by ``module`` with -m mpi4py, which ends all ranks when one fails."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: it comes with the extra mpi")
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    launcher = shutil.which("mpiexec", path=beside)
    assert launcher, "mpi4py is installed without the mpiexec of an MPI"
    start = [launcher, "-n", str(ranks), sys.executable, "-W", "error"]
    command = [*start, *(["-m", "mpi4py"] if module else []), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT, check=False
    )


def group(ranks: int, folder: Path, engine: str, array: str, *names: str) -> list[tuple[int, str]]:
    """ranks.py on a torch process group: the exit code of each rank and what it printed."""
    pytest.importorskip("torch")
    command = [sys.executable, PROGRAM, engine, array, *names]
    facts = {"WORLD_SIZE": str(ranks), "STORE": str(folder / "store")}
    started = []
    for rank in range(ranks):
        with (folder / f"{rank}.log").open("w") as log:
            environment = ENVIRONMENT | facts | {"RANK": str(rank)}
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    end = time.monotonic() + LIMIT
    try:
        codes = [x.wait(max(0.1, end - time.monotonic())) for x in started]
    finally:
        for x in started:
            x.kill()
    return [(code, (folder / f"{rank}.log").read_text()) for rank, code in enumerate(codes)]
