"""Reads and writes the figures of all cases, in docs/performance.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from benchmarks.cases import OURS
from pflsim.records.files import write_atomically


@dataclass(frozen=True)
class Results:
    """The figures by case and way, each with its time, its commit and the rates of the machine."""

    cases: dict[str, dict[str, dict[str, Any]]]
    environment: dict[str, Any]

    @staticmethod
    def read(path: Path) -> Results:
        """Read a file; return empty results if it does not exist."""
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return Results(found.get("cases", {}), found.get("environment", {}))

    def write(self, path: Path) -> None:
        """Write a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"environment": self.environment, "cases": self.cases}, indent=1) + "\n")

    def replace(self, case: str, found: dict[str, dict[str, Any]]) -> None:
        """Replace all figures of a case, since ratios compare figures of one run. Keep the old ones if a way failed."""
        if case not in self.cases or not any("error" in new for new in found.values()):
            self.cases[case] = found

    def way(self, case: str, way: str) -> dict[str, Any] | None:
        """Return the figures of one way of a case; None if it was not measured or failed."""
        found = self.cases.get(case, {}).get(way)
        return None if found is None or "error" in found else found

    def errors(self) -> list[tuple[str, str, str]]:
        """Return the case, the way and the message of each failure."""
        each = ((case, way, found) for case, entry in self.cases.items() for way, found in entry.items())
        return [(case, way, found["error"]) for case, way, found in each if "error" in found]

    def seconds(self, case: str, way: str) -> float | None:
        """Return the median seconds of a round."""
        found = self.way(case, way)
        return None if found is None else found["round"]["total"]

    def plain(self, case: str) -> float | None:
        """Return the seconds of a round of the plain loop, with the faster number of threads."""
        return min((s for way in ("plain", "plain1") if (s := self.seconds(case, way)) is not None), default=None)

    def fastest(self, case: str) -> tuple[str, float] | None:
        """Return the fastest way of pflsim and its seconds per round."""
        found = [(s, way) for way in OURS if (s := self.seconds(case, way)) is not None]
        return (min(found)[1], min(found)[0]) if found else None

    def share(self, case: str, way: str, cores: int | None = None) -> float | None:
        """Return the operations per second of a round as a fraction of the rate of matrix products.

        Args:
            case: the case.
            way: the way.
            cores: 1 or 2; None: as many as the way uses.
        """
        found = self.way(case, way)
        if found is None or "one" not in found["rates"]:
            return None
        rate = found["rates"]["one" if (cores or found["cores"]) == 1 else "two"]
        return (found["gflop_train"] + found["gflop_evaluate"]) / found["round"]["total"] / rate

    def per_example(self, case: str, way: str) -> float | None:
        """Return the seconds of a round per training example."""
        found = self.way(case, way)
        return None if found is None else found["round"]["total"] / found["round"]["examples"]


def growth(held: list[float]) -> tuple[float, float]:
    """Return the slope of a line through the memory after each round, in MB per round, and its noise.

    The first fifth is left out, and the last round, which writes the checkpoint. The noise is the slope that over all
    rounds adds up to twice the standard deviation from the line.
    """
    kept = held[len(held) // 5 : -1]
    n = len(kept)
    if n < 3:
        return 0.0, 0.0
    slope, level = linear_regression(range(n), kept)
    rest = sum((y - level - slope * x) ** 2 for x, y in enumerate(kept)) / (n - 2)
    return slope, 2 * rest**0.5 / n


def middle_rates(results: Results) -> dict[str, tuple[float, float, float]]:
    """Return the median, minimum and maximum of the machine's rates over the cases."""
    taken = [next(iter(ways.values()), {}).get("rates", {}) for ways in results.cases.values()]
    found = [rates for rates in taken if "one" in rates]
    each = {name: [rates[name] for rates in found] for name in ("one", "two")} if found else {}
    return {name: (median(values), min(values), max(values)) for name, values in each.items()}
