"""The comparison of several runs, one part for each set of runs that can be compared."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pflsim.analysis.compare.comparison import Comparison
from pflsim.analysis.compare.formats import format_of, render
from pflsim.analysis.compare.tables import records, tables
from pflsim.analysis.results.frames import frame


class Comparisons(tuple[Comparison, ...]):
    """Comparisons as tables."""

    def records(self) -> Any:
        """Return a row of plain numbers per group of runs, with all figures; see `frame`."""
        return frame(record for comparison in self for record in records(comparison))

    def save(self, path: str | Path) -> Path:
        """Write the tables to a file and return its path.

        Args:
            path: the suffix .txt, .md, .tex or .csv decides the format.

        Raises:
            SettingsError: the suffix is another one.
        """
        out = Path(path)
        out.write_text(render(self, format_of(out)) + "\n", encoding="utf-8")
        return out

    def __repr__(self) -> str:
        """Return the tables as text."""
        return render(self, "text")

    def _repr_html_(self) -> str:
        return "".join(
            f"<p><b>{escape(table.title)}</b></p>{tabulate(table.rows, table.headers, 'html', disable_numparse=True)}"
            f"<p>{'<br>'.join(map(escape, table.notes))}</p>"
            for comparison in self
            for table in tables(comparison)
        )
