"""Checks of single settings, for constructors."""

from __future__ import annotations

import math

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
