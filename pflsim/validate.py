"""Checks of single settings, for constructors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pflsim.errors import SettingsError


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
        SettingsError: one of them is not a whole number of at least 1.
    """
    if any(value < 1 for value in values):
        raise SettingsError(f"{name}={list(values)}: widths are whole numbers of at least 1")
    return tuple(values)
