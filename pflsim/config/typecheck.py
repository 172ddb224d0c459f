"""Check and convert the value of a setting: its type, its bounds and its choices."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pflsim.config.names import close_to, shortened
from pflsim.config.validate import Bounds
from pflsim.errors import SettingsError

LARGEST = 2**31 - 1
"""Limit of whole numbers without an upper bound of their own, so that products of them do not overflow."""
UNIONS = (typing.Union, types.UnionType)
WORDS = {bool: "true or false", str: "text", type(None): "null"}


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
        near = close_to(value, choices_of(annotation)) if isinstance(value, str) else []
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        message = f"{key}={shortened(value)}: expected {_expected(annotation, value)}{hint}"
        raise SettingsError(message) from None


def choices_of(annotation: Any) -> list[str]:
    """Return the texts that an annotation lists with `Literal`."""
    if typing.get_origin(annotation) in UNIONS:
        return [choice for member in typing.get_args(annotation) for choice in choices_of(member)]
    literal = typing.get_origin(annotation) is Literal
    return [choice for choice in typing.get_args(annotation) if isinstance(choice, str)] if literal else []


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
        return _listed([str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in inner])
    if origin in UNIONS:
        return _listed(list(dict.fromkeys(_expected(member, value) for member in inner)))
    if origin in (list, tuple):
        return "a list" if inner[0] is Any else f"a list, each {_expected(inner[0], value)}"
    if origin is dict:
        return "a mapping {KEY: VALUE}"
    if kind is int:
        return f"a whole number {_limits(bounds)}" if bounds or type(value) is int else "a whole number"
    if kind is float:
        return f"a number {bounds}" if bounds else "a finite number"
    return WORDS.get(kind, "a value")


def _listed(words: list[str]) -> str:
    """Return `a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
