"""The user's own code: the modules that the settings name, and the digests that tell whether it has changed."""

import ast
import hashlib
import inspect
import linecache
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from itertools import accumulate
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from pflsim.config.components import COMPONENTS, SIDES, TARGET, common_of, kept_object, variants_of
from pflsim.config.names import PACKAGES
from pflsim.config.plugins import plugins
from pflsim.config.settings import Settings

INSTALLED = {"site-packages", "dist-packages"}
NO_FILES = {*PACKAGES, *sys.stdlib_module_names, "__main__"}
"""Modules that are not the user's, and the program or notebook, whose objects are digested one by one."""
DOMAINS = "pflsim.data.sources.domains.load"
NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def module_file(module: str) -> Path | None:
    """Return the Python file of a module, without importing it; None if there is no such module."""
    spec, names = None, [*accumulate(module.split("."), "{}.{}".format)]
    with suppress(ImportError, ValueError):
        spec = find_spec(names[0])
    for name in names[1:]:
        spec = PathFinder.find_spec(name, spec.submodule_search_locations or []) if spec else None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def own_modules(settings: Settings) -> dict[str, Path]:
    """Return the files of the modules that targets name, by module, without those of pflsim and installed packages."""
    modules = {target.rpartition(".")[0] for target in _targets(settings) if target.partition(".")[0] not in PACKAGES}
    files = {module: file for module in sorted(modules) if (file := module_file(module))}
    return {module: file for module, file in files.items() if INSTALLED.isdisjoint(file.parts)}


def code_digests(settings: Settings) -> dict[str, str]:
    """Return the digests of the code that the settings name, without that of pflsim and installed packages.

    Packages that declare entry points of pflsim are the user's.

    Returns:
        By module: those that targets name, and those that they import. By `__main__.NAME`: the classes and functions of
        a program or notebook, and those that they use; without those that have no source, as in an interpreter.
    """
    found: dict[str, str] = {}
    for target in _targets(settings):
        value = kept_object(target, TARGET)
        _add_modules(target, found) if value is None else _add_object(value, found)
    return {name: digest for name, digest in sorted(found.items()) if digest}


def _targets(settings: Settings) -> list[str]:
    """Return the dotted names of classes and functions that compute or measure something."""
    components: list[Mapping[str, Any]] = [getattr(settings, name) for name in COMPONENTS]
    components += [settings.method.get(side) or {} for side in SIDES]
    components += [*variants_of(settings.model), common_of(settings.model)]
    entries = [*settings.eval.metrics, *(settings.data["sources"] if settings.data.get(TARGET) == DOMAINS else ())]
    names = [name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)]
    names += [name for part in settings.uplink.get("parts", ()) for name in part]
    names += [settings.task.loss, settings.eval.primary, settings.optimizer.name]
    return [name for name in (*names, *(node.get(TARGET) for node in components)) if name and "." in name]


def _add_modules(target: str, found: dict[str, str]) -> None:
    """Add the digests of the modules in a dotted name, as far as they are the user's, and of those they import."""
    for module in accumulate(target.split("."), "{}.{}".format):
        file = None if module in NO_FILES else module_file(module)
        own = module.partition(".")[0] in {plugin.target.partition(".")[0] for plugin in plugins()}
        installed = file and not INSTALLED.isdisjoint(file.parts) and not own
        if module in NO_FILES or installed:
            return
        if file and module not in found:
            found[module] = ""
            with suppress(SyntaxError, ValueError):  # Python cannot import it either
                tree = ast.parse(file.read_bytes())
                found[module] = _digest([tree])
                _add_imported([tree], module if file.name == "__init__.py" else module.rpartition(".")[0], found)


def _add_imported(trees: Iterable[ast.AST], package: str, found: dict[str, str]) -> None:
    """Add the digests of the modules that code of a package imports."""
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)):
        origin = ""
        if isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # from above the outermost package
                origin = resolve_name("." * node.level + (node.module or ""), package) + "."
        for alias in node.names:
            _add_modules(origin + alias.name, found)


def _add_object(value: Any, found: dict[str, str]) -> None:
    """Add the digest of a class or function of a program or notebook, or else of its module; and of what it uses."""
    if isinstance(value, ModuleType):
        return _add_modules(value.__name__, found)
    value = value if isinstance(value, type | FunctionType) else type(value)
    module, name = str(value.__module__), value.__qualname__
    if f"{module}:{name}" in found:
        return None
    found[f"{module}:{name}"] = ""
    used = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    if module != "__main__":
        _add_modules(module, found)
    else:
        nodes, scope = _source(value), vars(sys.modules[module])
        found[f"{module}.{name}"] = _digest(nodes) if nodes else ""
        _add_imported(nodes, scope.get("__package__") or "", found)
        names = {node.id for tree in nodes for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used += [*getattr(value, "__bases__", ()), *(scope[each] for each in names & scope.keys())]
    for each in used:
        _add_object(each, found)


def _source(value: Any) -> list[ast.AST]:
    """Return the definitions of a class or function of the program; none if its cell or file cannot be found.

    `inspect` finds no classes of notebooks. Their methods know the cell.
    """
    members = vars(value).values() if isinstance(value, type) else [value]
    codes = [inspect.unwrap(each).__code__ for each in members if isinstance(each, FunctionType)]
    program = getattr(sys.modules["__main__"], "__file__", None)
    for path in dict.fromkeys((*(code.co_filename for code in codes), program)):
        with suppress(SyntaxError, ValueError):
            nodes = [*ast.walk(ast.parse("".join(linecache.getlines(path or ""))))]
            named = [n for n in nodes if isinstance(n, NAMED) and n.name == value.__name__]
            lambdas = [n for n in nodes if isinstance(n, ast.Lambda) and n.lineno == codes[0].co_firstlineno]
            if own := lambdas if value.__name__ == "<lambda>" else named:
                return [*own]
    return []


def _digest(trees: Iterable[ast.AST]) -> str:
    return hashlib.sha256(repr([*map(_plain, trees)]).encode()).hexdigest()[:16]


def _plain(node: Any) -> Any:
    """Return a syntax tree as lists, without docstrings, positions and the empty fields of some versions of Python."""
    if isinstance(node, list):
        texts = [isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) and n.value.value for n in node]
        return [_plain(each) for each, text in zip(node, texts, strict=True) if not isinstance(text, str)]
    if isinstance(node, ast.AST):
        fields = [(name, _plain(value)) for name, value in ast.iter_fields(node) if name != "kind"]
        return [type(node).__name__, *(field for field in fields if field[1] not in (None, []))]
    return node
