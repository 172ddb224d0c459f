"""Formats of bytes, durations and counts, and the names of metrics, chosen rounds and phases."""

import shutil
from collections.abc import Iterable
from textwrap import fill, wrap
from typing import Literal

Choice = Literal["last", "best_val", "best_test_oracle"]
"""How to choose the round whose results are reported: the last evaluated one; the first one with the best mean of the
primary metric on validation data; or, as in the papers' tables, on test data. The last of these is chosen by the test
data, so it is optimistically biased; do not use it as the main result."""
UNITS = (("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
ACRONYMS = {"auroc", "ece", "mae", "nll", "npv", "ppv", "rmse"}
NONE = "—"
"""Stands for a missing value."""
WIDTH = 110
"""Maximum number of characters in a printed line, except in lines that end with a path."""
CHOSEN: dict[Choice, str] = {
    "last": "last round",
    "best_val": "best by validation",
    "best_test_oracle": "best test round (oracle)",
}
"""Names of the rounds that figures are taken from."""
WHEN = {"trained": "after local training", "received": "as received from the server"}
"""The point in a round at which a model is evaluated, by phase."""


def byte_unit(largest: float, below: float = 9999.5) -> tuple[str, float]:
    """Return the name and size of the smallest unit that writes `largest` bytes as a number below this one."""
    return next((unit for unit in UNITS if largest / unit[1] < below), UNITS[-1])


def format_bytes(count: float) -> str:
    """Format bytes with three digits and a decimal unit, e.g. "1.20 MB"."""
    if count < 999.5:
        return f"{count:.0f} B"
    unit, size = byte_unit(count, 999.5)
    count /= size
    return f"{count:.{2 if count < 9.995 else 1 if count < 99.95 else 0}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration with at most six characters below 100 hours: "40 ms", "0.8 s", "42 s", "3m20s", "2h05m"."""
    if 0 < seconds < 0.0995:
        return f"{max(round(seconds * 1000), 1)} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def in_text(metric: str) -> str:
    """Return a metric's name as it is written in text: `worst decile`, `RMSE`."""
    if metric == "brier":
        return "Brier score"
    return metric.upper() if metric in ACRONYMS else metric.replace("_", " ")


def who_is_evaluated(clients: str, attacked: bool = False) -> str:
    """Return words for what a summary says in `accuracy_of.clients`; of an attack, malicious ones are not evaluated."""
    known = {"all": "all clients", "participants": "the participants of the round", "newcomers": "the new clients"}
    return known.get(clients, f"{clients} clients chosen by the seed") + ", without malicious ones" * attacked


def plural(count: int, name: str) -> str:
    """Format a count with its noun: `1 client`, `2 clients`."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def flowed(items: Iterable[str], width: int) -> list[str]:
    """Return lines of items with three spaces between them; a line breaks between items only."""
    text = "   ".join(item.replace(" ", "\xa0") for item in items)
    lines = wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def wrapped(text: str, width: int | None = None, indent: str = "") -> str:
    """Return text in lines that are broken between words; all but the first are indented.

    Args:
        text: without line breaks.
        width: number of columns; default: the terminal's, at most `WIDTH`.
        indent: of the second line and those after it.
    """
    width = width or min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    return fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
