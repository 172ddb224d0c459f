"""The settings of a class or function, read from its source without importing it.

A setting is a keyword-only parameter. Reading the source keeps the command line quick (nothing of torch is loaded to
check a key) and free of side effects.
"""

from __future__ import annotations

import ast
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from pflsim.config.names import nearest
from pflsim.errors import SettingsError

Callable = ast.FunctionDef | ast.ClassDef
BASIC = {"int": int, "float": float, "str": str, "bool": bool, "Any": Any}
GENERIC = {"list": list, "tuple": tuple, "dict": dict, "List": list, "Tuple": tuple, "Dict": dict, "Sequence": list}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One setting of a callable.

    Args:
        annotation: its type: int, float, str, bool, None, list[...], tuple[...], dict[...], Literal[...], and unions.
        default: the literal in the signature; None and meaningless where `required`.
        required: whether a value must be given.
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


def signature_of(target: str) -> dict[str, Parameter]:
    """Read the keyword-only parameters of a class or function, in the order of its signature.

    A class without an `__init__` of its own has that of its bases, the first one found.

    Args:
        target: "package.module.Name".

    Raises:
        SettingsError: there is no such target, or a parameter has no type, or a type or a default that a setting cannot
            have.
    """
    found = find(target)
    if found is None or not isinstance(found[1], Callable):
        raise SettingsError(unknown_target(target))
    source, function = _function(*found)
    if function is None:
        return {}
    arguments = function.args
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {a.arg: _parameter(source, target, a, default) for a, default in pairs}


def gives(target: str) -> frozenset[str] | None:
    """What a call of a class or function gives, by the full names of its type and of that type's bases.

    Of a function it is the type that the signature says it returns, of a class the class itself. A type with arguments
    is written out: "list[numpy.ndarray]".

    Args:
        target: "package.module.Name".

    Returns:
        The names, without the bases of what is not written in Python; empty where a function does not say what it
        returns; None where a type or a base is computed.

    Raises:
        SettingsError: there is no such target.
    """
    found = find(target)
    if found is None or not isinstance(found[1], Callable):
        raise SettingsError(unknown_target(target))
    source, node = found
    if isinstance(node, ast.ClassDef):
        return _lineage(source, node)
    returned = node.returns if isinstance(node, ast.FunctionDef) else None
    return frozenset() if returned is None else _names(source, returned)


def choices_of(annotation: Any) -> tuple[Any, ...] | None:
    """The values a type lists (`Literal`, alone or with None), or None where it lists none."""
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return None
    chosen: list[Any] = []
    for member in typing.get_args(annotation):
        values = (None,) if member is type(None) else choices_of(member)
        if values is None:
            return None
        chosen.extend(values)
    return tuple(chosen)


def find(dotted: str) -> tuple[Source, ast.AST] | None:
    """Find where a dotted name is defined, through imports, or None."""
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        source = find_source(".".join(parts[:length]))
        if source is not None:
            return _locate(source, parts[length:])
    return None


def find_source(module: str) -> Source | None:
    """Read the source of a module, without importing it or its packages; None where there is none. Python's own modules
    are never read: nothing in them is a part, and `typing` is long.
    """
    if module.partition(".")[0] in sys.stdlib_module_names:
        return None
    places: Sequence[str] | None = None
    path = None
    for part in module.split("."):
        if not part.isidentifier():
            return None
        spec = PathFinder.find_spec(part, places) or (_other_finders(part) if places is None else None)
        if spec is None:
            return None
        places, path = list(spec.submodule_search_locations or ()), spec.origin
    if path is None or not path.endswith(".py"):
        return None
    return Source(module, Path(path), _parse(path, Path(path).stat().st_mtime_ns))


def unknown_target(target: str) -> str:
    """Say that a target does not exist, with the nearest names that do."""
    module, _, name = target.rpartition(".")
    if module.partition(".")[0] in sys.stdlib_module_names:
        return (
            f"_target_ {target!r}: nothing in Python's own modules is a part; a target is written package.module.Name"
        )
    if not module:
        return f"_target_ {target!r}: a target is written package.module.Name"
    source = find_source(module)
    if source is not None:
        names = [s.name for s in _statements(source.tree.body) if isinstance(s, Callable) and s.name[:1] != "_"]
        return f"_target_ {target!r}: module {module} has no class or function {name!r}; {nearest(name, names)}"
    package, _, last = module.rpartition(".")
    parent = find_source(package) if package else None
    if parent is None or parent.path.name != "__init__.py":
        return f"_target_ {target!r}: there is no module {module!r}; a target is written package.module.Name"
    modules = [p.stem for p in parent.path.parent.glob("*.py") if p.stem != "__init__"]
    return f"_target_ {target!r}: there is no module {last!r} in {package}; {nearest(last, modules)}"


def _other_finders(part: str) -> Any:
    """Ask the import system for a top-level name (editable installs have a finder of their own); imports nothing."""
    for finder in sys.meta_path:
        spec = finder.find_spec(part, None) if finder is not PathFinder else None
        if spec is not None:
            return spec
    return None


@lru_cache(maxsize=256)
def _parse(path: str, changed: int) -> ast.Module:
    del changed  # part of the key only
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"), filename=path)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read as Python: {error}") from error


def _statements(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The statements of a module, with those inside `if` and `try`."""
    found: list[ast.stmt] = []
    for statement in body:
        found.append(statement)
        if isinstance(statement, ast.If | ast.Try):
            found.extend(_statements([*statement.body, *statement.orelse]))
    return found


def _locate(source: Source, path: Sequence[str]) -> tuple[Source, ast.AST] | None:
    """Find `path[0].path[1]...` as it is known inside a module; the last definition holds."""
    head, rest = path[0], path[1:]
    for statement in reversed(_statements(source.tree.body)):
        match statement:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) if name == head and not rest:
                return source, statement
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == head and not rest:
                return source, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name == head and not rest:
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
    """The full name of the module that a `from ... import` names."""
    if not statement.level:
        return statement.module or ""
    parts = source.name.split(".")
    package = parts if source.path.name == "__init__.py" else parts[:-1]
    base = package[: len(package) - statement.level + 1]
    return ".".join([*base, *([statement.module] if statement.module else [])])


def _function(source: Source, node: ast.AST) -> tuple[Source, ast.FunctionDef | None]:
    """The function that a call of the node runs: itself, or a class's `__init__`, own or inherited."""
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


def _names(source: Source, node: ast.expr) -> frozenset[str] | None:
    """The full names of the type that an expression means, and of its bases; None where it is computed."""
    match node:
        case ast.Constant(value=str() as text):
            return _names(source, ast.parse(text, mode="eval").body)
        case ast.Constant(value=None):
            return frozenset({"None"})
        case ast.Subscript(value=outer, slice=inner):
            elements = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return frozenset({f"{_full_name(source, outer)}[{', '.join(_full_name(source, e) for e in elements)}]"})
    path = _dotted(node)
    if not path:
        return None
    found = _locate(source, path)
    if found is not None and isinstance(found[1], ast.ClassDef):
        return _lineage(found[0], found[1])
    if found is not None and isinstance(found[1], ast.expr):
        return _names(found[0], found[1])
    return frozenset({_full_name(source, node)})


def _lineage(source: Source, node: ast.ClassDef) -> frozenset[str] | None:
    """The full names of a class and of all its bases; None where one of them is computed."""
    names = {f"{source.name}.{node.name}"}
    for base in node.bases:
        more = _names(source, base.value if isinstance(base, ast.Subscript) else base)
        if more is None:
            return None
        names |= more
    return frozenset(names)


def _full_name(source: Source, node: ast.expr) -> str:
    """The name of a type as it would be imported: `numpy.ndarray` for `np.ndarray`."""
    if isinstance(node, ast.Subscript):
        (name,) = _names(source, node) or ("",)
        return name
    path = _dotted(node)
    if not path:
        return ast.unparse(node)
    found = _locate(source, path)
    if found is not None and isinstance(found[1], ast.ClassDef):
        return f"{found[0].name}.{found[1].name}"
    return ".".join([*_imported(source, path[0]), *path[1:]])


def _imported(source: Source, head: str) -> list[str]:
    """What a name of a module was imported as, or itself."""
    for statement in reversed(_statements(source.tree.body)):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == head:
                    module = [_absolute(source, statement)] if isinstance(statement, ast.ImportFrom) else []
                    return [*module, alias.name]
    return [head]


def _dotted(node: ast.AST) -> list[str]:
    """["a", "b", "C"] for `a.b.C`, [] for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return [*head, node.attr] if head else []
    return []


def _parameter(source: Source, target: str, argument: ast.arg, default: ast.expr | None) -> Parameter:
    where = f"parameter {argument.arg!r} of {target}"
    if argument.annotation is None:
        raise SettingsError(f"{where} has no type; a setting needs one")
    annotation = _type(source, argument.annotation, where)
    if default is None:
        return Parameter(annotation, None, True)
    return Parameter(annotation, _literal(source, default, where), False)


def _literal(source: Source, node: ast.AST, where: str) -> Any:
    """The value of a default: a literal, or a constant of a module that is one."""
    try:
        return ast.literal_eval(typing.cast(ast.expr, node))
    except ValueError:
        path = _dotted(node)
        found = _locate(source, path) if path else None
        if found is None or isinstance(found[1], Callable):
            raise SettingsError(f"{where}: the default {ast.unparse(node)!r} is not a literal") from None
        return _literal(*found, where)


def _type(source: Source, node: ast.AST, where: str) -> Any:
    """The type that an annotation means."""
    match node:
        case ast.Constant(value=None):
            return type(None)
        case ast.Constant(value=str() as text):
            return _type(source, ast.parse(text, mode="eval").body, where)
        case ast.Name(id=name) if name in BASIC:
            return BASIC[name]
        case ast.Name(id=name) if name in GENERIC:
            return GENERIC[name][Any, ...] if GENERIC[name] is tuple else _generic(GENERIC[name], [])
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return typing.Union[_type(source, left, where), _type(source, right, where)]  # noqa: UP007
        case ast.Subscript(value=value, slice=inner):
            return _subscript(source, (_dotted(value) or [""])[-1], inner, where)
    path = _dotted(node)
    if path[-1:] and path[-1] in BASIC and len(path) > 1:
        return BASIC[path[-1]]
    found = _locate(source, path) if path else None
    if found is None or isinstance(found[1], Callable):
        raise SettingsError(f"{where} has the type {ast.unparse(node)!r}, which a setting cannot have")
    return _type(*found, where)


def _subscript(source: Source, name: str, inner: ast.expr, where: str) -> Any:
    items = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
    if name == "Literal":
        return Literal[tuple(_literal(source, item, where) for item in items)]
    arguments = [... if isinstance(i, ast.Constant) and i.value is Ellipsis else _type(source, i, where) for i in items]
    if name == "Optional":
        return typing.Optional[arguments[0]]  # noqa: UP007, UP045
    if name == "Union":
        return typing.Union[tuple(arguments)]  # noqa: UP007
    if name in GENERIC:
        return _generic(GENERIC[name], arguments)
    raise SettingsError(f"{where} has the type '{name}[...]', which a setting cannot have")


def _generic(kind: Any, arguments: list[Any]) -> Any:
    wanted = {list: [Any], dict: [str, Any]}
    return kind[tuple(arguments or wanted[kind])]
