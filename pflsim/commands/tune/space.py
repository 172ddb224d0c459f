"""Spaces that trials search: from `search:` blocks and the command line, checked against the settings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pflsim.config.names import written
from pflsim.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Range:
    """An interval; of whole numbers if both ends are whole.

    Args:
        low, high: its ends, which belong to it.
        log: whether to search the logarithm.
    """

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether the values are whole numbers."""
        return type(self.low) is int and type(self.high) is int


Dimension = Range | tuple[Any, ...]
"""A range, or the choices."""
Space = Mapping[str, Dimension]
"""The values to search, by the key of a setting."""
SHARED: Space = {"lr": Range(0.001, 1.0, log=True)}
"""What every method searches."""
FORM = "expected a list of choices or {low: L, high: H, log: true}"
FIXED = (
    *("method", "data", "shift", "partition", "split", "clients", "eval", "seed", "rounds", "faults"),
    *("run_dir", "executor", "placement", "sweep"),
)
"""Settings that must be the same for all trials, or the trials could not be compared."""


def dimension(key: str, node: Any) -> Dimension:
    """Return a dimension from its form in a file or on the command line.

    Raises:
        SettingsError: it has another form, or no values.
    """
    text = f"search.{key}={written(node)}"
    if key.partition(".")[0] in FIXED and not key.startswith("method."):
        raise SettingsError(f"search.{key}: all trials have the same {key}, or they could not be compared")
    if isinstance(node, list) and node:
        if any(value in node[:i] for i, value in enumerate(node)):
            raise SettingsError(f"{text}: a choice is repeated")
        return tuple(node)
    if not isinstance(node, Mapping) or not {"low", "high"} <= set(node) <= {"low", "high", "log"}:
        raise SettingsError(f"{text}: {FORM}")
    low, high, log = node["low"], node["high"], node.get("log", False)
    if any(type(end) not in (int, float) or not math.isfinite(end) for end in (low, high)) or type(log) is not bool:
        raise SettingsError(f"{text}: {FORM}")
    if low >= high:
        raise SettingsError(f"{text}: low must be below high")
    if log and low <= 0:
        raise SettingsError(f"{text}: with log, low must be above 0")
    return Range(low, high, log)


def block(node: Any, prefix: str = "") -> dict[str, Dimension]:
    """Return the dimensions of a `search:` block.

    Args:
        node: of the block; None if there is none.
        prefix: of the keys, `method.` in the file of a method.

    Raises:
        SettingsError: it is no mapping; see `dimension`.
    """
    if not isinstance(node or {}, Mapping):
        raise SettingsError(f"search={written(node)}: expected a mapping of settings")
    return {f"{prefix}{key}": dimension(f"{prefix}{key}", value) for key, value in (node or {}).items()}


def as_plain(found: Dimension) -> Any:
    """Return a dimension as a file has it."""
    return asdict(found) if isinstance(found, Range) else list(found)


def ends(found: Dimension) -> Sequence[Any]:
    """Return the values that a setting must accept: both ends, or all choices."""
    return (found.low, found.high) if isinstance(found, Range) else found


def nearest_value(found: Dimension, value: Any) -> Any:
    """Return a value, or if it is outside of the dimension the nearest end or the first choice; None is kept."""
    if value is None or (not isinstance(found, Range) and value in found):
        return value
    return min(max(value, found.low), found.high) if isinstance(found, Range) else found[0]


def untried(space: Space, tried: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the first point of a finite space that is not among the others; None if there is none.

    Args:
        space: with a range of real numbers, it counts as exhausted.
        tried: points.
    """
    axes = list[Sequence[Any]]()
    for found in space.values():
        if isinstance(found, Range) and not found.whole:
            return None
        axes.append(range(int(found.low), int(found.high) + 1) if isinstance(found, Range) else found)
    points = (dict(zip(space, values, strict=True)) for values in itertools.product(*axes))
    return next((point for point in points if point not in tried), None)


def described(space: Space) -> str:
    """Return a space for a table: `lr 0.001–1.0 log, method.p 1|2`."""
    texts = [
        f"{found.low}–{found.high}{' log' * found.log}" if isinstance(found, Range) else "|".join(map(written, found))
        for found in space.values()
    ]
    return ", ".join(f"{key} {text}" for key, text in zip(space, texts, strict=True)) or "nothing"
