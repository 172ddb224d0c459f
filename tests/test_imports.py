"""Imports run one way: pflsim ← lightning_modules ← ray_actors, and without cycles between the packages inside."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["pflsim", "lightning_modules", "ray_actors"]
FORBIDDEN = {
    "pflsim": {"ray", "lightning", "pytorch_lightning"},
    "lightning_modules": {"ray", "hydra", "omegaconf"},
    "ray_actors": {"hydra", "omegaconf"},
}
MAX_ENTRIES = {"pflsim": 16, "lightning_modules": 21, "ray_actors": 12}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names if _is_module(node.module, alias.name))


def _is_module(package: str | None, name: str) -> bool:
    path = ROOT / (package or "").replace(".", "/") / name
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package: str) -> None:
    files = modules(package)
    assert files
    above = set(ORDER[ORDER.index(package) + 1 :]) | {"launch"}
    for path in files:
        heads = {name.split(".")[0] for name in imported(path)}
        if package == "pflsim" and path.parent.name != "config":
            assert not heads & {"hydra", "omegaconf"}, f"{path.relative_to(ROOT)}: only pflsim.config knows Hydra"
        wrong = heads & (above | FORBIDDEN[package])
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("depth", [2, None])
def test_no_import_cycles(depth: int | None) -> None:
    """Neither between the entries at the top of each package nor between modules."""
    edges: dict[str, set[str]] = {}
    for package in ORDER:
        for path in modules(package):
            own = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").split(".")
            for name in imported(path):
                other = name.split(".")
                if other[0] in ORDER and other[:depth] != own[:depth]:
                    edges.setdefault(".".join(own[:depth]), set()).add(".".join(other[:depth]))
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("package", ORDER)
def test_few_entries_at_the_top(package: str) -> None:
    entries = [p.name for p in (ROOT / package).iterdir() if not p.name.startswith("__") and p.suffix != ".typed"]
    assert len(entries) <= MAX_ENTRIES[package], entries


@pytest.mark.parametrize("package", ORDER)
def test_every_folder_says_what_belongs_there(package: str) -> None:
    for folder in {path.parent for path in modules(package)}:
        init = folder / "__init__.py"
        assert init.exists() and ast.get_docstring(ast.parse(init.read_text())), folder.relative_to(ROOT)


def test_the_engine_loads_neither_ray_nor_lightning() -> None:
    """What the source says also holds at run time, through every module of the engine."""
    names = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in modules("pflsim")
        if p.name != "__main__.py"
    ]
    code = (
        f"import importlib, sys\nfor m in {names!r}: importlib.import_module(m)\n"
        "found = [m for m in ('ray', 'lightning', 'pytorch_lightning') if m in sys.modules]\n"
        "sys.exit(f'loaded: {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_actors_start_without_what_they_do_not_need() -> None:
    """The driver starts actors before it has imported torch; a server does not need Lightning, nor a client SciPy."""
    code = """
import sys
def loaded(*names): return [name for name in names if name in sys.modules]
import ray_actors.cluster
assert not loaded("torch", "numpy"), loaded("torch", "numpy")
from ray_actors.server_actor import ServerActor
ServerActor()
assert not loaded("lightning"), loaded("lightning")
from ray_actors.client_actor import ClientActor
ClientActor()
import torch
from lightning_modules.lockstep.recorder import record
record(lambda a: [torch.func.vmap(torch.sum)(a)], [torch.zeros(2, 3)])
unused = "scipy", "matplotlib", "torchvision", "sklearn", "torch._dynamo", "pydantic", "omegaconf"
assert not loaded(*unused), loaded(*unused)
import torchmetrics
assert torchmetrics.Accuracy(task="multiclass", num_classes=2) is not None
assert torch._dynamo.config.__file__
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
