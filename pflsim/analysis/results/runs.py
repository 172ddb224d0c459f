"""Several runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tabulate import tabulate

from pflsim.analysis.results.frames import as_html, frame, short
from pflsim.analysis.results.groups import distinguishes
from pflsim.analysis.results.run import RESULT, Run, find_runs, read_run, run_settings


class Runs(tuple[Run, ...]):
    """Runs in order, as tables with a row per run, per round, or per client and round."""

    @classmethod
    def read(cls, names: Iterable[str]) -> Runs:
        """Read the run folders that paths and patterns name, see `find_runs`.

        Raises:
            SettingsError: a name matches no run, or a folder cannot be read.
        """
        return cls(map(read_run, find_runs(list(names))))

    def summary(self) -> Any:
        """Return a row per run: the settings in which the runs differ, and the result; see `frame`."""
        return frame(self._overviews())

    def per_client(self) -> Any:
        """Return the rows of `Run.per_client` with the name of the run."""
        return frame({"run": run.name, **row} for run in self for row in run.client_rows())

    def metrics(self) -> Any:
        """Return the rows of `Run.metrics` with the name of the run."""
        return frame({"run": run.name, **row} for run in self for row in run.round_rows())

    def _overviews(self) -> list[dict[str, Any]]:
        found = [run_settings(run) for run in self]
        varied = dict.fromkeys(key for own in found for key in own if distinguishes(key, own, found))
        return [
            {"method": run.method, **{key: own.get(key, "") for key in varied}, "seed": run.seed}
            | {key: run.overview()[key] for key in RESULT}
            for run, own in zip(self, found, strict=True)
        ]

    def __repr__(self) -> str:
        """Return a table of `summary`."""
        return tabulate([short(row) for row in self._overviews()], "keys", disable_numparse=True)

    def _repr_html_(self) -> str:
        return as_html(self._overviews())
