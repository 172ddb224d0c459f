"""Types, bounds and choices of settings: in annotations, and as checks in constructors."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pflsim.config.names import listed, shortened, written
from pflsim.errors import SettingsError

WIDEST = 1_000_000
"""Largest width of a layer."""

Number = TypeVar("Number", int, float)
LARGEST = 2**31 - 1
"""Limit of whole numbers without an upper bound of their own, so that products of them do not overflow."""
UNIONS = (typing.Union, types.UnionType)
WORDS = {bool: "true or false", str: "text", type(None): "null"}


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


def checked(key: str, annotation: Any, value: Any) -> Any:
    """Return a value as the type of its setting: 1 becomes 1.0 where the setting is a float.

    Args:
        key: dotted name of the setting, for the message.
        annotation: int, float, str, bool, None, Any, list[...], tuple[...], dict[...], Literal[...], unions of these,
            and Annotated[..., Bounds(...)] of a number.
        value: as a YAML file gives it. A list is valid for a tuple and stays a list.

    Raises:
        SettingsError: the value does not fit; the message lists the choices.
    """
    try:
        return _convert(annotation, value)
    except ValueError:
        message = f"{key}={shortened(value)}: expected {_expected(annotation, value)}"
        raise SettingsError(message) from None


def _convert(kind: Any, value: Any, bounds: Bounds | None = None) -> Any:
    """Return the value as the type; raise ValueError if it does not fit."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _convert(inner[0], value, inner[1])
    if origin in UNIONS:
        return _first(inner, value)
    if origin in (list, tuple) and isinstance(value, list | tuple):
        kinds = inner if origin is tuple and ... not in inner else inner[:1] * len(value)
        return [_convert(member, item) for member, item in zip(kinds, value, strict=True)]
    if origin is dict and isinstance(value, Mapping):
        return {_convert(inner[0], name): _convert(inner[1], item) for name, item in value.items()}
    if kind is float and (type(value) is float or (type(value) is int and abs(value) < 10**300)):
        fits, value = value in (bounds or Bounds()), float(value)
    elif kind is int:
        fits = type(value) is int and value in _limits(bounds)
    elif origin is Literal:
        fits = any(type(value) is type(choice) and value == choice for choice in inner)
    else:
        fits = kind is Any or type(value) is kind
    if not fits:
        raise ValueError
    return value


def _first(kinds: tuple[Any, ...], value: Any) -> Any:
    """Return the value as one of several types, unchanged if possible."""
    found = []
    for kind in kinds:
        try:
            found.append(_convert(kind, value))
        except ValueError:
            continue
    if not found:
        raise ValueError
    return next((one for one in found if type(one) is type(value)), found[0])


def _limits(bounds: Bounds | None) -> Bounds:
    bounds = bounds or Bounds(-LARGEST)
    return bounds if math.isfinite(bounds.most) else replace(bounds, most=LARGEST)


def _expected(kind: Any, value: Any, bounds: Bounds | None = None) -> str:
    """Describe a type: `a list, each a whole number >= 1`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _expected(inner[0], value, inner[1])
    if origin is Literal:
        return listed([written(choice) for choice in inner], "or")
    if origin in UNIONS:
        return listed(list(dict.fromkeys(_expected(member, value) for member in inner)), "or")
    if origin in (list, tuple):
        return "a list" if inner[0] is Any else f"a list, each {_expected(inner[0], value)}"
    if origin is dict:
        return "a mapping {KEY: VALUE}"
    if kind is int:
        return f"a whole number {_limits(bounds)}" if bounds or type(value) is int else "a whole number"
    if kind is float:
        return f"a number {bounds}" if bounds else "a finite number"
    return WORDS.get(kind, "a value")
