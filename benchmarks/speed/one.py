"""Runs one way of one case: `python -m benchmarks.speed.one CASE WAY --rounds 3 --out FILE`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import CASES, CORES, ROOT, WAYS, overrides, settings_of
from benchmarks.speed import per_client

FIRST_ROUND = ("clients=20", "rounds=2")
"""20 clients on the digits data set, with Ray."""


def measure(case_name: str, way: str, rounds: int, root: str, quick: bool) -> dict[str, Any]:
    """Return the figures of one way of a case, for `rounds` rounds after the first one."""
    if way == "start":
        return dict(measure_start(1 if quick else 5))
    if way == "small":
        return per_client.figures(100 if quick else per_client.CLIENTS)
    case = CASES[case_name]
    settings = settings_of(overrides(case, way, rounds + 1, root, quick))
    if way in ("plain", "plain1", "workers"):
        from benchmarks.speed import plain, plain_ray
        from lightning_modules.prepare import prepare

        prepared = prepare(settings)
        return (
            plain_ray.measure(prepared)
            if way == "workers"
            else plain.measure(prepared, 1 if way == "plain1" else CORES)
        )
    from benchmarks.speed import ours

    with tempfile.TemporaryDirectory() as folder:
        return ours.measure(settings, Path(folder), case.growth)


def measure_start(repeats: int) -> dict[str, float]:
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


def main() -> None:
    """Run the measurement and write the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.one")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", default="data")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    found = measure(given.case, given.way, given.rounds, given.root, given.quick)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
