"""Converts matplotlib figures to SVG elements that follow the light or dark colours of a page."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

INK, MUTED, GRID = "#1b1f24", "#59636e", "#d8dee4"
"""Colours of text, axes, and grid lines."""
PALETTE = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
"""Matplotlib's colour cycle, for which the page defines light and dark shades."""
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", **{c: f"--c{n}" for n, c in enumerate(PALETTE, start=1)}}
"""CSS custom property of the page for each colour."""
MAX_SCALE = 1.25
"""Maximum CSS pixels per point of a figure; the page reads the width that follows from `--width`."""
FONT_SIZE = 11.5
"""Font size in points, legible on a phone."""


def colour_of(number: int) -> str:
    """Return the colour of a group by its position; the palette repeats."""
    return PALETTE[number % len(PALETTE)]


def style_axes(axes: Any) -> None:
    """Apply the style of the page to axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(INK)


def to_svg(figure: Any, name: str, label: str, **options: Any) -> str:
    """Return a figure as an `<svg>` element; text stays text, and colours become custom properties of the page.

    Args:
        figure: a matplotlib `Figure`.
        name: prefix of every id in the element, unique on the page.
        label: description for screen readers.
        options: of `Figure.savefig`.
    """
    import matplotlib as mpl

    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
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
