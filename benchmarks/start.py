"""Measures how long the help and the first round take."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.cases import ROOT

FIRST_ROUND = ("clients=20", "rounds=2")
"""20 clients on the digits data set, with Ray."""


def measure(repeats: int = 5) -> dict[str, float]:
    """Return the seconds of `launch.py --help`, and from the launch to the line of the first round."""
    return {"help": median(_help() for _ in range(repeats)), "first_round": _first_round()}


def _help() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "launch.py", "--help"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def _first_round() -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "launch.py", *FIRST_ROUND, f"run_dir={Path(folder) / 'run'}"]
        start, first = time.perf_counter(), 0.0
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not first and line.startswith("round "):
                    first = time.perf_counter() - start
        if process.returncode or not first:
            raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
    return first
