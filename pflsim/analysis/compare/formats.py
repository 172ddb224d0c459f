"""Tables as text, Markdown, LaTeX, and CSV."""

from __future__ import annotations

import csv
import io
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tabulate import LATEX_ESCAPE_RULES, tabulate

from pflsim.analysis.compare.comparison import Comparison
from pflsim.analysis.compare.tables import Table, records, tables
from pflsim.errors import SettingsError
from pflsim.terminal.formats import width_of

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
    return "\n\n".join(map({"text": text, "markdown": markdown, "latex": latex}[kind], made))


def text(table: Table, width: int | None = None) -> str:
    """Return a table for a terminal.

    If lines are longer than `width` (default: that of standard output), labels are wrapped; if they are still too long,
    the columns continue below.
    """
    width = width or width_of(sys.stdout)
    rows = _labels_wrapped(table, width)
    lines = _plain(table.headers, rows)
    if max(map(len, lines)) > width:
        lines = _stacked(table.headers, rows, width)
    notes = [line for note in table.notes for line in _wrapped(note, width)]
    return "\n".join([*_wrapped(table.title, width), "", *lines, "", *notes])


def markdown(table: Table) -> str:
    """Return a table in Markdown, with the notes as a list."""
    headers = [_markdown(header) for header in table.headers]
    rows = [[_markdown(cell) for cell in row] for row in table.rows]
    notes = [f"- {_markdown(note)}" for note in table.notes]
    return "\n".join([_markdown(table.title), "", _grid(headers, rows, "pipe"), "", *notes])


def latex(table: Table) -> str:
    """Return a LaTeX table environment, which needs the package booktabs."""
    tabular = _typeset(_grid(table.headers, table.rows, "latex_booktabs"))
    caption = _typeset(". ".join(_latex(part) for part in (table.title, *table.notes)))
    lines = ["% needs \\usepackage{booktabs}", r"\begin{table}", r"\centering", tabular, rf"\caption{{{caption}.}}"]
    return "\n".join([*lines, r"\end{table}"])


def format_of(path: Path | None) -> Format:
    """Return the format that a file name stands for; text if there is no file.

    Raises:
        SettingsError: the suffix is unknown.
    """
    if path is not None and path.suffix not in SUFFIXES:
        raise SettingsError(f"--out {path}: expected one of the suffixes {', '.join(SUFFIXES)}, or set --format")
    return "text" if path is None else SUFFIXES[path.suffix]


def _grid(headers: Sequence[str], rows: Sequence[Sequence[str]], kind: str) -> str:
    names = [header.replace("\n", " ") for header in headers]
    return tabulate(rows, names, tablefmt=kind, disable_numparse=True, colalign=_align(headers))


def _plain(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; unlike tabulate's headers, these add no padding to the columns."""
    high = max(header.count("\n") for header in headers)
    head = ["\n" * (high - header.count("\n")) + header for header in headers]
    widths = [
        max(len(line) for cell in column for line in cell.split("\n")) for column in zip(head, *rows, strict=True)
    ]
    grid = [head, ["-" * width for width in widths], *rows]
    made = tabulate(grid, tablefmt="plain", disable_numparse=True, colalign=_align(headers), preserve_whitespace=True)
    return [line.rstrip() for line in made.splitlines()]


def _stacked(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a wide table in blocks below each other, each with the first column."""

    def block(columns: list[int]) -> list[str]:
        return _plain([headers[n] for n in columns], [[row[n] for n in columns] for row in rows])

    blocks = [[0, 1]]
    for number in range(2, len(headers)):
        wider = [*blocks[-1], number]
        if max(map(len, block(wider))) <= width:
            blocks[-1] = wider
        else:
            blocks.append([0, number])
    return [line for columns in blocks for line in ["", *block(columns)]][1:]


def _align(headers: Sequence[str]) -> list[str]:
    return ["left" if number == 0 or header == "reported\nmodel" else "right" for number, header in enumerate(headers)]


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return records as CSV with a column for every key, without a final line break."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().removesuffix("\n")


def _labels_wrapped(table: Table, width: int) -> list[list[str]]:
    """Return the rows with labels that leave enough of the width for the other columns, if that is possible."""
    others = _plain(["", *table.headers[1:]], [["", *row[1:]] for row in table.rows])
    room = max(width - max(map(len, others)), 1)
    return [["\n".join(_wrapped(row[0], room)), *row[1:]] for row in table.rows]


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _markdown(cell: str) -> str:
    return re.sub(r"([\\|*<>`])", r"\\\1", cell)


def _latex(text: str) -> str:
    return "".join(LATEX_ESCAPE_RULES.get(character, character) for character in text)


def _typeset(escaped: str) -> str:
    """Replace symbols by LaTeX commands and the hyphens of negative numbers by minus signs."""
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped.translate(LATEX))
