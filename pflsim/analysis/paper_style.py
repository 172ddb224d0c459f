"""Templates of papers: widths, font sizes and fonts of figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Style(NamedTuple):
    """A template: widths of a column and of the page's text in inches, sizes of labels and of ticks in points, font.

    STIX, which matplotlib carries, resembles the templates' Times.
    """

    column: float
    page: float
    labels: float
    ticks: float
    font: str = "STIXGeneral"


STYLES = {
    "icml": Style(3.25, 6.75, 8, 7),
    "neurips": Style(5.5, 5.5, 8, 7),
    "ieee": Style(3.5, 7.16, 8, 7),
    "thesis": Style(5.9, 5.9, 9, 8),
}


@contextmanager
def template(style: Style) -> Iterator[None]:
    """Give matplotlib the fonts and sizes of a template, whatever the calling program has set."""
    from matplotlib import style as styles

    texts = {"axes.titlesize": style.labels, "xtick.labelsize": style.ticks, "ytick.labelsize": style.ticks}
    lines = {"axes.linewidth": 0.6, "xtick.major.width": 0.6, "xtick.major.size": 2.5, "ytick.major.size": 0}
    colours = dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), "#5b626e") | {"ytick.labelcolor": "black"}
    fonts = {"font.family": style.font, "font.size": style.labels, "pdf.fonttype": 42}  # 42: TrueType, not Type 3
    spines = {"axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False}
    with styles.context(["default", {**texts, **lines, **colours, **fonts, **spines}]):
        yield


def new_figure(style: Style, width: float, height: float) -> Figure:
    """Return a figure of a size in inches that is saved with the settings of the template, too."""
    from matplotlib.figure import Figure

    class Paper(Figure):
        def savefig(self, *args: Any, **kwargs: Any) -> None:
            with template(style):
                super().savefig(*args, **kwargs)

    return Paper(figsize=(width, height), layout="constrained")
