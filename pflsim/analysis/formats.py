"""Tables as text, Markdown, LaTeX, and CSV."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tabulate as tabulate_module
from tabulate import LATEX_ESCAPE_RULES, tabulate

from pflsim.analysis.comparison import Comparison
from pflsim.analysis.tables import MODEL, Table, records, tables
from pflsim.errors import SettingsError

if TYPE_CHECKING:
    from pandas import DataFrame

tabulate_module.MIN_PADDING = 0  # columns are as wide as their header
Format = Literal["text", "markdown", "latex", "csv"]
SUFFIXES: dict[str, Format] = {".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv"}
GREEK = {"α": "alpha", "β": "beta", "λ": "lambda", "ρ": "rho"}
LATEX = str.maketrans({"±": r"$\pm$", "–": "--", "—": "---", **{k: rf"$\{name}$" for k, name in GREEK.items()}})


def render(comparisons: Sequence[Comparison], kind: Format) -> str:
    """Return comparisons in one of the formats, without a final line break."""
    if kind == "csv":
        return as_csv([record for comparison in comparisons for record in records(comparison)])
    return "\n\n\n".join(drawn(tables(comparison), kind) for comparison in comparisons)


def drawn(made: Sequence[Table], kind: Format) -> str:
    """Return tables below each other."""
    return "\n\n".join({"text": _text, "markdown": _markdown, "latex": _latex}[kind](table) for table in made)


def _text(table: Table) -> str:
    return "\n".join([table.title, "", _grid(table, "simple"), "", *table.notes])


def _markdown(table: Table) -> str:
    """Return a table in Markdown, with the notes as a list."""

    def escaped(cell: str) -> str:
        return re.sub(r"([\\|*<>`])", r"\\\1", cell)

    rows = tuple(tuple(map(escaped, row)) for row in table.rows)
    grid = _grid(replace(table, headers=tuple(map(escaped, table.headers)), rows=rows), "pipe")
    return "\n".join([escaped(table.title), "", grid, "", *(f"- {escaped(note)}" for note in table.notes)])


def _latex(table: Table) -> str:
    """Return a LaTeX table environment, which needs the package booktabs."""
    caption = ". ".join((table.title, *table.notes))
    escaped = "".join(LATEX_ESCAPE_RULES.get(character, character) for character in caption)
    grid = _grid(table, "latex_booktabs")
    made = f"\\begin{{table}}\n\\centering\n{grid}\n\\caption{{{escaped}.}}\n\\end{{table}}"
    minus = re.sub(r"(?<![\w-])-(?=\d)", "$-$", made.translate(LATEX))  # a hyphen is no minus sign
    return f"% needs \\usepackage{{booktabs}}\n{minus}"


def format_of(path: Path | None) -> Format:
    """Return the format that a file name stands for; text if there is no file.

    Raises:
        SettingsError: the suffix is unknown.
    """
    if path is not None and path.suffix not in SUFFIXES:
        raise SettingsError(f"--out {path}: expected one of the suffixes {', '.join(SUFFIXES)}, or set --format")
    return "text" if path is None else SUFFIXES[path.suffix]


def _grid(table: Table, kind: str) -> str:
    headers = [header if kind == "simple" else header.replace("\n", " ") for header in table.headers]
    align = ["left" if header in (table.headers[0], MODEL) else "right" for header in table.headers]
    return tabulate(table.rows, headers, kind, disable_numparse=True, colalign=align)


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return records as CSV with a column for every key, without a final line break."""
    from pandas import DataFrame

    return DataFrame(rows, dtype=object).to_csv(index=False).removesuffix("\n")  # object: whole numbers stay whole


class Comparisons(tuple[Comparison, ...]):
    """Comparisons as tables."""

    def records(self) -> DataFrame:
        """Return a row of plain numbers per group of runs, with all figures."""
        from pandas import DataFrame

        return DataFrame([record for comparison in self for record in records(comparison)])

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
