"""Tables as text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from tabulate import LATEX_ESCAPE_RULES, tabulate

from pflsim.analysis.compare.comparison import Comparison
from pflsim.analysis.compare.tables import Table, records, tables
from pflsim.errors import SettingsError
from pflsim.terminal.console import WIDTH
from pflsim.terminal.streams import can_print

Format = Literal["text", "markdown", "latex", "csv"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES: dict[str, Format] = {".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv"}
GREEK = {"α": "alpha", "β": "beta", "λ": "lambda", "ρ": "rho"}
LATEX = {"±": r"$\pm$", "–": "--", "—": "---", **{letter: rf"$\{name}$" for letter, name in GREEK.items()}}
ASCII = {"±": "+-", "–": "-", "—": "-", **GREEK}


def render(comparison: Comparison, kind: Format, stream: TextIO | None = None) -> str:
    """A comparison in one of the formats, without a line end; in characters that a stream has, where one is given."""
    return printable(_csv(records(comparison)) if kind == "csv" else drawn(tables(comparison), kind, stream), stream)


def drawn(made: Sequence[Table], kind: Format, stream: TextIO | None = None) -> str:
    """Tables below each other; with none but ASCII's characters, of those that tables have, for a stream without."""
    write = {"text": text, "markdown": markdown, "latex": latex}[kind]
    plain = stream is not None and not can_print("".join(ASCII), stream)
    return "\n\n".join(write(_ascii(table) if plain else table) for table in made)


def printable(rendered: str, stream: TextIO | None) -> str:
    """The same with question marks for what a stream has no characters for."""
    encoding = "utf-8" if stream is None else stream.encoding or "utf-8"
    return rendered.encode(encoding, "replace").decode(encoding)


def text(table: Table, width: int = WIDTH) -> str:
    """For a terminal; where a line would be too long, the settings of a label go below it."""
    forms = (table.rows, _broken(table.rows, 1), _broken(table.rows, -1))
    made = [_plain(table.headers, rows) for rows in forms]
    lines = next((lines for lines in made if max(map(len, lines)) <= width), made[-1])
    notes = [line for note in table.notes for line in _wrapped(note, width)]
    return "\n".join([*_wrapped(table.title, width), "", *lines, "", *notes])


def markdown(table: Table) -> str:
    """For a page; the notes are a list."""
    headers = [_markdown(header) for header in table.headers]
    rows = [[_markdown(cell) for cell in row] for row in table.rows]
    notes = [f"- {_markdown(note)}" for note in table.notes]
    return "\n".join([_markdown(table.title), "", _grid(headers, rows, "pipe"), "", *notes])


def latex(table: Table) -> str:
    """A table environment; needs the package booktabs."""
    tabular = _typeset(_grid(table.headers, table.rows, "latex_booktabs"))
    caption = _typeset(". ".join(_latex(part) for part in (table.title, *table.notes)))
    lines = ["% needs \\usepackage{booktabs}", r"\begin{table}", r"\centering", tabular, rf"\caption{{{caption}.}}"]
    return "\n".join([*lines, r"\end{table}"])


def format_of(path: Path | None) -> Format:
    """What a file's name says; text where there is no file.

    Raises:
        SettingsError: it says nothing.
    """
    if path is not None and path.suffix not in SUFFIXES:
        raise SettingsError(f"--out {path}: expected a name that ends in {', '.join(SUFFIXES)}, or a --format")
    return "text" if path is None else SUFFIXES[path.suffix]


def _grid(headers: Sequence[str], rows: Sequence[Sequence[str]], kind: str) -> str:
    names = [header.replace("\n", " ") for header in headers]
    return tabulate(rows, names, tablefmt=kind, disable_numparse=True, colalign=_align(headers))


def _plain(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are no wider than what is in them, as tabulate makes them below headers."""
    high = max(header.count("\n") for header in headers)
    head = ["\n" * (high - header.count("\n")) + header for header in headers]
    widths = [
        max(len(line) for cell in column for line in cell.split("\n")) for column in zip(head, *rows, strict=True)
    ]
    grid = [head, ["-" * width for width in widths], *rows]
    made = tabulate(grid, tablefmt="plain", disable_numparse=True, colalign=_align(headers), preserve_whitespace=True)
    return [line.rstrip() for line in made.splitlines()]


def _align(headers: Sequence[str]) -> list[str]:
    return ["left" if number == 0 or header == "judged\nmodel" else "right" for number, header in enumerate(headers)]


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().removesuffix("\n")


def _broken(rows: Sequence[Sequence[str]], times: int) -> list[list[str]]:
    """Labels over so many lines more, or with every setting in a line of its own."""
    return [[row[0].replace(" ", "\n  ", times), *row[1:]] for row in rows]


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _markdown(cell: str) -> str:
    return re.sub(r"([\\|*<>`])", r"\\\1", cell)


def _latex(text: str) -> str:
    """As tabulate escapes its cells."""
    return "".join(LATEX_ESCAPE_RULES.get(character, character) for character in text)


def _typeset(escaped: str) -> str:
    """What LaTeX has commands for; and minus signs that are no hyphens."""
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", _translated(escaped, LATEX))


def _ascii(table: Table) -> Table:
    title, *notes = (_translated(line, ASCII) for line in (table.title, *table.notes))
    rows = tuple(tuple(_translated(cell, ASCII) for cell in row) for row in table.rows)
    return Table(title, table.headers, rows, tuple(notes))


def _translated(rendered: str, table: dict[str, str]) -> str:
    return rendered.translate(str.maketrans(table))
