"""From the config of a component to the object.

A component (method, data, shift, partition, split, model) names a class or function under `_target_`. Its settings are
the keyword-only parameters of the target; the simulator passes the positional ones when it calls what `bind` returns. A
method is a pair: `client` and `server` each name a target, and the settings of both are beside them. The settings of an
own model, which is no `Net`, are all parameters of its target.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
import sysconfig
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pflsim.config.installation import PACKAGES
from pflsim.config.names import unknown_key
from pflsim.config.objects import object_of
from pflsim.config.own_code import own_errors
from pflsim.config.signatures import ANY, Parameter, derives, find, find_source, signature_of, unknown_target
from pflsim.config.validate import checked
from pflsim.errors import SettingsError

COMPONENTS = ("method", "data", "shift", "partition", "split", "model")
TARGET = "_target_"
SIDES = ("client", "server")
ADDED = {"model": {"variants": Parameter(list[dict[str, Any]], [], False)}}
"""Settings of a component that the simulator handles, beside those of its target."""
OWN_MODEL = {"head": Parameter(str | None, None, False)}
"""The same of an own model."""
NET = "lightning_modules.nets.net.Net"
FILLED_IN = ("input_shape", "num_classes")
"""Parameters of an own model that the simulator fills in, unless they are given."""


def targets_of(node: Mapping[str, Any], component: str = "component") -> dict[str, str]:
    """Return the targets of a component: {"": target}, or {"client": ..., "server": ...} for a method.

    Raises:
        SettingsError: a target is missing, or settings are inside `client` or `server`.
    """
    sides = [node.get(side) for side in SIDES] if component == "method" else [node]
    if not all(isinstance(side, Mapping) and TARGET in side for side in sides):
        wanted = "client._target_ and server._target_" if component == "method" else "_target_"
        raise SettingsError(f"{component} does not name a class or function; expected {wanted} in its YAML file")
    if component != "method":
        return {"": str(node[TARGET])}
    for side in SIDES:
        for key in node[side]:
            if key != TARGET:
                raise SettingsError(f"{component}.{side}.{key}: write {component}.{key}, beside client and server")
    return {side: str(node[side][TARGET]) for side in SIDES}


def short_name(target: str) -> str:
    """Return the last part of a dotted name, for records and tables; of a function `load`, the name of its module."""
    parts = target.split(".")
    return parts[-2] if parts[-1] == "load" and len(parts) > 1 else parts[-1]


def is_own_model(target: str, component: str = "model") -> bool:
    """Return whether a target is a model that is called with its settings only, because it is no `Net`."""
    return component == "model" and not derives(target, NET)


def settings_of(
    targets: Mapping[str, str], component: str = "component", given: Collection[str] = ()
) -> dict[str, Parameter]:
    """Return the settings of a component: the parameters of its targets, and what the simulator adds.

    Args:
        targets: as `targets_of` returns them.
        component: its group.
        given: names that have a value. An own model may have settings that are not listed unless they are given.

    Raises:
        SettingsError: a target does not exist; two targets declare a parameter with different types, or both with a
            default.
    """
    own = any(is_own_model(target, component) for target in targets.values())
    added = {**ADDED.get(component, {}), **(OWN_MODEL if own else {})}
    merged: dict[str, Parameter] = dict(added)
    owner: dict[str, str] = {}
    for side, target in targets.items():
        for name, found in _parameters(target, component, _key(component, side, TARGET), given).items():
            known = merged.get(name)
            if name in (TARGET, *SIDES, *added):
                raise SettingsError(f"{target}: a parameter cannot be named {name!r}")
            if known is not None:
                both = f"{name!r} is a parameter of both {owner[name]} and {target}"
                if known.annotation != found.annotation:
                    raise SettingsError(f"{both}, with different types; use one type")
                if not known.required and not found.required:
                    raise SettingsError(f"{both}, each with a default; make it required in one of them")
            if known is None or known.required:
                merged[name], owner[name] = found, target
    return merged


def _parameters(target: str, component: str, key: str, given: Collection[str] = ()) -> dict[str, Parameter]:
    """Return the settings of one target."""
    if not is_own_model(target, component):
        return signature_of(target, key)
    found = signature_of(target, key, every=True)
    if found.pop("**", None):
        found |= {name: ANY for name in given if name not in {TARGET, *found, *ADDED["model"], *OWN_MODEL}}
    found |= {name: ANY for name in FILLED_IN if name in found}
    return {name: parameter for name, parameter in found.items() if parameter.default is not ... or name in given}


def keys_of(node: Any, component: str) -> Iterator[str]:
    """Yield the dotted keys of a component's settings; none if its targets cannot be read."""
    try:
        targets = targets_of(node, component)
        names = settings_of(targets, component, node)
    except (SettingsError, TypeError):
        return
    yield from (_key(component, name) for name in names)
    yield from (_key(component, side, TARGET) for side in targets)


def check_component(node: Mapping[str, Any], component: str) -> dict[str, Any]:
    """Return the config of a component with its values as the types of its settings.

    Raises:
        SettingsError: a setting is unknown, has the wrong type, or is required and missing; lists all problems.
    """
    targets = targets_of(node, component)
    known, problems, found = settings_of(targets, component, node), [], dict(node)
    for name in node:
        if name not in known and name not in ((TARGET,) if "" in targets else SIDES):
            positional = _positional(targets, component, name)
            problems.append(positional or unknown_key(f"{component}.{name}", [*keys_of(node, component)]))
    for name, parameter in known.items():
        key = f"{component}.{name}"
        if node.get(name, "???" if parameter.required else None) == "???":
            problems.append(f"{key} has no default; give it a value: {key}=...")
        elif name in node:
            try:
                found[name] = checked(key, parameter.annotation, node[name])
            except SettingsError as error:
                problems.append(str(error))
    if problems:
        raise SettingsError("\n".join(problems))
    for number, variant in enumerate(variants_of(found) if found.get("variants") and "variants" in known else []):
        try:
            check_component(variant, component)
        except SettingsError as error:
            raise SettingsError(f"{component}.variants[{number}]: {error}") from error
    return found


def _positional(targets: Mapping[str, str], component: str, name: str) -> str:
    """Return a message if a setting that is not known is a parameter of an own target that can be positional."""
    for target in targets.values():
        if target.partition(".")[0] not in PACKAGES and name in signature_of(target, every=True):
            return f"{component}.{name}: settings are keyword-only parameters; put a * before {name} in {target}"
    return ""


def resolve(target: str, kind: Any = None, key: str = TARGET) -> Callable[..., Any]:
    """Import a class or function and check what it is; nothing is called.

    A module that is not on the import path is imported from the working directory, which is added at the end.

    Args:
        target: "package.module.Name".
        kind: a Protocol with `__call__`: the target must accept its positional arguments and return its type (a
            function says so in its signature). None: any callable.
        key: dotted name of the setting, for the message.

    Raises:
        SettingsError: the target does not exist or is of another kind.
    """
    found: Any = object_of(target)
    if found is None:
        if find(target) is None:
            raise SettingsError(unknown_target(target, key))
        if find_spec(target.partition(".")[0]) is None:
            sys.path.append(os.getcwd())
        with own_errors(f"{key}={target}"):
            found = pkgutil.resolve_name(target)
    if not callable(found):
        raise SettingsError(f"{key}={target}: expected a class or function, found {type(found).__name__}")
    if kind is not None:
        _check_kind(found, kind, f"{key}={target}")
    return found


def _check_kind(found: Any, kind: Any, where: str) -> None:
    """Refuse a target that is not what the simulator calls."""
    arguments = [*inspect.signature(kind.__call__).parameters][1:]
    wanted = typing.get_type_hints(kind.__call__)["return"]
    returned = returned_type(found)
    if returned != wanted and not (_is_class(returned) and _is_class(wanted) and issubclass(returned, wanted)):
        name = wanted.__name__ if _is_class(wanted) else str(wanted)
        expected = f"a function ({', '.join([*arguments, '*', 'SETTINGS'])}) -> {name}, or such a class"
        if returned is None:
            raise SettingsError(f"{where} does not return {name}, because it has no annotation: write -> {name}")
        raise SettingsError(f"{where} does not return {name}; expected {expected}")
    if inspect.isabstract(found) or not _accepts(found, len(arguments)):
        raise SettingsError(f"{where} cannot be called with ({', '.join(arguments)})")


def _is_class(kind: Any) -> bool:
    return isinstance(kind, type) and not typing.get_args(kind)


def returned_type(found: Any) -> Any:
    """Return a class itself, or the type that a function's signature says it returns, or None."""
    try:
        return found if isinstance(found, type) else typing.get_type_hints(found).get("return")
    except (NameError, TypeError):  # a name imported for type checkers only, or an object without a signature
        return None


def _accepts(found: Any, count: int) -> bool:
    """Return whether a callable accepts this many positional arguments, its required keywords aside."""
    parameters = inspect.signature(found).parameters.values()
    keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    try:
        inspect.signature(found).bind(*[None] * count, **keywords)
    except TypeError:
        return False
    return True


def bind(node: Mapping[str, Any], field: str = "component", kind: Any = None) -> partial[Any]:
    """Import a component's target and fill in its settings; call the result with the positional arguments.

    Args:
        node: `_target_` and settings, as `check_component` returns them.
        field: the component, for messages.
        kind: see `resolve`.

    Raises:
        SettingsError: see `resolve`.
    """
    target = targets_of(node, field)[""]
    known = _parameters(target, field, TARGET, node)
    return partial(resolve(target, kind, f"{field}.{TARGET}"), **_arguments(node, known))


def bind_variants(node: Mapping[str, Any], kind: Any = None) -> tuple[partial[Any], ...]:
    """Import a model once for each entry of `variants`, whose settings replace those of the model; without any, once.

    Raises:
        SettingsError: see `resolve`.
    """
    return tuple(bind(variant, "model", kind) for variant in variants_of(node))


def variants_of(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the config of each variant of a model; of the model itself if it has none."""
    own = {key: value for key, value in node.items() if key != "variants"}
    return [{**own, **variant} for variant in node.get("variants") or [{}]]


def own_modules(components: Iterable[Mapping[str, Any]]) -> dict[str, Path]:
    """Return the files of the modules that targets name, by module, without those of pflsim and installed packages."""
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    found: dict[str, Path] = {}
    for node in components:
        for side in (node, *(node[side] for side in SIDES if side in node)):
            module = str(side.get(TARGET, "")).rpartition(".")[0]
            source = None if module.partition(".")[0] in PACKAGES else find_source(module)
            if source is not None and not any(source.path.is_relative_to(folder) for folder in installed):
                found[module] = source.path
    return found


def bind_method(
    node: Mapping[str, Any], client_kind: Any = None, server_kind: Any = None
) -> tuple[partial[Any], partial[Any]]:
    """Import a method's client and server and fill in the settings that each of them names.

    Args:
        node: `client` and `server` with their targets, and the settings of both, as `check_component` returns them.
        client_kind: what the client must be, see `resolve`.
        server_kind: what the server rule must be.

    Raises:
        SettingsError: see `resolve`.
    """
    targets = targets_of(node, "method")
    known = settings_of(targets, "method")
    # One of the two signatures holds the default, and the other side needs the value too.
    values = {name: p.default for name, p in known.items() if not p.required} | _arguments(node, known)
    made = [
        partial(
            resolve(target, kind, f"method.{side}.{TARGET}"), **{name: values[name] for name in signature_of(target)}
        )
        for (side, target), kind in zip(targets.items(), (client_kind, server_kind), strict=True)
    ]
    return made[0], made[1]


def _key(*names: str) -> str:
    return ".".join(filter(None, names))


def _arguments(node: Mapping[str, Any], known: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the values that a node gives, with tuples where the signature has tuples."""
    values = {name: (node[name], p.annotation) for name, p in known.items() if name in node}
    return {
        name: tuple(value) if isinstance(value, list) and _has_tuple(annotation) else value
        for name, (value, annotation) in values.items()
    }


def _has_tuple(annotation: Any) -> bool:
    return any(typing.get_origin(kind) is tuple for kind in (annotation, *typing.get_args(annotation)))
