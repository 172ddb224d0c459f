"""Checks of single settings, for constructors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pflsim.errors import SettingsError

WIDEST = 1_000_000
"""Of a layer, or of anything else that there are so many of."""


def positive(name: str, value: float) -> float:
    """Return value.

    Raises:
        SettingsError: it is not a finite number above 0.
    """
    if not (math.isfinite(value) and value > 0):
        raise SettingsError(f"{name}={value} must be a finite number above 0")
    return value


def non_negative(name: str, value: float) -> float:
    """Return value.

    Raises:
        SettingsError: it is not a finite number of at least 0.
    """
    if not (math.isfinite(value) and value >= 0):
        raise SettingsError(f"{name}={value} must be a finite number of at least 0")
    return value


def stable_pull(name: str, value: float, lr: float, momentum: float = 0.0, rate: str = "lr") -> float:
    """Return value, the strength c of a pull c/2·‖w − a‖² that SGD trains with.

    A step multiplies w − a by 1 − lr·c. Beyond lr·c = 2, with momentum 2·(1 + momentum), the distance grows with every
    step, to NaN in the end.

    Args:
        name: of the setting.
        value: c.
        lr: the highest learning rate that it meets.
        momentum: of SGD.
        rate: what the learning rate is called.

    Raises:
        SettingsError: it is not a finite number of at least 0, or the distance would grow.
    """
    non_negative(name, value)
    bound = 2 * (1 + momentum)
    if lr * value > bound:
        raise SettingsError(
            f"{name}={value:.6g} pulls too hard: {rate}*{name} = {lr * value:.4g} is above {bound:g}, so every step "
            f"ends farther from the anchor than it began; at {rate}={lr:.4g} it may be at most {bound / lr:.4g}"
        )
    return value


def chance(name: str, value: float) -> float:
    """Return value.

    Raises:
        SettingsError: it is not a number of at least 0 and below 1.
    """
    if not 0 <= value < 1:
        raise SettingsError(f"{name}={value} must be a number of at least 0 and below 1")
    return value


def at_least_one(name: str, value: int) -> int:
    """Return value.

    Raises:
        SettingsError: it is not a whole number of at least 1.
    """
    if value < 1:
        raise SettingsError(f"{name}={value} must be a whole number of at least 1")
    return value


def at_least_zero(name: str, value: int) -> int:
    """Return value.

    Raises:
        SettingsError: it is not a whole number of at least 0.
    """
    if value < 0:
        raise SettingsError(f"{name}={value} must be a whole number of at least 0")
    return value


def layer_widths(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return values as a tuple.

    Raises:
        SettingsError: one of them is not a whole number of at least 1, or beyond `WIDEST`.
    """
    if any(not 1 <= value <= WIDEST for value in values):
        raise SettingsError(f"{name}={list(values)}: widths are whole numbers of at least 1 and at most {WIDEST}")
    return tuple(values)
