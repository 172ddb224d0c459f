"""Converts matplotlib figures to SVG elements that follow the light or dark colours of a page."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.colors import TABLEAU_COLORS

INK, MUTED, GRID = "#1b1f24", "#59636e", "#d8dee4"
"""Colours of text, axes, and grid lines."""
PALETTE = tuple(map(str, TABLEAU_COLORS.values()))
"""Matplotlib's colour cycle, for which the page defines light and dark shades."""
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", **{c: f"--c{n}" for n, c in enumerate(PALETTE, start=1)}}
"""CSS custom property of the page for each colour."""
MAX_SCALE = 1.25
"""Maximum CSS pixels per point of a figure; the page reads the width that follows from `--width`."""
STYLE: dict[Any, Any] = {
    "font.size": 11.5,  # points, legible on a phone
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor", "axes.labelcolor"), INK),
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": GRID},
}
"""Matplotlib's settings for the charts of the page."""


def to_svg(figure: Any, name: str, label: str, **options: Any) -> str:
    """Return a figure as an `<svg>` element; text stays text, and colours become custom properties of the page.

    Args:
        figure: a matplotlib `Figure`.
        name: prefix of every id in the element, unique on the page.
        label: description for screen readers.
        options: of `Figure.savefig`.
    """
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing, **options)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([^;\"]*?)([\d.]+px)[^;\"]*", r"font: \1\2 var(--font)", text)
    text = re.sub(r' d="([^"]*)"', lambda found: f' d="{_rounded(found[1])}"', text)
    for colour, variable in VARIABLES.items():
        text = re.sub(colour, f"var({variable})", text, flags=re.IGNORECASE)
    text = text.replace("#000000", "var(--ink)")
    size = re.search(r'viewBox="0 0 ([\d.]+)[^"]*"', text)
    shown = f'style="--width:{float(size[1]) * MAX_SCALE:.0f}px" {size[0]}' if size else ""
    head = f'<svg class="chart" role="img" aria-label="{escape(label)}" {shown}'
    return re.sub(r"<svg[^>]*>", f"{head}>", text, count=1).strip()


def _rounded(path: str) -> str:
    short = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), path)
    return " ".join(short.split())
