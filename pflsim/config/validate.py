"""Bounds of numbers: in the annotations of settings, and as checks in constructors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pflsim.errors import SettingsError

WIDEST = 1_000_000
"""Largest width of a layer."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval of finite numbers.

    In an annotation it limits a setting: `Annotated[float, Bounds(0, below=1)]`. A constructor calls it to check an
    argument: `positive("method.sigma", sigma)`.

    Args:
        least: inclusive lower bound.
        most: inclusive upper bound.
        above: exclusive lower bound.
        below: exclusive upper bound.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        pairs = (">=", self.least), (">", self.above), ("<=", self.most), ("<", self.below)
        return " and ".join(f"{sign} {bound}" for sign, bound in pairs if math.isfinite(bound))

    def __call__(self, name: str, value: Number) -> Number:
        """Return the value.

        Args:
            name: key of the setting, for the message.
            value: number to check.

        Raises:
            SettingsError: the value is outside the bounds, infinite or NaN.
        """
        if value not in self:
            raise SettingsError(f"{name}={value}: expected a number {self}")
        return value


positive = Bounds(above=0)
non_negative = Bounds(0)
chance = Bounds(0, below=1)
at_least_one = Bounds(1)
at_least_zero = non_negative


def stable_penalty(name: str, value: float, lr: float, momentum: float = 0.0, rate: str = "lr") -> float:
    """Return the strength c of a penalty c/2·‖w − a‖² after checking that SGD converges on it.

    A step multiplies w − a by 1 − lr·c. If lr·c exceeds 2·(1 + momentum), the distance grows with every step and
    training ends in NaN.

    Args:
        name: key of the setting.
        value: c.
        lr: highest learning rate of the run.
        momentum: momentum of SGD.
        rate: key of the learning rate.

    Raises:
        SettingsError: c is negative or not finite, or lr·c exceeds the bound.
    """
    non_negative(name, value)
    bound = 2 * (1 + momentum)
    if lr * value > bound:
        raise SettingsError(
            f"{name}={value:.6g} makes training diverge: {rate}*{name} = {lr * value:.4g} is above {bound:g}, "
            f"the limit of SGD; at {rate}={lr:.4g} use at most {bound / lr:.4g}"
        )
    return value


def layer_widths(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return layer widths as a tuple.

    Raises:
        SettingsError: a width is below 1 or above `WIDEST`.
    """
    for value in values:
        Bounds(1, WIDEST)(name, value)
    return tuple(values)
