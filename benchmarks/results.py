"""What was measured, case by case, in docs/performance.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import OURS
from pflsim.run_folder.files import write_atomically


@dataclass(frozen=True)
class Results:
    """By case and way: the figures, when and on what they were measured (`at`, `commit`), the machine's rates then."""

    cases: dict[str, dict[str, dict[str, Any]]]
    environment: dict[str, Any]

    @staticmethod
    def read(path: Path) -> Results:
        """What was measured so far; nothing where there is no file."""
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return Results(found.get("cases", {}), found.get("environment", {}))

    def write(self, path: Path) -> None:
        """Write it all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"environment": self.environment, "cases": self.cases}, indent=1) + "\n")

    def replace(self, case: str, found: dict[str, dict[str, Any]]) -> None:
        """Put a case measured anew in the place of what was there, whole, since ratios are of one run; one in which
        something failed takes nobody's place.
        """
        if case not in self.cases or not any("error" in new for new in found.values()):
            self.cases[case] = found

    def way(self, case: str, way: str) -> dict[str, Any] | None:
        """Figures of a case in a way; None where it was not measured or failed."""
        found = self.cases.get(case, {}).get(way)
        return None if found is None or "error" in found else found

    def errors(self) -> list[tuple[str, str, str]]:
        """Case, way and message of everything that failed."""
        return [
            (case, way, found["error"])
            for case, entry in self.cases.items()
            for way, found in entry.items()
            if "error" in found
        ]

    def seconds(self, case: str, way: str) -> float | None:
        """A round, in the middle."""
        found = self.way(case, way)
        return None if found is None else found["round"]["total"]

    def plain(self, case: str) -> float | None:
        """A round of the plain loop, with the number of threads that suits it better."""
        return min(self._all(case, "plain", "plain1"), default=None)

    def fastest(self, case: str) -> tuple[str, float] | None:
        """Our fastest way and its seconds a round."""
        found = [(s, way) for way in OURS if (s := self.seconds(case, way)) is not None]
        return (min(found)[1], min(found)[0]) if found else None

    def share(self, case: str, way: str, cores: int | None = None) -> float | None:
        """Operations of a whole round against what the cores would do in matrix products meanwhile.

        Args:
            case: which.
            way: which.
            cores: 1 or 2; None: as many as the way uses.
        """
        found = self.way(case, way)
        if found is None or "one" not in found["rates"]:
            return None
        rate = found["rates"]["one" if (cores or found["cores"]) == 1 else "two"]
        return (found["gflop_train"] + found["gflop_evaluate"]) / found["round"]["total"] / rate

    def per_example(self, case: str, way: str) -> float | None:
        """Seconds of a round for each training example in it."""
        found = self.way(case, way)
        return None if found is None else found["round"]["total"] / found["round"]["examples"]

    def _all(self, case: str, *ways: str) -> list[float]:
        return [s for way in ways if (s := self.seconds(case, way)) is not None]


def growth(held: list[float]) -> tuple[float, float]:
    """Memory held round by round: MB a round of the line through it, and the noise.

    The first fifth is left out, and the last round, at whose end the checkpoint is written. The noise is the slope that
    would take all rounds to move by twice the deviation of the single values from the line.
    """
    kept = held[len(held) // 5 : -1]
    n = len(kept)
    if n < 3:
        return 0.0, 0.0
    middle, level = (n - 1) / 2, sum(kept) / n
    slope = sum((x - middle) * (y - level) for x, y in enumerate(kept)) / sum((x - middle) ** 2 for x in range(n))
    rest = sum((y - level - slope * (x - middle)) ** 2 for x, y in enumerate(kept)) / (n - 2)
    return slope, 2 * rest**0.5 / n


def middle_rates(results: Results) -> dict[str, tuple[float, float, float]]:
    """Median, smallest and largest of the machine's rates over the cases."""
    taken = [next(iter(ways.values()), {}).get("rates", {}) for ways in results.cases.values()]
    found = [rates for rates in taken if "one" in rates]
    each = {name: [rates[name] for rates in found] for name in ("one", "two")} if found else {}
    return {name: (median(values), min(values), max(values)) for name, values in each.items()}
