"""From the config of a part to the thing itself.

A part (method, data, partition, split, model) names a class or function under `_target_`; its settings are the
keyword-only parameters of that target, and the simulator supplies the positional ones when it calls what `bind`
returns. A method is a pair: `client` and `server` each name a target, and the settings of both lie flat beside them.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pflsim.config.annotations import type_mismatch
from pflsim.config.names import nearest, shortened
from pflsim.config.signatures import Parameter, choices_of, find, find_source, gives, signature_of, unknown_target
from pflsim.errors import SettingsError

__all__ = [
    "COMPONENTS",
    "SIDES",
    "TARGET",
    "Parameter",
    "bind",
    "bind_method",
    "bind_variants",
    "check_part",
    "resolve",
    "settings_of",
    "signature_of",
    "targets_of",
]

COMPONENTS = ("method", "data", "partition", "split", "model")
TARGET = "_target_"
SIDES = ("client", "server")
ADDED = {"model": {"variants": Parameter(list[dict[str, Any]], [], False)}}
"""Settings that the simulator itself has for a part, beside those of its target."""


def targets_of(node: Mapping[str, Any], part: str = "part") -> dict[str, str]:
    """The targets of a part: {"": target}, or {"client": ..., "server": ...} for a method.

    Raises:
        SettingsError: neither form, or settings inside `client` or `server` instead of beside them.
    """
    if TARGET in node:
        return {"": str(node[TARGET])}
    if all(isinstance(node.get(side), Mapping) and TARGET in node[side] for side in SIDES):
        for side in SIDES:
            inside = [str(key) for key in node[side] if key != TARGET]
            if inside:
                raise SettingsError(
                    f"{part}.{side}.{inside[0]}: settings of a method lie beside client and server: {part}.{inside[0]}"
                )
        return {side: str(node[side][TARGET]) for side in SIDES}
    wanted = "client._target_ and server._target_" if part == "method" else "_target_"
    raise SettingsError(f"{part}: does not say what to build; its YAML file must give {wanted}")


def settings_of(targets: Mapping[str, str], part: str = "part") -> dict[str, Parameter]:
    """The settings of a part: the keyword-only parameters of all its targets, and what the simulator adds to the part.

    Raises:
        SettingsError: two targets name a parameter and both give it a default, or give it different types.
    """
    merged: dict[str, Parameter] = dict(ADDED.get(part, {}))
    owner: dict[str, str] = dict.fromkeys(merged, "the simulator")
    for target in targets.values():
        for name, found in signature_of(target).items():
            known = merged.get(name)
            if name in (TARGET, *SIDES):
                raise SettingsError(f"{target}: a parameter cannot be named {name!r}")
            if known is not None:
                _agree(name, known, owner[name], found, target)
            if known is None or known.required:
                merged[name], owner[name] = found, target
    return merged


def _agree(name: str, one: Parameter, one_target: str, other: Parameter, other_target: str) -> None:
    """Refuse a parameter that two targets of a method declare differently, or both with a default."""
    both = f"{name!r} is a parameter of both {one_target} and {other_target}"
    if one.annotation != other.annotation:
        raise SettingsError(f"{both}, with different types; give it one")
    if not one.required and not other.required:
        raise SettingsError(f"{both}, each with a default; leave it to one and make it required in the other")


def check_part(node: Mapping[str, Any], part: str = "part") -> dict[str, Parameter]:
    """Check the settings of a part against its targets and return them.

    Raises:
        SettingsError: an unknown setting, a required one without a value, a value that is not of its type or not among
            its choices.
    """
    targets = targets_of(node, part)
    try:
        known = settings_of(targets, part)
    except SettingsError as error:
        raise SettingsError(f"{part}: {error}") from error
    kept = (TARGET,) if "" in targets else SIDES
    for name in node:
        if name not in known and name not in kept:
            raise SettingsError(f"{part}.{name}: no such setting; {nearest(str(name), known)}")
    for name, parameter in known.items():
        if name not in node and parameter.required:
            raise SettingsError(f"{part}.{name} has no default; give it a value: {part}.{name}=...")
        choices = choices_of(parameter.annotation)
        if name in node and choices is not None and node[name] not in choices:
            raise SettingsError(
                f"{part}.{name}={node[name]!r} is not one of its choices; {nearest(str(node[name]), map(str, choices))}"
            )
        expected = type_mismatch(parameter.annotation, node[name]) if name in node else None
        if expected is not None:
            raise SettingsError(f"{part}.{name}={shortened(node[name])}: expected {expected}")
    return known


def resolve(target: str, kind: type | None = None, field: str = "") -> Callable[..., Any]:
    """Import a class or function, once its source says that it is of the kind; nothing is called.

    Args:
        target: "package.module.Name".
        kind: what it must be. A class: itself or derived from it. A Protocol with `__call__`: a function, or a class,
            that can be called like that and gives what that returns; a function must say so in its signature. Another
            Protocol: with its members. None takes any callable.
        field: of which part it is the target, for messages: `data`, `method.client`.

    Raises:
        SettingsError: there is no such module or name, or it is of another kind.
    """
    where = f"{field}._target_" if field else "_target_"
    if find(target) is None:
        raise SettingsError(unknown_target(target).replace("_target_", where, 1))
    given, wanted = _call_of(kind)
    expected = f"expected {_signature(given, wanted)}" if given is not None else "a target here must be one"
    names = gives(target) if wanted is not None else None
    if names is not None and _name_of(wanted) not in names:
        raise SettingsError(f"{where} {target!r} is no {_short(wanted)}; {expected}")
    found = _import(target)
    if not callable(found):
        raise SettingsError(f"{where} {target!r} is a {type(found).__name__}, not a class or function")
    if kind is not None and not _is_kind(found, kind, wanted):
        raise SettingsError(f"{where} {target!r} is no {_short(wanted or kind)}; {expected}")
    if given is not None and not _takes(found, given):
        raise SettingsError(f"{where} {target!r} cannot be called with ({', '.join(given)}); {expected}")
    return found


def _import(target: str) -> Any:
    """What a target names; the longest beginning that is a module is imported, the rest are names in it."""
    parts = target.split(".")
    length = next(n for n in range(len(parts) - 1, 0, -1) if find_source(".".join(parts[:n])) is not None)
    found: Any = importlib.import_module(".".join(parts[:length]))
    for name in parts[length:]:
        found = getattr(found, name)
    return found


def _call_of(kind: type | None) -> tuple[tuple[str, ...] | None, Any]:
    """What a kind is called with by position (None: nothing is said of it), and the type that it gives."""
    if kind is None or not getattr(kind, "_is_protocol", False):
        return None, kind
    if "__call__" not in vars(kind):
        return None, None
    call: Any = vars(kind)["__call__"]
    return tuple(inspect.signature(call).parameters)[1:], typing.get_type_hints(call)["return"]


def _name_of(kind: Any) -> str:
    """The full name of a type, as `gives` writes it."""
    arguments = typing.get_args(kind)
    if arguments:
        return f"{_name_of(typing.get_origin(kind))}[{', '.join(_name_of(a) for a in arguments)}]"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _short(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else f"function -> {_name_of(kind)}"


def _signature(given: Sequence[str], wanted: Any) -> str:
    """How a target is written: `a function (labels, clients, *, SETTINGS) -> list[numpy.ndarray], or such a class`."""
    return f"a function ({', '.join([*given, '*', 'SETTINGS'])}) -> {_name_of(wanted)}, or a class called so"


def _takes(found: Callable[..., Any], given: Sequence[str]) -> bool:
    """Whether it can be called with so many positional arguments; what has no readable signature is believed."""
    if inspect.isabstract(found):
        return False
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:
        return True
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in by_position)
    return least <= len(given) and (
        len(given) <= len(by_position) or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    )


def _is_kind(found: object, kind: type, wanted: Any) -> bool:
    if wanted is not None:
        return not isinstance(found, type) or (isinstance(wanted, type) and issubclass(found, wanted))
    return all(hasattr(found, name) for name in _members(kind))


def _members(protocol: type) -> set[str]:
    """The names a Protocol asks for; what only the instance has (an annotation without a value) is not looked for."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False) and base is not typing.Protocol]
    return {name for base in bases for name in vars(base) if not name.startswith("_")}


def bind(node: Mapping[str, Any], field: str = "part", kind: type | None = None) -> partial[Any]:
    """Import a part's target and fill in its settings; call the result with what the simulator supplies.

    Args:
        node: `_target_` and settings; a setting that is not given has the default of the signature.
        field: what the part is called in messages.
        kind: see `resolve`.

    Raises:
        SettingsError: see `check_part` and `resolve`.
    """
    targets = targets_of(node, field)
    if "" not in targets:
        raise SettingsError(f"{field}: expected one _target_, found {', '.join(targets)}")
    known = {name: p for name, p in check_part(node, field).items() if name not in ADDED.get(field, {})}
    return partial(resolve(targets[""], kind, field), **_values(node, known))


def bind_variants(node: Mapping[str, Any], kind: type | None = None) -> tuple[partial[Any], ...]:
    """Import the model in each of its variants; without any, the model alone.

    Args:
        node: a model's `_target_` and settings; `variants` is a list of settings that replace those of the model.
        kind: see `resolve`.

    Raises:
        SettingsError: see `check_part` and `resolve`.
    """
    common = {key: value for key, value in node.items() if key != "variants"}
    if not node.get("variants"):
        return (bind(common, "model", kind),)
    made = []
    for number, variant in enumerate(node["variants"]):
        try:
            made.append(bind({**common, **variant}, "model", kind))
        except SettingsError as error:
            raise SettingsError(f"model.variants[{number}]: {error}") from error
    return tuple(made)


def bind_method(
    node: Mapping[str, Any], client_kind: type | None = None, server_kind: type | None = None
) -> tuple[partial[Any], partial[Any]]:
    """Import a method's client and server; each gets the settings that it names.

    Args:
        node: `client` and `server` with their targets, and the settings of both.
        client_kind: what the client must be, see `resolve`.
        server_kind: what the server rule must be.

    Raises:
        SettingsError: see `check_part` and `resolve`.
    """
    targets = targets_of(node, "method")
    if "" in targets:
        raise SettingsError("method: expected client and server, each with a _target_")
    # A default stands in one of the two signatures, so what is not given is filled in for the other.
    values = {**_defaults(check_part(node, "method")), **_values(node, settings_of(targets))}
    kinds = {"client": client_kind, "server": server_kind}
    parts = [
        partial(
            resolve(targets[side], kinds[side], f"method.{side}"),
            **{name: values[name] for name in signature_of(targets[side])},
        )
        for side in SIDES
    ]
    return parts[0], parts[1]


def _defaults(known: Mapping[str, Parameter]) -> dict[str, Any]:
    return {name: p.default for name, p in known.items() if not p.required}


def _values(node: Mapping[str, Any], known: Mapping[str, Parameter]) -> dict[str, Any]:
    """The values given, lists turned into tuples and whole numbers into numbers where the signature says so."""
    return {name: _as(p.annotation, node[name]) for name, p in known.items() if name in node}


def _as(annotation: Any, value: Any) -> Any:
    kinds = [annotation, *typing.get_args(annotation)]
    if isinstance(value, list) and any(typing.get_origin(k) is tuple for k in kinds):
        return tuple(value)
    return float(value) if type(value) is int and float in kinds and int not in kinds else value
