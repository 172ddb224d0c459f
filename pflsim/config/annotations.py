"""Whether a value is of a setting's type, and what the type is called to someone who knows no Python."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

LARGEST = 2**31 - 1
"""Whole numbers beyond are no counts: what multiplies them would overflow."""
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def type_mismatch(annotation: Any, value: Any) -> str | None:
    """What was expected in place of a value, or None where it fits.

    Args:
        annotation: int, float, str, bool, None, Any, list[...], tuple[...], dict[...], Literal[...], and unions.
        value: plain, as a config file gives it. A whole number is a number, a list does for a tuple, true is no number.
    """
    if _fits(annotation, value):
        return None
    if type(value) is int and _fits(annotation, 0) and not _fits(annotation, 0.5):
        return f"a whole number from {-LARGEST} to {LARGEST}"
    return words(annotation)


def words(annotation: Any) -> str:
    """What a type is called in a message: `a list of whole numbers`."""
    kind, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if kind is Literal:
        return " or ".join(str(value) for value in inner)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(words(member) for member in inner)
    if kind in (list, tuple) or annotation in (list, tuple):
        elements = [member for member in inner if member not in (..., Any)]
        return f"a list, each {words(elements[0])}" if elements else "a list"
    if kind is dict or annotation is dict:
        return "a mapping {KEY: VALUE}"
    return WORDS.get(annotation, "a value")


def _fits(annotation: Any, value: Any) -> bool:
    kind, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if kind is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if kind in (typing.Union, types.UnionType):
        return any(_fits(member, value) for member in inner)
    if kind is tuple and ... not in inner:
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(_fits, inner, value))
    if kind in (list, tuple):
        return isinstance(value, list | tuple) and all(_fits(inner[0], member) for member in value)
    if kind is dict:
        return isinstance(value, Mapping) and all(_fits(inner[0], k) and _fits(inner[1], v) for k, v in value.items())
    if annotation is int:
        return type(value) is int and abs(value) <= LARGEST
    if annotation is float:
        return type(value) is float or (type(value) is int and abs(value) < 10**300)
    return isinstance(value, annotation)
