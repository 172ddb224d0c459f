"""Digests of the user's own code, and what resume and compare do if it has changed."""

import importlib
import itertools
import json
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pflsim
from pflsim import cli
from pflsim.analysis.groups import group_runs
from pflsim.analysis.report.details import incidents
from pflsim.analysis.runs import read_run
from pflsim.config.components import target_of
from pflsim.config.settings import Eval, Optimizer, Settings, TaskChoice
from pflsim.errors import SettingsError
from pflsim.records.own_code import DOMAINS, code_digests, module_file

NUMBERS = itertools.count()
FILES = {
    "net.py": '''
"""A model."""
from torch import nn
import numpy as np
from .tools import activation
from . import WIDTH

class Small(nn.Module):
    """A layer."""
    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.a, self.fc = nn.Linear(64, WIDTH), nn.Linear(WIDTH, num_classes)

    def forward(self, x):
        return self.fc(activation(self.a(x.flatten(1))))
''',
    "__init__.py": "WIDTH = 8\n",
    "tools/__init__.py": "from .deep import activation\n",
    "tools/deep.py": "def activation(x):\n    import PACKAGE.lazy\n    return PACKAGE.lazy.relu(x)\n",
    "lazy.py": "from torch.nn.functional import relu\n",
    "unused.py": "A = 1\n",
    "broken.py": "def (",
    "method.py": '''
from dataclasses import dataclass
from lightning_modules.base import ClientModule
from pflsim.servers.fedavg import FedAvg

class Client(ClientModule):
    pass

class Server(FedAvg):
    """A server."""
''',
    "server.py": "from pflsim.servers.fedavg import FedAvg\n\nclass Server(FedAvg):\n    pass\n",
    "rows.py": '''
from pflsim.data.partition.rules import iid
from pflsim.data.sources import library

def load(*, noise: float = 0.0):
    return library.digits()

def rule(dataset, clients, seed):
    return iid(dataset, clients, seed)
''',
}  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of the user's in the working folder; its name."""
    name = f"own_code_{next(NUMBERS)}"
    for file, text in FILES.items():
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).write_text(text.replace("PACKAGE", name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return name


def edit(mine: str, file: str, old: str, new: str) -> None:
    """Change a file of the package, which is imported again then."""
    path = Path(mine, file)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    for module in [each for each in sys.modules if each.partition(".")[0] == mine]:
        del sys.modules[module]
    importlib.invalidate_caches()


def using(mine: str) -> Settings:
    """Settings that name a model, a method's client and server, data and a partition of the package."""

    def target(name: str) -> dict[str, Any]:
        return {"_target_": f"{mine}.{name}"}

    method = {"client": target("method.Client"), "server": target("server.Server")}
    data, partition = target("rows.load"), target("rows.rule")
    return Settings(method=method, model=target("net.Small"), data=data, partition=partition)


CHANGES = [
    ("net.py", "self.fc(", "2 * self.fc(", ["net"]),
    ("net.py", "int = 10", "int = 12", ["net"]),
    ("__init__.py", "8", "9", [""]),
    ("tools/deep.py", "relu(x)", "relu(x) * 3", ["tools.deep"]),
    ("tools/__init__.py", ".deep", ".deep.", None),
    ("lazy.py", "relu", "gelu as relu", ["lazy"]),
    ("method.py", "    pass", "    factor = 2", ["method"]),
    ("server.py", "    pass", "    momentum = 2", ["server"]),
    ("rows.py", "seed)\n", "seed + 1)\n", ["rows"]),
    ("rows.py", "library.digits()", "library.digits() or 0", ["rows"]),
    ("rows.py", "0.0", "0", ["rows"]),
    ("net.py", '"""A layer."""', '"""Another\n    docstring."""', []),
    ("net.py", '"""A model."""', "# no docstring", []),
    ("net.py", "self.fc(activation(", "(self . fc)(  # the head\n            activation(", []),
    ("net.py", "10):", "10\n    ):", []),
    ("method.py", '"""A server."""', "'''The server.'''\n    ", []),
    ("lazy.py", "relu\n", "(\n    relu,\n)\n", []),
    ("unused.py", "1", "2", []),
    ("broken.py", "(", "((", []),
]


@pytest.mark.parametrize(("file", "old", "new", "changed"), CHANGES)
def test_what_changes_a_digest(file: str, old: str, new: str, changed: list[str] | None, mine: str) -> None:
    """Code of any component and what it imports does, its form does not."""
    before = code_digests(using(mine))
    names = ["", ".lazy", ".method", ".net", ".rows", ".server", ".tools", ".tools.deep"]
    assert [*before] == [f"{mine}{name}" for name in names]
    edit(mine, file, old, new)
    after = code_digests(using(mine))
    if changed is None:  # it cannot be imported any more
        assert before.keys() - after.keys() == {f"{mine}.tools", f"{mine}.tools.deep", f"{mine}.lazy"}
        return
    differing = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert differing == {f"{mine}.{name}".rstrip(".") for name in changed}


@pytest.mark.parametrize(
    "settings",
    [
        lambda mine: Settings(task=TaskChoice(loss=f"{mine}.lazy.relu")),
        lambda mine: Settings(optimizer=Optimizer(name=f"{mine}.lazy.relu")),
        lambda mine: Settings(eval=Eval(metrics=["auroc", {f"{mine}.lazy.relu": {}}])),
        lambda mine: Settings(model={"_target_": "torch.nn.Linear", "variants": [{"_target_": f"{mine}.lazy.relu"}]}),
        lambda mine: Settings(model={"_target_": "torch.nn.Linear", "common": {"_target_": f"{mine}.lazy.relu"}}),
        lambda mine: Settings(shift={"_target_": f"{mine}.lazy.Outer.rule"}),
        lambda mine: Settings(split={"_target_": f"{mine}.lazy.rule"}, data={"_target_": "x", "sources": 3}),
        lambda mine: Settings(data={"_target_": DOMAINS, "sources": ["mnist", f"{mine}.lazy.load", {"usps": {}}]}),
    ],
)
def test_all_settings_that_name_code_count(settings: Callable[[str], Settings], mine: str) -> None:
    assert [*code_digests(settings(mine))] == [mine, f"{mine}.lazy"]


@pytest.mark.parametrize("name", ["torch.nn.Linear", "json.loads", "pflsim.data.shifts.none", "nowhere.to.be", "yaml"])
def test_code_of_others_does_not_count(name: str) -> None:
    assert code_digests(Settings(task=TaskChoice(loss=name))) == {}


def test_a_file_is_found_without_an_import(mine: str) -> None:
    edit(mine, "__init__.py", "WIDTH", "raise ValueError\nWIDTH")
    assert module_file(f"{mine}.tools.deep") == Path.cwd() / mine / "tools/deep.py"
    assert module_file(f"{mine}.tools.no") is module_file("") is module_file(f"{mine}.tools.deep.no") is None


CELL = '''
def scaled(x):
    return x * 2

class Base:
    def forward(self, x):
        return scaled(x)

class Net(Base):
    """A net."""
    width = 3
    def __init__(self):
        self.a = 1

def outer(x):
    return lambda y: Net()
'''


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("self.a = 1", "self.a = 2", ["Net"]),
        ("width = 3", "width = 4", ["Net"]),
        ("x * 2", "x * 3", ["scaled"]),
        ("return scaled(x)", "return scaled(x) + 1", ["Base"]),
        ('"""A net."""', "", []),
        ("self.a = 1", "self.a = (1)  # one", []),
        ("lambda y: Net()", "3", []),
    ],
)
def test_objects_of_a_notebook(old: str, new: str, changed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their cells have no file; the functions and bases that a class uses count, other definitions do not."""

    def run(text: str) -> dict[str, str]:
        file, scope = f"<cell {next(NUMBERS)}>", sys.modules["__main__"].__dict__
        monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(True), file))
        for name in ("scaled", "Base", "Net", "outer"):
            monkeypatch.setitem(scope, name, None)
        exec(compile(text, file, "exec"), scope)
        return code_digests(Settings(model={"_target_": target_of(scope["Net"])}))

    before, after = run(CELL), run(CELL.replace(old, new))
    assert [*before] == [f"__main__.{name}" for name in ("Base", "Net", "scaled")]
    assert [name for name in before if before[name] != after[name]] == [f"__main__.{name}" for name in changed]


RUN = ["data=digits", "clients=3", "method=fedavg", "executor=inline", "rounds=1", "progress=none", "partition=iid"]


def run(mine: str, folder: str, *more: str) -> int:
    return cli.main([*RUN, f"model={mine}.net.Small", f"run_dir={folder}", *more])


@pytest.mark.slow
def test_resume_asks_for_a_change_of_code(mine: str, refused: Callable[..., str], capsys: Any) -> None:
    """Once: the digests of the last session count."""
    assert run(mine, "run") == 0
    edit(mine, "net.py", '"""A layer."""', "")
    assert cli.main(["resume=run", "rounds=2"]) == 0
    edit(mine, "tools/deep.py", "relu(x)", "relu(x) * 3")
    for more in ([], ["changed_code=false"]):
        message = refused("resume=run", "rounds=3", *more)
        assert str(Path(mine, "tools/deep.py")) in message and "changed_code=true" in message
        assert not Path("run/environment-3.json").exists()
    assert "perhaps" in refused("resume=run", "changed_code=perhaps")
    assert "changed_code" in refused(*RUN, "changed_code=true")
    with pytest.raises(SettingsError, match="changed_code=true"):
        pflsim.resume("run", rounds=3)
    capsys.readouterr()
    assert read_run(Path("run")).own_code[f"{mine}.tools.deep"].count("+") == 0
    assert pflsim.resume("run", rounds=3, changed_code=True).done == 3
    assert "deep.py" in capsys.readouterr().err
    assert cli.main(["resume=run", "rounds=4"]) == 0
    (found,) = incidents([read_run(Path("run"))])
    assert f"{mine}.tools.deep" in found[1][-1] and f"{mine}.net" not in found[1][-1]


@pytest.mark.slow
def test_two_states_of_code_are_no_seeds_of_one_method(mine: str) -> None:
    """A run without digests, or of another module, is where it was."""
    assert run(mine, "a") == run(mine, "b", "seed=1") == 0
    edit(mine, "tools/deep.py", "relu(x)", "relu(x) * 3")
    assert run(mine, "c", "seed=2") == 0
    runs = [read_run(Path(folder)) for folder in "abc"]
    assert [group.seeds for group in group_runs(runs[:2])] == [(0, 1)]
    first, second = group_runs(runs)
    assert (first.seeds, second.seeds) == ((0, 1), (2,)) and first.label != second.label
    assert f"code.{mine}.tools.deep=" in first.label and f"{mine}.net" not in first.label + second.label
    environment = json.loads(Path("c/environment.json").read_text())
    Path("c/environment.json").write_text(json.dumps({**environment, "own_code": {}}))
    assert [group.seeds for group in group_runs([*runs[:2], read_run(Path("c"))])] == [(0, 1, 2)]
    assert cli.main(["resume=b", "rounds=2", "changed_code=true"]) == 0
    edit(mine, "tools/deep.py", "relu(x) * 3", "relu(x)")
    assert run(mine, "d", "seed=3", "rounds=2") == 0
    assert [group.seeds for group in group_runs(map(read_run, (Path("b"), Path("d"))))] == [(1,), (3,)]
