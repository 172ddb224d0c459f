"""Writes the docstrings of installed packages to a CSV file, for task=language_model: each package is a client.

Usage: python examples/docstrings.py INTO.csv [PACKAGE ...]
"""

import ast
import csv
import sys
from collections.abc import Iterator
from hashlib import blake2b
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = (
    "lightning", "matplotlib", "networkx", "numpy", "pandas", "pydantic", "ray", "rich", "scipy", "statsmodels",
    "sympy", "torch",
)  # fmt: skip
"""Import names; those that are not installed are left out. Their authors write unlike one another."""
MOST, SHORTEST = 150, 100
"""Docstrings of a package at most, and the characters of one at least."""


def docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a source file, which is not imported."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return  # a template, or an example of what is wrong
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def rows(package: str) -> list[tuple[str, str, str]]:
    """Return package, version and text of `MOST` docstrings: those of files in an order that their names shuffle."""
    spec = find_spec(package)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    names = {str(file.relative_to(folder)): file for folder in folders for file in folder.rglob("*.py")}
    found: dict[str, None] = {}  # in order, each once
    for name in sorted(names, key=lambda name: blake2b(name.encode()).digest()):
        found |= dict.fromkeys(text for text in docstrings(names[name]) if len(text) >= SHORTEST)
        if len(found) >= MOST:
            break
    own = found and version(packages_distributions()[package][0])
    return [(package, own, text) for text in [*found][:MOST]]


def main(into: str, *packages: str) -> None:
    """Write the file."""
    with Path(into).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("package", "version", "text"))
        for package in packages or PACKAGES:
            own = rows(package)
            table.writerows(own)
            print(f"{package:12} {len(own):4} docstrings, {sum(len(text) for *_, text in own):,} characters")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
