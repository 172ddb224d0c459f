"""Shape annotations are checked while tests run; one Ray serves the whole session."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    from ray_actors.resources import ActorPool

os.environ.setdefault("RAY_worker_niceness", "0")  # or Ray's actors get no CPU beside other tests
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and tables are as wide as the terminal
hypothesis.settings.register_profile("pflsim", deadline=None)  # tests run beside other work
hypothesis.settings.load_profile("pflsim")
install_import_hook(["pflsim.fusion", "lightning_modules.losses"], "beartype.beartype")


@pytest.hookimpl(optionalhook=True)  # also without pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many processes as CPUs, up to four, and one more for slow tests: those that start programs mostly wait."""
    return min(len(os.sched_getaffinity(0)) + (config.option.markexpr != "not slow"), 4)


def pytest_collection() -> None:
    """Import Lightning as the command line does, which takes half of the time."""
    importlib.import_module("lightning_modules.quick_import")


def pytest_collection_finish() -> None:
    """Exempt what was imported from the garbage collector."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the tests over the processes of pytest-xdist: those with Ray run one after the other.

    Slow tests that start programs with a Ray of their own mostly wait, so they are a second group beside the first.
    """
    for item in items:
        pool, slow = "pool" in getattr(item, "fixturenames", ()), item.get_closest_marker("slow")
        if pool or item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray" if pool or not slow else "ray-programs"))


DRAWN = {
    "curves", "data_splits", "diagnostics_of_methods", "explicit_partition", "figures", "matrices", "shifts",
    "torch_defaults", "tracking",
}  # fmt: skip
"""Files with tests of pictures."""
MEASURED = {"limits", "tracking"}
"""Files with tests of the memory in use, and of the commit."""


@cache
def loader() -> Callable[..., object]:
    """What loads the data sets of scikit-learn, each of which is read once."""
    from pflsim.data.sources import scikit_learn

    return cache(scikit_learn._load)


@pytest.fixture(autouse=True, scope="module")
def short_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs in this process leave out what would take a short one half of its time, where it is not in question.

    They do not draw what is in their pictures, do not wait for the disk, ask git once, read small data once, and do
    not add up the memory of all processes. They do not say what takes long, which depends on the machine.
    """
    from pflsim.records import environment

    name = request.path.stem.removeprefix("test_")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr("pflsim.progress.FIRST", 1e6)
        patch.setattr("pflsim.data.sources.scikit_learn._load", loader())
        if name not in DRAWN:
            patch.setattr("matplotlib.figure.Figure.draw", lambda figure, renderer: None)
        if name not in MEASURED:
            patch.setattr("pflsim.records.tracker.held_mb", lambda: 100.0)
            patch.setattr(environment, "_git", cache(environment._git))
        yield


@pytest.fixture
def double() -> Iterator[None]:
    """Modules are built in float64."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls the command line with what must be refused, and returns the one line that says why."""
    from pflsim import cli

    def refuse(*words: str) -> str:
        capsys.readouterr()
        assert cli.main([*words]) == 2
        said = capsys.readouterr()
        (line,) = said.err.splitlines()
        assert not said.out
        return line

    return refuse


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working directory and the first to import from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def mine(here: Path) -> Iterator[Path]:
    """The working directory, from which `mine` is imported: the examples of docs/add-a-method.md."""
    from documents import ROOT, write_files

    write_files(ROOT / "docs" / "add-a-method.md", here)
    yield here
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def pool() -> Iterator[ActorPool]:
    """Actors on a small Ray with pretended CPUs and GPUs, for all tests that need one; used again and again."""
    from ray_actors import cluster
    from ray_actors.resources import ActorPool

    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (here, os.environ.get("PYTHONPATH")) if p)  # for `support`
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = cluster.start(cpus=8, gpus=2, store_mb=100)
        made = ActorPool()
        yield made
        made.close()
        cluster.stop(folder)
