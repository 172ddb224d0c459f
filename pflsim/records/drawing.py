"""The style of all pictures."""

from __future__ import annotations

from contextlib import AbstractContextManager


def drawing(font_size: float = 10.0) -> AbstractContextManager[None]:
    """Return a context in which matplotlib has its defaults, whatever a matplotlibrc or the calling program sets.

    Args:
        font_size: in points.
    """
    from matplotlib import style

    return style.context(["default", {"font.size": font_size}])
