"""Imports run one way: pflsim ← lightning_modules ← ray_actors ← launch.py."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["pflsim", "lightning_modules", "ray_actors", "launch"]
FORBIDDEN = {
    "pflsim": {"ray", "lightning", "pytorch_lightning"},
    "lightning_modules": {"ray", "hydra", "omegaconf"},
    "ray_actors": {"hydra", "omegaconf"},
}


def imported(path: Path) -> set[str]:
    """Every top-level package a file imports, wherever in the file."""
    heads = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            heads |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            heads.add((node.module or "").split(".")[0])
    return heads


@pytest.mark.parametrize("package", ORDER[:-1])
def test_imports_run_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    above = set(ORDER[ORDER.index(package) + 1 :])
    for path in files:
        wrong = imported(path) & (above | FORBIDDEN[package])
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_the_engine_loads_neither_ray_nor_lightning() -> None:
    """What the source says also holds at run time, through every module of the engine."""
    modules = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in (ROOT / "pflsim").rglob("*.py")
        if p.name != "__main__.py"
    ]
    code = (
        f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
        "found = [m for m in ('ray', 'lightning', 'pytorch_lightning') if m in sys.modules]\n"
        "sys.exit(f'loaded: {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
