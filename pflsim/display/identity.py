"""The colour, mark, and display name of every method, the same in all pictures and tables."""

import csv
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.resources import files

MARKS = {
    "circle": "●o", "square": "■s", "diamond": "◆D", "up": "▲^", "down": "▼v", "left": "◄<",
    "right": "►>", "pentagon": "◉p", "hexagon": "◈h", "star": "★*", "plus": "╬P", "cross": "╳X",
}  # fmt: skip
"""Each mark as a character that takes one cell of a terminal, and as matplotlib's marker."""
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
"""Matplotlib's name of each line style."""
FAMILIES = {
    "reference": "References",
    "fusion": "Mixtures per client",
    "split": "Shared and private parts",
    "proximal": "Personal models near a global one",
    "prototype": "Class prototypes",
    "cluster": "Clusters of clients",
    "global": "One global model",
    "own": "Other methods",
    "baseline": "Regressions",
}
"""The families' names for readers, in the order of pages."""
OWN = (("#384800", "#dcea92"), ("#596a18", "#aebe68"), ("#80903e", "#839340"))
"""Colours, on light and on dark pages, of methods that `identity.csv` does not list."""
NOT_CLEAR = {"light": "#868d99", "dark": "#828a97"}
"""Colours of differences that are not clear."""


@dataclass(frozen=True, slots=True)
class Identity:
    """How a method is shown.

    Args:
        name: the method's name in the settings.
        display: its name for readers.
        family: a key of `FAMILIES`; its methods have one hue.
        light, dark: colour on a light and on a dark page, #rrggbb.
        mark: shape of its points. No two listed methods have the same colour and mark.
        dash: line style where several methods share one axis.
    """

    name: str
    display: str
    family: str
    light: str
    dark: str
    mark: str
    dash: str


@cache
def listed_identities() -> dict[str, Identity]:
    """Return the rows of `identity.csv` by name. New methods are appended; no row changes."""
    text = (files("pflsim.display") / "identity.csv").read_text(encoding="utf-8")
    return {row["name"]: Identity(**row) for row in csv.DictReader(text.splitlines())}


def identity(method: str) -> Identity:
    """Return the identity of a method; of one that is not listed, from a hash of its name alone.

    Args:
        method: the name in the settings, as `fedrep`, `ditto+fedadam`, or `mine.fedpac.FedPAC`.
    """
    known = listed_identities()
    if found := known.get(method):
        return found
    number = int.from_bytes(blake2b(method.encode(), digest_size=8).digest(), "big")
    light, dark = OWN[number % len(OWN)]
    parts = (known[part].display if part in known else part.rpartition(".")[2] for part in method.split("+"))
    mark, dash = [*MARKS][number // len(OWN) % len(MARKS)], [*DASHES][number % len(OWN)]
    return Identity(method, "+".join(parts), "own", light, dark, mark, dash)


def is_baseline(method: str) -> bool:
    """Return whether a method is one of `pflsim baselines`, which belongs to no family of comparisons."""
    return identity(method).family == "baseline"
