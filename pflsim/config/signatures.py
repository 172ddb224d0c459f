"""Reads the settings of a class or function from its source, without importing it.

A setting is a keyword-only parameter. The command line stays fast, because it checks settings without importing torch.
"""

from __future__ import annotations

import ast
import os
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from pflsim.config.names import nearest
from pflsim.errors import SettingsError

Definition = ast.FunctionDef | ast.ClassDef
LISTS, TUPLES, DICTS = ("list", "List", "Sequence"), ("tuple", "Tuple"), ("dict", "Dict")
BASIC: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "Any": Any}
BASIC |= dict.fromkeys(LISTS, list[Any]) | dict.fromkeys(TUPLES, tuple[Any, ...]) | dict.fromkeys(DICTS, dict[str, Any])
GENERIC: dict[str, Any] = {"Union": typing.Union}
GENERIC |= dict.fromkeys(LISTS, list) | dict.fromkeys(TUPLES, tuple) | dict.fromkeys(DICTS, dict)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One setting of a callable.

    Args:
        annotation: int, float, str, bool, None, list[...], tuple[...], dict[...], Literal[...], or a union of these.
        default: the literal in the signature; None if `required`.
        required: whether the parameter has no default.
    """

    annotation: Any
    default: Any
    required: bool


@dataclass(frozen=True, slots=True)
class Source:
    """The syntax tree of a module."""

    name: str
    path: Path
    tree: ast.Module


def signature_of(target: str, key: str = "_target_") -> dict[str, Parameter]:
    """Read the keyword-only parameters of a class or function, in the order of its signature.

    A class without its own `__init__` has the one of the first base that has one.

    Args:
        target: "package.module.Name".
        key: dotted name of the setting that holds the target, for messages.

    Raises:
        SettingsError: the target does not exist, or a parameter has no type, an unsupported type, or a default that is
            not a literal.
    """
    found = find(target)
    if found is None or not isinstance(found[1], Definition):
        raise SettingsError(unknown_target(target, key))
    source, function = _function(*found)
    if function is None:
        return {}
    arguments = function.args
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {a.arg: _parameter(source, target, a, default) for a, default in pairs}


def find(dotted: str) -> tuple[Source, ast.AST] | None:
    """Return where a dotted name is defined, following imports, or None."""
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        source = find_source(".".join(parts[:length]))
        if source is not None:
            return _locate(source, parts[length:])
    return None


def find_source(module: str) -> Source | None:
    """Read the source of a module without importing it or its packages; None if it has no Python source.

    A module that is not on the import path may be in the working directory. The standard library is never read: it
    contains no components, and `typing` is long.
    """
    if module.partition(".")[0] in sys.stdlib_module_names:
        return None
    folders: Sequence[str] | None = None
    path = None
    for part in module.split("."):
        if not part.isidentifier():
            return None
        # Editable installs have finders of their own for top-level names.
        finders = [PathFinder] if folders is not None else [PathFinder, *sys.meta_path]
        spec = next(filter(None, (finder.find_spec(part, folders) for finder in finders)), None)
        if spec is None and folders is None:
            spec = PathFinder.find_spec(part, [os.getcwd()])
        if spec is None:
            return None
        folders, path = list(spec.submodule_search_locations or ()), spec.origin
    if path is None or not path.endswith(".py"):
        return None
    return Source(module, Path(path), _parse(path, Path(path).stat().st_mtime_ns))


def unknown_target(target: str, key: str = "_target_") -> str:
    """Return the message about a target that does not exist, with the most similar names that do."""
    module, _, name = target.rpartition(".")
    source = find_source(module) if module else None
    if source is not None:
        names = [s.name for s in _statements(source.tree.body) if isinstance(s, Definition) and s.name[:1] != "_"]
        return f"{key}={target}: module {module} has no class or function {name!r}; {nearest(name, names)}"
    package, _, last = module.rpartition(".")
    parent = find_source(package) if package else None
    if parent is None or parent.path.name != "__init__.py":
        return f"{key}={target}: expected package.module.Name of a module outside the standard library"
    modules = [p.stem for p in parent.path.parent.glob("*.py") if p.stem != "__init__"]
    return f"{key}={target}: there is no module {last!r} in {package}; {nearest(last, modules)}"


@lru_cache(maxsize=256)
def _parse(path: str, changed: int) -> ast.Module:
    del changed  # part of the key only
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"), filename=path)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read as Python: {error}") from error


def _statements(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a module, including those inside `if` and `try`."""
    found: list[ast.stmt] = []
    for statement in body:
        found.append(statement)
        if isinstance(statement, ast.If | ast.Try):
            found.extend(_statements([*statement.body, *statement.orelse]))
    return found


def _locate(source: Source, path: Sequence[str]) -> tuple[Source, ast.AST] | None:
    """Return the definition of `path[0].path[1]...` inside a module; the last one wins."""
    head, rest = path[0], path[1:]
    for statement in reversed(_statements(source.tree.body)):
        match statement:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) if name == head and not rest:
                return source, statement
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name == head and not rest:
                return source, value
            case ast.ImportFrom(names=names):
                for alias in names:
                    if (alias.asname or alias.name) == head:
                        return find(".".join([_absolute(source, statement), alias.name, *rest]))
            case ast.Import(names=names):
                for alias in names:
                    if (alias.asname or alias.name.partition(".")[0]) == head:
                        return find(".".join([alias.name if alias.asname else head, *rest]))
    return None


def _absolute(source: Source, statement: ast.ImportFrom) -> str:
    """Return the full name of the module of a `from ... import`."""
    if not statement.level:
        return statement.module or ""
    parts = source.name.split(".")
    package = parts if source.path.name == "__init__.py" else parts[:-1]
    base = package[: len(package) - statement.level + 1]
    return ".".join([*base, *([statement.module] if statement.module else [])])


def _function(source: Source, node: ast.AST) -> tuple[Source, ast.FunctionDef | None]:
    """Return the function that a call runs: the function itself, or the `__init__` of a class or its bases."""
    if isinstance(node, ast.FunctionDef):
        return source, node
    assert isinstance(node, ast.ClassDef)
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return source, statement
    for base in node.bases:
        path = _dotted(base.value if isinstance(base, ast.Subscript) else base)
        found = _locate(source, path) if path else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            inherited = _function(*found)
            if inherited[1] is not None:
                return inherited
    return source, None


def _dotted(node: ast.AST) -> list[str]:
    """Return ["a", "b", "C"] for `a.b.C`, [] for other expressions."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return [*head, node.attr] if head else []
    return []


def _parameter(source: Source, target: str, argument: ast.arg, default: ast.expr | None) -> Parameter:
    where = f"parameter {argument.arg!r} of {target}"
    if argument.annotation is None:
        raise SettingsError(f"{where} has no type; annotate it")
    annotation = _type(source, argument.annotation, where)
    if default is None:
        return Parameter(annotation, None, True)
    return Parameter(annotation, _literal(source, default, where), False)


def _literal(source: Source, node: ast.AST, where: str) -> Any:
    """Return the value of a default: a literal, or a module's constant that is a literal."""
    try:
        return ast.literal_eval(typing.cast(ast.expr, node))
    except ValueError:
        path = _dotted(node)
        found = _locate(source, path) if path else None
        if found is None or isinstance(found[1], Definition):
            raise SettingsError(f"{where}: the default {ast.unparse(node)!r} is not a literal") from None
        return _literal(*found, where)


def _type(source: Source, node: ast.AST, where: str) -> Any:
    """Return the type of an annotation."""
    match node:
        case ast.Constant(value=None):
            return type(None)
        case ast.Constant(value=value) if value is Ellipsis:
            return value
        case ast.Constant(value=str() as text):
            return _type(source, ast.parse(text, mode="eval").body, where)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return typing.Union[_type(source, left, where), _type(source, right, where)]  # noqa: UP007
        case ast.Subscript(value=value, slice=inner):
            name, items = _dotted(value)[-1:], inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if name == ["Literal"]:
                return Literal[tuple(_literal(source, item, where) for item in items)]
            kinds = tuple(_type(source, item, where) for item in items)
            if name == ["Optional"]:
                return typing.Optional[kinds[0]]  # noqa: UP007, UP045
            if name and name[0] in GENERIC:
                return GENERIC[name[0]][kinds]
    path = _dotted(node)
    if path and path[-1] in BASIC:
        return BASIC[path[-1]]
    found = _locate(source, path) if path else None
    if found is None or isinstance(found[1], Definition):
        raise SettingsError(f"{where} has the type {ast.unparse(node)!r}, which a setting cannot have")
    return _type(*found, where)
