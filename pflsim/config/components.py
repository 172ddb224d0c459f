"""From the config of a component to the object.

A component (one of `COMPONENTS`) names a class or function under `_target_`. Its
settings are the keyword-only parameters of the target; the simulator passes the positional ones when it calls what
`bind` returns. A method is a pair: `client` and `server` each name a target, and the settings of both are beside them.
The settings of an own model, which is no `Net`, are all parameters of its target.
"""

import importlib
import inspect
import os
import pkgutil
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from pflsim.config.names import nearest, unknown_key
from pflsim.config.settings import Settings
from pflsim.config.validate import checked, validator
from pflsim.errors import SettingsError, own_errors

COMPONENTS = ("method", "data", "shift", "partition", "split", "model", "uplink", "attack", "aggregator", "privacy")
TARGET = "_target_"
MISSING = "???"
"""OmegaConf's value of a setting that must be given."""
SIDES = ("client", "server")
NET = "lightning_modules.nets.net.Net"
SERVER_RULE, FEDAVG = "pflsim.servers.base.ServerRule", "pflsim.servers.fedavg.FedAvg"
OURS = ("pflsim.", "lightning_modules.", "torch.nn.", "torch.optim.")
"""Packages whose modules, optimisers and server rules the folder of a run may name, whoever made it."""
KINDS = ("torch.nn.Module", "torch.optim.Optimizer", SERVER_RULE)
FILLED_IN = ("input_shape", "num_classes", "vocabulary")
"""Parameters of an own model that the simulator fills in, unless they are given."""
DATA_FILES = "; a file of arrays: data=npz data.path=FILE; a table: data=table data.path=FILE data.label=COLUMN"
"""Ends the error about a data set that cannot be imported."""
NOTEBOOK = "__main__."
"""Begins the target of an object that other processes cannot import."""
_objects: dict[str, Any] = {}
replaced = set[str]()
"""Names that more than one object of this process has had."""
_doubted: ContextVar[object] = ContextVar("doubted", default=None)
"""The folder that is read and not trusted."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One setting of a component.

    Args:
        annotation: its type; Any if the signature has none, or one that pydantic cannot validate.
        default: of the signature; `MISSING` if it has none, and `...` if a YAML file cannot contain it.
    """

    annotation: Any = Any
    default: Any = ...


# Targets --------------------------------------------------------------------------------------------------------------


def target_of(value: Any) -> str:
    """Return a dotted name for a class or function, or for another callable object.

    Those that can be imported keep their own name, so that the command line can resume the run. Others, such as the
    classes of a notebook, have the name `__main__.NAME` in this process only; a later object of the same name replaces
    an earlier one.
    """
    module, name = value.__module__, getattr(value, "__qualname__", type(value).__qualname__)
    if f"{module}." != NOTEBOOK and getattr(sys.modules.get(module), name, None) is value:
        return f"{module}.{name}"
    return keep_object(name.rpartition(".")[2], value)


def keep_object(name: str, value: Any) -> str:
    """Return a name for an object in this process; a later object of the same name replaces it."""
    target = NOTEBOOK + re.sub(r"\W", "", name)
    if _objects.setdefault(target, value) is not value:
        _objects[target] = value
        replaced.add(target)
    return target


def kept_object(target: str, key: str) -> Any:
    """Return the object of a name in this process; None if the name is that of a file or module.

    Raises:
        SettingsError: the object is not in this process.
    """
    if target.startswith(NOTEBOOK) and target not in _objects:
        raise SettingsError(
            f"{key}={target}: an object of a Python program; pass it again, as in pflsim.resume(RUN, ...)"
        )
    return _objects.get(target)


@contextmanager
def reading_folder(folder: object, trusted: bool) -> Iterator[None]:
    """Run inside the block only classes of `OURS`, and read no pickles, unless the folder is trusted."""
    token = _doubted.set(None if trusted else folder)
    try:
        yield
    finally:
        _doubted.reset(token)


def foreign(what: str) -> None:
    """Refuse what would run code of others, where a folder is read that is not trusted.

    Raises:
        SettingsError: it is.
    """
    if folder := _doubted.get():
        raise SettingsError(
            f"{what}: code from outside pflsim, which reading {folder} would run; if you trust who made this folder, "
            "give trusted=True, or --trusted on the command line"
        )


def targets_of(node: Mapping[str, Any], component: str = "component") -> dict[str, str]:
    """Return the targets of a component: {"": target}, or {"client": ..., "server": ...} for a method.

    Raises:
        SettingsError: a target is missing, or settings are inside `client` or `server`.
    """
    if component == "method" and "baseline" in node and not node.keys() - {"baseline", "slopes"}:
        raise SettingsError("it is of a regression of pflsim baselines, whose model is not saved")
    sides = [node.get(side) for side in SIDES] if component == "method" else [node]
    if not all(isinstance(side, Mapping) and TARGET in side for side in sides):
        wanted = "client._target_ and server._target_" if component == "method" else "_target_"
        raise SettingsError(f"{component} does not name a class or function; expected {wanted} in its YAML file")
    if component != "method":
        return {"": str(node[TARGET])}
    for side in SIDES:
        for key in {*node[side]} - {TARGET}:
            raise SettingsError(f"{component}.{side}.{key}: write {component}.{key}, beside client and server")
    return {side: str(node[side][TARGET]) for side in SIDES}


def server_of(client: str) -> str:
    """Return the target of the server rule for a client that is named without one: the rule in its module, or FedAvg.

    Raises:
        SettingsError: the client does not exist, or its module has several server rules.
    """
    module = sys.modules[resolve(client, key=f"method.client.{TARGET}").__module__]
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    rules = [target_of(each) for each in classes if issubclass(each, pkgutil.resolve_name(SERVER_RULE))]
    if len(rules) > 1:
        raise SettingsError(f"method={client}: its module has {', '.join(rules)}; choose one: method.server={rules[0]}")
    return (rules or [FEDAVG])[0]


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
    if not target.startswith(OURS):
        foreign(f"{key}={target}")
    found = kept_object(target, key) or _imported(target, key)
    if _doubted.get() and not _is_ours(found):
        foreign(f"{key}={target}")
    made = key.startswith("model") and hasattr(found, "state_dict") and not inspect.isclass(found)
    if not callable(found) or made or inspect.isbuiltin(found):
        expected = "expected a class, or a function in Python"
        raise SettingsError(f"{key}={target}: {expected}, found {type(found).__name__}")
    if kind is not None:
        _check_kind(found, kind, f"{key}={target}")
    return found


def _is_ours(found: Any) -> bool:
    """Return whether an object is a class of `OURS`, defined there, and of `KINDS`; not what a module has imported."""
    if not (isinstance(found, type) and found.__module__.startswith(OURS)):
        return False
    return issubclass(found, tuple(map(pkgutil.resolve_name, KINDS)))


def _imported(target: str, key: str, given: str = "") -> Any:
    module, _, name = target.rpartition(".")
    where, head, hint = f"{key}={given or target}", module.partition(".")[0], DATA_FILES * key.startswith("data.")
    if head in sys.stdlib_module_names or not module or not all(map(str.isidentifier, target.split("."))):
        expected = "expected package.module.Name of a module outside the standard library"
        raise SettingsError(f"{where}: {expected}{hint}")
    if find_spec(head) is None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with own_errors(where):
            found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = SettingsError(f"{where}: {error}{hint}")
        if "." not in module or error.name != module:
            raise missing from None
        found = _imported(module, key, given or target)
        if not inspect.isclass(found):  # only a class contains names
            raise missing from None
    if not hasattr(found, name):
        own = [each for each, value in vars(found).items() if getattr(value, "__module__", "") == module]
        raise SettingsError(f"{where}: module {module} has no class or function {name}; {nearest(name, own)}")
    return getattr(found, name)


def _check_kind(found: Any, kind: Any, where: str) -> None:
    """Refuse a target that is not what the simulator calls."""
    arguments = [*inspect.signature(kind.__call__).parameters][1:]
    wanted, returned = typing.get_type_hints(kind.__call__)["return"], returned_type(found)
    inherits = isinstance(returned, type) and isinstance(wanted, type) and issubclass(returned, wanted)
    if returned != wanted and not inherits:
        name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
        form = ", ".join([*arguments, "*", "SETTINGS"])
        raise SettingsError(f"{where} does not return {name}; expected a function ({form}) -> {name}, or such a class")
    keywords = {p.name: None for p in inspect.signature(found).parameters.values() if p.kind is p.KEYWORD_ONLY}
    try:
        if inspect.isabstract(found):
            raise TypeError("it is abstract")
        inspect.signature(found).bind(*arguments, **keywords)
    except TypeError as error:
        raise SettingsError(f"{where} cannot be called with ({', '.join(arguments)}): {error}") from None


def returned_type(found: Any) -> Any:
    """Return a class itself, or the type that a function's signature says it returns, or None."""
    try:
        return found if isinstance(found, type) else typing.get_type_hints(found).get("return")
    except (NameError, TypeError, AttributeError):  # a name for type checkers only, or an object without a signature
        return None


# Settings -------------------------------------------------------------------------------------------------------------


def is_own_model(target: str, component: str = "model") -> bool:
    """Return whether a target is a model that is called with its settings only, because it is no `Net`."""
    if component != "model":
        return False
    returned = returned_type(resolve(target, key=f"model.{TARGET}"))
    return not (isinstance(returned, type) and issubclass(returned, pkgutil.resolve_name(NET)))


def parameters_of(called: Callable[..., Any], every: bool = False) -> dict[str, Parameter]:
    """Return the settings of a class or function, in the order of its signature.

    Args:
        called: the class or function.
        every: whether all parameters are settings, and not only those after the `*`.
    """
    function = called.__init__ if isinstance(called, type) else called
    names = getattr(inspect.unwrap(function), "__globals__", {})
    filled = ["common"] if getattr(called, "common_net", False) else []
    chosen = [p for p in inspect.signature(called).parameters.values() if every or p.kind is p.KEYWORD_ONLY]
    chosen = [p for p in chosen if p.name not in filled]
    return {p.name: _parameter(p, names) for p in chosen if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _parameter(parameter: inspect.Parameter, names: dict[str, Any]) -> Parameter:
    kind, default = parameter.annotation, parameter.default
    try:
        kind = eval(kind, names) if isinstance(kind, str) else kind
        if kind is parameter.empty:
            kind = type(default) if type(default) in (bool, int, float, str) else Any
        kind = kind | None if default is None else kind
        validator(kind)
    except (NameError, AttributeError, TypeError, RuntimeError, SyntaxError):  # no type, or none that can be validated
        kind = Any
    if default is parameter.empty:
        return Parameter(kind, MISSING)
    return Parameter(kind, default if _is_plain(default) else ...)


def settings_of(
    targets: Mapping[str, str], component: str = "component", given: Collection[str] = ()
) -> dict[str, Parameter]:
    """Return the settings of a component: the parameters of its targets, and what the simulator adds.

    Args:
        targets: as `targets_of` returns them.
        component: its group.
        given: names that have a value. What has no default that a YAML file can contain is not listed unless it has.

    Raises:
        SettingsError: a target does not exist, or two targets declare a parameter with a default.
    """
    merged: dict[str, Parameter] = {}
    if component == "model":
        merged["variants"] = Parameter(list[dict[str, Any]], [])
    if component == "model" and "common" in given:
        merged["common"] = Parameter(dict[str, Any], {})
    for side, target in targets.items():
        called, own = resolve(target, key=_key(component, side, TARGET)), is_own_model(target, component)
        found = parameters_of(called, own)
        if own:
            found |= {name: Parameter() for name in FILLED_IN if name in found}
            if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(called).parameters.values()):
                found |= {name: Parameter() for name in given if name not in {TARGET, *found, *merged}}
        for name, new in found.items():
            known = merged.get(name)
            if known is not None and MISSING not in (known.default, new.default):
                raise SettingsError(f"{target}: client and server both have a default of {name!r}; leave one out")
            if new.default is not ... or name in given:
                merged[name] = new if known is None or known.default == MISSING else known
    return merged


def keys_of(node: Any, component: str) -> Iterator[str]:
    """Yield the dotted keys of a component's settings; none if its targets cannot be read."""
    try:
        targets = targets_of(node, component)
        names = settings_of(targets, component, node)
    except (SettingsError, AttributeError):
        return
    yield from (_key(component, name) for name in names)
    yield from (_key(component, side, TARGET) for side in targets)


def names_client_only(method: Collection[str] | None) -> bool:
    """Return whether the config of a method has a client, as `method=mine.moon.Moon` has, and no server rule."""
    return {*SIDES}.intersection(method or ()) == {"client"}


def with_defaults(node: Mapping[str, Any], component: str) -> dict[str, Any]:
    """Return the config of a component with its defaults, in the order of the signatures.

    Raises:
        SettingsError: see `settings_of`.
    """
    if component == "method" and names_client_only(node):
        node = {**node, "server": {TARGET: server_of(node["client"][TARGET])}}
    targets = {name: node[name] for name in (TARGET, *SIDES) if name in node}
    known = settings_of(targets_of(node, component), component, node)
    return {**targets, **{name: parameter.default for name, parameter in known.items()}, **node}


def check_component(node: Mapping[str, Any], component: str) -> dict[str, Any]:
    """Return the config of a component with its values as the types of its settings; tuples are lists, as in YAML.

    Raises:
        SettingsError: a setting is unknown, has the wrong type, or is required and missing.
    """
    targets = targets_of(node, component)
    known, found = settings_of(targets, component, node), dict(node)
    for name in node:
        if name not in known and name not in ((TARGET,) if "" in targets else SIDES):
            raise SettingsError(unknown_key(f"{component}.{name}", keys_of(node, component)))
    for name, parameter in known.items():
        key = f"{component}.{name}"
        if node.get(name, parameter.default) == MISSING:
            raise SettingsError(f"{key} has no default; give it a value: {key}=...")
        if name in node:
            value = checked(key, parameter.annotation, node[name])
            found[name] = list(value) if isinstance(value, tuple | set) else value
    several = variants_of(found) if found.get("variants") and "variants" in known else []
    parts = {f"variants[{number}]": variant for number, variant in enumerate(several)}
    parts |= {"common": common_of(found)} if component == "model" and found.get("common") else {}
    for name, part in parts.items():
        try:
            check_component(part, component)
        except SettingsError as error:
            raise SettingsError(f"{component}.{name}: {error}") from error
    return found


def variants_of(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the config of each variant of a model; of the model itself if it has none."""
    own = {key: value for key, value in node.items() if key not in ("variants", "common")}
    return [{**own, **variant} for variant in node.get("variants") or [{}]]


def common_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the net that some methods train beside the model: `common` in place of the model's settings.

    If `common` names a target, the model's settings do not count.
    """
    common = node.get("common") or {}
    return {**({} if TARGET in common else variants_of({**node, "variants": []})[0]), **common}


def bind(node: Mapping[str, Any], field: str = "component", kind: Any = None) -> partial[Any]:
    """Import a component's target and fill in its settings; call the result with the positional arguments.

    Args:
        node: `_target_` and settings, as `check_component` returns them.
        field: the component, for messages.
        kind: see `resolve`.

    Raises:
        SettingsError: see `resolve`.
    """
    targets = targets_of(node, field)
    known = {name: p for name, p in settings_of(targets, field, node).items() if name not in ("variants", "common")}
    return partial(resolve(targets[""], kind, f"{field}.{TARGET}"), **_arguments(node, known, field))


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
    known = settings_of(targets, "method", node)
    # One of the two signatures holds the default, and the other side needs the value too.
    values = {name: p.default for name, p in known.items() if p.default != MISSING} | _arguments(node, known, "method")
    sides = list[partial[Any]]()
    for (side, target), kind in zip(targets.items(), (client_kind, server_kind), strict=True):
        called = resolve(target, kind, f"method.{side}.{TARGET}")
        sides.append(partial(called, **{name: values[name] for name in parameters_of(called) if name in values}))
    return sides[0], sides[1]


def _key(*names: str) -> str:
    return ".".join(filter(None, names))


def _arguments(node: Mapping[str, Any], known: Mapping[str, Parameter], field: str) -> dict[str, Any]:
    """Return the values that a node gives, with tuples where the signature has tuples."""
    return {name: checked(f"{field}.{name}", p.annotation, node[name]) for name, p in known.items() if name in node}


def _is_plain(value: object) -> bool:
    """Return whether a YAML file can contain a value."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str) or value == {}


# Names of a run's components in records and messages ------------------------------------------------------------------


def short_name(target: str) -> str:
    """Return the last part of a dotted name, for records and tables; of a function `load`, the name of its module."""
    parts = target.split(".")
    return parts[-2] if parts[-1] == "load" and len(parts) > 1 else parts[-1]


def component_name(settings: Settings, group: str) -> str:
    """Return the name of a component: its option on the command line, or the name in its target.

    Raises:
        SettingsError: the component is not set.
    """
    if group in settings.names:
        return settings.names[group]
    target = next(iter(targets_of(getattr(settings, group), group).values()))
    return target.split(".")[-2] if group in ("method", "model") and "." in target else short_name(target)
