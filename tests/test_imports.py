"""Imports run one way: pflsim ← lightning_modules ← ray_actors, and without cycles between the packages inside."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support import slow_except

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["pflsim", "lightning_modules", "ray_actors"]
FORBIDDEN = {
    "pflsim": {"ray", "lightning", "pytorch_lightning"},
    "lightning_modules": {"ray", "hydra", "omegaconf"},
    "ray_actors": {"hydra", "omegaconf"},
}


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


def succeeds(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


ENGINE = ", ".join(dotted(path) for path in modules("pflsim") if path.name != "__main__.py")
MISTAKES = "cli.main(['lr=0']) == cli.main(['method=no']) == 2"
LIGHT = {
    f"import {ENGINE}": "ray lightning pytorch_lightning",
    f"from pflsim import cli; assert cli.main(['--help']) == 0 and {MISTAKES}": "torch lightning ray numpy scipy",
    "from pflsim import cli; cli.main(['tune', '--help'])": "torch ray",
    "from pflsim import cli; cli.main(['compare', '--help'])": "torch numpy scipy matplotlib pandas",
    "import pflsim.records.environment as e; e.versions(), e.code(), e.machine()": "torch ray lightning",
}
"""What does not load some packages: all modules of the engine, and what has to be quick."""
NAMES = ["engine", "cli", "tune", "compare", "environment"]


@pytest.mark.parametrize(("code", "heavy"), slow_except([*LIGHT.items()][:2], LIGHT.items()), ids=NAMES)
def test_what_is_not_loaded(code: str, heavy: str) -> None:
    """What the source says also holds at run time."""
    loaded = f"import contextlib, sys\nwith contextlib.suppress(SystemExit): {code}\nfound = {heavy.split()}"
    succeeds(f"{loaded}\nsys.exit(str([name for name in found if name in sys.modules] or '') or 0)")


@pytest.mark.slow
def test_actors_start_without_what_they_do_not_need() -> None:
    """The driver starts actors before it has imported torch; a server does not need Lightning, nor a client SciPy."""
    succeeds("""
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
""")
