"""Converts states to the plain form that `torch.load` reads with weights_only, and back."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from torch import Tensor

from pflsim.errors import SettingsError

State = TypeVar("State")


def plain(value: object) -> Any:
    """Convert a state to the plain form that `torch.load` reads with weights_only.

    A state consists of frozen dataclasses (each becomes a mapping of its fields), mappings, sequences, tensors, numbers
    and strings. Tensors are copied. Dense tensors keep their strides, since the order of sums may depend on them.

    Raises:
        TypeError: the state contains a value of another type.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)  # saving a view would save its whole base
    if value is None:
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # weights_only rejects NumPy floats, which are floats
    expected = "dataclasses, mappings, sequences, tensors, numbers and strings"
    raise TypeError(f"unexpected {type(value)} in a state; expected {expected}")


def restored(example: State, saved: object) -> State:
    """Rebuild a server's state from its plain form, using the type annotations of its class.

    Args:
        example: any state of the server rule. Only its class is used.
        saved: the result of `plain` for a state of this class.

    Raises:
        SettingsError: a saved value does not have the annotated type.
        TypeError: an annotation is not supported.
    """
    try:
        return cast(State, _rebuilt(type(example), saved, "state"))
    except _TypeMismatch as error:
        why = f"{error}; use the version of the method that saved it"
        raise SettingsError(f"the server's state cannot be restored: {why}") from None


class _TypeMismatch(ValueError):
    """Raised when a saved value does not have the annotated type."""


def _rebuilt(hint: Any, saved: Any, where: str) -> Any:
    """Return `saved` as a value of the type `hint`; `where` names it in errors."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        *others, last = sorted(get_args(hint), key=lambda option: option is not types.NoneType)  # None first
        for other in others:
            with suppress(_TypeMismatch):
                return _rebuilt(other, saved, where)
        return _rebuilt(last, saved, where)
    if origin is Literal:
        return _checked(saved in get_args(hint), saved, hint, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint, saved, where)
    hints = get_args(hint)
    if hints and issubclass(origin, Mapping):
        return _mapping(hints, _checked(isinstance(saved, Mapping), saved, hint, where), where)
    if hints and issubclass(origin, Sequence):
        items = _checked(isinstance(saved, list), saved, hint, where)
        return _sequence(list if origin is list else tuple, hints, items, where)
    if hint is None or hint is types.NoneType:
        return _checked(saved is None, saved, "None", where)
    if isinstance(hint, type) and issubclass(hint, bool | int | float | str | Tensor):
        wide = (int, float) if hint is float else hint  # Python takes an int for a float
        return _checked(isinstance(saved, wide), saved, hint, where)
    raise TypeError(f"{where}: the annotation {hint} is not supported in a state")


def _dataclass(kind: type[Any], saved: Any, where: str) -> Any:
    fields = [f.name for f in dataclasses.fields(kind)]
    _checked(isinstance(saved, Mapping), saved, kind, where)
    missing, unknown = [n for n in fields if n not in saved], [str(n) for n in saved if n not in fields]
    if missing or unknown:
        differences = [f"{w} {', '.join(names)}" for w, names in (("without", missing), ("with", unknown)) if names]
        raise _TypeMismatch(f"{where} was saved {' and '.join(differences)}")
    hints = get_type_hints(kind)
    return kind(**{name: _rebuilt(hints[name], saved[name], f"{where}.{name}") for name in fields})


def _mapping(hints: Sequence[Any], saved: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    key, value = hints
    return {_rebuilt(key, k, f"a key of {where}"): _rebuilt(value, v, f"{where}[{k!r}]") for k, v in saved.items()}


def _sequence(make: Callable[..., Any], hints: Sequence[Any], saved: Sequence[Any], where: str) -> Any:
    if make is list or len(hints) == 1 or hints[1:] == (...,):
        hints = [hints[0]] * len(saved)
    if len(hints) != len(saved):
        raise _TypeMismatch(f"{where} was saved with {len(saved)} items instead of {len(hints)}")
    return make(_rebuilt(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(zip(hints, saved, strict=True)))


def _checked(fits: bool, saved: Any, hint: Any, where: str) -> Any:
    if fits:
        return saved
    expected = getattr(hint, "__name__", hint)
    raise _TypeMismatch(f"{where} was saved as {type(saved).__name__}; expected {expected}")
