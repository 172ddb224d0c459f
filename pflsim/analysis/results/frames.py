"""Records as tables: pandas frames where pandas is installed, else lists of dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tabulate import tabulate


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return rows as a `pandas.DataFrame`, or as a list of dicts if pandas is not installed."""
    found = [dict(row) for row in rows]
    try:
        import pandas
    except ImportError:
        return found
    return pandas.DataFrame(found)


def as_html(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table for a notebook."""
    return tabulate([short(row) for row in rows], "keys", "html", disable_numparse=True)


def short(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as people read them: four digits of a number."""
    return {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()}
