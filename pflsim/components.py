"""From the config of a part to the thing itself.

A part (method, data, partition, split, model) names a class or function under `_target_`; its settings are the
keyword-only parameters of that target, and the simulator supplies the positional ones when it calls what `bind`
returns. A method is a pair: `client` and `server` each name a target, and the settings of both lie flat beside them.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pflsim.errors import SettingsError
from pflsim.names import nearest
from pflsim.signatures import Parameter, choices_of, find, signature_of, unknown_target

__all__ = [
    "PARTS",
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

PARTS = ("method", "data", "partition", "split", "model")
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
        SettingsError: an unknown setting, a required one without a value, or a value that is not among its choices.
    """
    targets = targets_of(node, part)
    known = settings_of(targets, part)
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
    return known


def resolve(target: str, kind: type | None = None) -> Callable[..., Any]:
    """Import a class or function.

    Args:
        target: "package.module.Name".
        kind: a class that it must be derived from, or a Protocol whose members it must have; None takes any callable.

    Raises:
        SettingsError: there is no such module or name, or it is of another kind.
    """
    if find(target) is None:
        raise SettingsError(unknown_target(target))
    module, _, name = target.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if not callable(found):
        raise SettingsError(f"_target_ {target!r} is a {type(found).__name__}, not a class or function")
    if kind is not None and not _is_kind(found, kind):
        raise SettingsError(f"_target_ {target!r} is no {kind.__name__}; a target here must be one")
    return found


def _is_kind(found: object, kind: type) -> bool:
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(found, name) for name in _members(kind))
    return isinstance(found, type) and issubclass(found, kind)


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
    return partial(resolve(targets[""], kind), **_values(node, known))


def bind_variants(node: Mapping[str, Any], kind: type | None = None) -> tuple[partial[Any], ...]:
    """Import the model in each of its variants; without any, the model alone.

    Args:
        node: a model's `_target_` and settings; `variants` is a list of settings that replace those of the model.
        kind: see `resolve`.

    Raises:
        SettingsError: see `check_part` and `resolve`.
    """
    common = {key: value for key, value in node.items() if key != "variants"}
    return tuple(bind({**common, **variant}, "model", kind) for variant in node.get("variants") or [{}])


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
        partial(resolve(targets[side], kinds[side]), **{name: values[name] for name in signature_of(targets[side])})
        for side in SIDES
    ]
    return parts[0], parts[1]


def _defaults(known: Mapping[str, Parameter]) -> dict[str, Any]:
    return {name: p.default for name, p in known.items() if not p.required}


def _values(node: Mapping[str, Any], known: Mapping[str, Parameter]) -> dict[str, Any]:
    """The values given, lists turned into tuples where the signature says so."""
    return {name: _as(p.annotation, node[name]) for name, p in known.items() if name in node}


def _as(annotation: Any, value: Any) -> Any:
    kinds = [annotation, *typing.get_args(annotation)]
    if isinstance(value, list) and any(typing.get_origin(k) is tuple for k in kinds):
        return tuple(value)
    return value
