"""A paper's figures with ours beside them, as text, Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
from typing import TextIO

from pflsim.analysis.compare.formats import Format, drawn, printable
from pflsim.analysis.compare.paper import Beside


def render_paper(found: Beside, kind: Format, stream: TextIO | None = None) -> str:
    """In one of the formats, without a line end; in characters that a stream has, where one is given.

    Commands that would make what is missing are in text and Markdown, each on one line as a shell takes it.
    """
    table = found.table
    if kind == "csv":
        written = io.StringIO()
        headers = [header.replace("\n", " ") for header in table.headers]
        csv.writer(written, lineterminator="\n").writerows([headers, *table.rows])
        return printable(written.getvalue().removesuffix("\n"), stream)
    if not table.rows:
        return printable("\n".join([table.title, "", *table.notes]), stream)
    lines = [drawn([table], kind, stream)]
    if found.missing and kind != "latex":
        fence = ["```"] if kind == "markdown" else []
        commands = [line for command, rows in found.missing for line in (f"# {'; '.join(rows)}", command)]
        lines += ["", "no run yet of", *fence, *commands, *fence]
    return printable("\n".join(lines), stream)
