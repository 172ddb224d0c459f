"""Runs one way of one case: `python -m benchmarks.one CASE WAY --rounds 3 --out FILE`."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, CORES, WAYS, overrides, settings_of


def measure(case_name: str, way: str, rounds: int, root: str, quick: bool) -> dict[str, Any]:
    """Return the figures of one way of a case, for `rounds` rounds after the first one."""
    if way == "start":
        from benchmarks import start

        return dict(start.measure(1 if quick else 5))
    case = CASES[case_name]
    settings = settings_of(overrides(case, way, rounds + 1, root, quick))
    if way in ("plain", "plain1", "workers"):
        from benchmarks import plain, plain_ray
        from lightning_modules.prepare import prepare

        prepared = prepare(settings)
        return (
            plain_ray.measure(prepared)
            if way == "workers"
            else plain.measure(prepared, 1 if way == "plain1" else CORES)
        )
    from benchmarks import ours

    with tempfile.TemporaryDirectory() as folder:
        return ours.measure(settings, Path(folder), case.growth)


def main() -> None:
    """Run the measurement and write the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one")
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
