"""The command line, in this process, with the run itself replaced."""

import importlib
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from support import settings_of, slow_except

from lightning_modules.contract import command
from pflsim import cli
from pflsim.commands import sweep
from pflsim.commands.overrides import values_of
from pflsim.config import compose
from pflsim.config.compose import CONFIGS
from pflsim.config.settings import Settings
from pflsim.records.folder import create_run_folder
from pflsim.records.saved_settings import run_folder
from pflsim.records.tracker import Tracker
from pflsim.servers.base import ServerRule
from pflsim.terminal.exit_status import DEBUG

NUMBERS = itertools.count()
COMPONENTS = """
    from typing import Literal
    Size = int | float | str
    def load(*, root: str | None = None, size: Size = 3, shape: tuple[int, ...] = (1, 2), flag: bool = False): ...
    class Client:
        def __init__(self, net, *, lam: float = 1.0, alpha: float, unit: Literal["module", "tensor"]): ...
    class Server:
        def __init__(self, *, alpha: float = 5.0, unit: Literal["module", "tensor"] = "module", must: int): ...
"""


def replace_runner(monkeypatch: pytest.MonkeyPatch, run: Callable[[Settings], None]) -> None:
    importlib.import_module("pflsim.commands.resume")  # or it would take the fake for later tests
    made = {"run": lambda settings, callbacks: run(settings) or Path("none"), "check": lambda settings, kept: None}
    fake = nullcontext(SimpleNamespace(**made))
    monkeypatch.setattr(sweep, "new_runner", lambda first, own_process: fake)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that were run."""
    found: list[Settings] = []
    replace_runner(monkeypatch, found.append)
    return found


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config folder of the user's, with a method and data of their own."""
    name = f"mine_{next(NUMBERS)}"
    folder = tmp_path / "my configs"
    files = {
        f"../{name}.py": COMPONENTS,
        "method/own.yaml": f"client: {{_target_: {name}.Client}}\nserver: {{_target_: {name}.Server}}\nmust: 4\n",
        "method/own_strong.yaml": "defaults: [own]\nlam: 9.0\n",
        "method/incomplete.yaml": f"client: {{_target_: {name}.Client}}\nserver: {{_target_: {name}.Server}}\n",
        "method/bad_key.yaml": f"client: {{_target_: {name}.Client}}\nserver: {{_target_: {name}.Server}}\nlamb: 1\n",
        "method/bad_yaml.yaml": "client: [",
        "data/own.yaml": f"_target_: {name}.load\nroot: ${{oc.env:HOME}}\n",
        "data/bad_target.yaml": f"_target_: {name}.laod\n",
        "data/bad_type.yaml": f"_target_: {name}.load\nflag: perhaps\n",
        "experiment/ours.yaml": "# @package _global_\ndefaults: [override /method: own]\nrounds: 7\nmethod: {lam: 3}\n",
        "experiment/typo.yaml": "# @package _global_\nround: 7\n",
    }
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    return str(folder)


Refused = Callable[..., str]


@pytest.fixture
def refused(refused: Refused, runs: list[Settings]) -> Refused:
    """Launches with arguments that must be refused; returns what was said."""

    def launch_with(*arguments: str) -> str:
        said = refused(*arguments)
        assert not runs and said.startswith("error: ")
        return said

    return launch_with


def test_overrides_reach_the_run(runs: list[Settings]) -> None:
    line = "method=fedprox method.mu=1 partition=dirichlet partition.alpha=0.5 lr=1 trace.rounds=[1,2] eval.clients=all"
    assert cli.main([*line.split(), "placement=one_per_client", "local_steps=5"]) == 0
    (settings,) = runs
    assert settings.method["mu"] == 1.0 and isinstance(settings.method["mu"], float)
    assert settings.partition["alpha"] == 0.5 and settings.lr == 1.0
    assert settings.trace.rounds == [1, 2] and settings.placement.clients_per_actor == 1
    assert settings.local_steps == 5 and settings.local_epochs is None


@pytest.mark.parametrize("path", ["j\u00fcrgen", "run (1)", "lr=0.1", "100%", "a#b", "it's", "{x}y"])
def test_paths_are_taken_as_they_are(path: str, runs: list[Settings]) -> None:
    assert cli.main([f"run_dir=/x/{path}"]) == 0 and runs[0].run_dir == f"/x/{path}"


def test_settings_of_parts_come_from_signatures(runs: list[Settings], mine: str) -> None:
    assert cli.main(["--config-dir", mine, "method=own", "data=own", "data.size=0.5", "data.shape=[3]"]) == 0
    (settings,) = runs
    own = {k: v for k, v in settings.method.items() if k not in ("client", "server")}
    assert own == {"lam": 1.0, "alpha": 5.0, "unit": "module", "must": 4}
    assert settings.data["size"] == 0.5 and settings.data["shape"] == [3] and settings.data["root"] == str(Path.home())


def test_a_file_may_build_on_another(runs: list[Settings], mine: str, refused: Refused) -> None:
    assert cli.main(["--config-dir", mine, "method=own_strong", "method.alpha=2"]) == 0
    settings = runs.pop()
    assert (settings.method["lam"], settings.method["alpha"], settings.method["must"]) == (9.0, 2.0, 4)
    assert settings.names["method"] == "own_strong"
    assert "method.lamb: no such setting" in refused("--config-dir", mine, "method=own_strong", "method.lamb=2")


def test_experiments(runs: list[Settings], mine: str) -> None:
    assert cli.main(["--config-dir", mine, "+experiment=ours", "rounds=8"]) == 0
    assert cli.main(["--config-dir", mine, "experiment=ours"]) == 0
    assert [r.rounds for r in runs] == [8, 7] and runs[0].method["lam"] == 3.0
    assert runs[0].names["experiment"] == "ours"


def test_interpolation(runs: list[Settings], refused: Refused) -> None:
    assert cli.main(["lr=${method.mu}", "run_dir=runs/mine-${seed}", "seed=3"]) == 0
    settings = runs.pop()
    assert settings.lr == settings.method["mu"] and settings.run_dir == "runs/mine-3"
    assert "lr: Interpolation key 'nope' not found" in refused("lr=${nope}")
    assert "lr: Interpolation key 'nope' not found" in refused("--cfg", "job", "lr=${nope}")
    assert refused("clients=${method.unit}").startswith("error: clients='module': expected")


def test_sweeps(runs: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["method=local,fedavg", "seed=0,1", "-m", "rounds=3"]) == 0
    assert [(r.names["method"], r.seed, r.rounds) for r in runs] == [*product(("local", "fedavg"), (0, 1), (3,))]
    assert "[4/4] FedAvg seed=1" in capsys.readouterr().out


@pytest.mark.parametrize("root", ["out", "s3://bucket/out"])
def test_the_folders_of_a_sweep_have_a_pattern(root: str, runs: list[Settings]) -> None:
    """With the names of components, and settings as they are."""
    pattern = f"{root}/${{method}}-${{data}}-${{optimizer}}-${{method.lam}}-${{seed}}"
    given = {"method": ["ditto", "ditto+fedadam"], "seed": [0, 1], "run_dir": pattern}
    assert cli.main(["-m", "method=ditto,ditto+fedadam", "seed=0,1", f"run_dir={pattern}"]) == 0
    names = [f"{root}/{name}-digits-sgd-1.0-{seed}" for name in ("ditto", "ditto+fedadam") for seed in (0, 1)]
    in_python = [settings_of(**job) for job in compose.sweep(values_of(given, sweep=True))]
    assert [run.run_dir for run in runs] == [run.run_dir for run in in_python] == names


OWN = """
    class Moon:
        def __init__(self, net, *, mu: float = 1.0): ...
    class MoonServer:
        def __init__(self, *, beta: float = 2.0): ...
    class Tiny:
        def __init__(self, width=8): ...
    def load(*, root: str = "."): ...
    def rule(labels, num_classes, clients, rng, client_ids, *, alpha: int = 3): ...
"""


@pytest.fixture
def own(here: Path) -> str:
    """A module of components in the working directory."""
    name = f"own_{next(NUMBERS)}"
    (here / f"{name}.py").write_text(dedent(OWN))
    return name


def test_dotted_names(runs: list[Settings], own: str) -> None:
    """The settings of the default's file are not those of another target."""
    line = f"model={own}.Tiny model.width=9 data={own}.load partition={own}.rule method={own}.Moon"
    assert cli.main([*line.split(), "+experiment=pfedcfr_table2_mnist"]) == 0
    (settings,) = runs
    assert settings.model == {"_target_": f"{own}.Tiny", "variants": [], "width": 9}
    assert settings.data == {"_target_": f"{own}.load", "root": "."}
    assert settings.partition == {"_target_": f"{own}.rule", "alpha": 3}
    server = {"_target_": "pflsim.servers.fedavg.FedAvg"}
    assert settings.method == {"client": {"_target_": f"{own}.Moon"}, "server": server, "mu": 1.0}
    names = [settings.names[group] for group in ("model", "data", "partition", "method", "split")]
    assert names == ["Tiny", own, "rule", "Moon", "official"]


def test_a_sweep_over_dotted_names_and_a_dotted_server(runs: list[Settings], own: str) -> None:
    line = ["-m", f"model=mlp,{own}.Tiny", f"method={own}.Moon", f"method.server={own}.MoonServer", "method.beta=3"]
    assert cli.main(line) == 0
    assert [r.names["model"] for r in runs] == ["mlp", "Tiny"]
    assert all(r.method["server"] == {"_target_": f"{own}.MoonServer"} and r.method["beta"] == 3.0 for r in runs)


def test_the_server_of_a_client_is_the_rule_in_its_module(
    runs: list[Settings], own: str, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    rules = "\nfrom pflsim.servers.base import ServerRule\nclass PACServer(ServerRule): ..."
    Path(f"{own}_b.py").write_text(dedent(OWN) + rules)
    assert cli.main([f"method={own}_b.Moon", "progress=plain"]) == 0
    assert runs.pop().method["server"] == {"_target_": f"{own}_b.PACServer"}
    assert f"{own}_b.PACServer" in capsys.readouterr().out
    assert cli.main([f"method={own}_b.Moon", "--cfg", "job"]) == 0 and "PACServer" in capsys.readouterr().out
    assert command._targets(f"{own}_b.Moon", "", [])[1] == f"{own}_b.PACServer"
    Path(f"{own}_c.py").write_text(dedent(OWN) + rules + "\nclass Other(ServerRule): ...")
    assert f"method.server={own}_c.PACServer" in refused(f"method={own}_c.Moon")
    assert cli.main([f"method={own}_c.Moon", f"method.server={own}_c.Other"]) == 0
    assert runs.pop().method["server"] == {"_target_": f"{own}_c.Other"}


@pytest.mark.parametrize("name", ["hospitals.csv", "x.npz", "files/my-table.csv"])
def test_files_are_no_data_sets(name: str, refused: Refused) -> None:
    said = refused(f"data={name}", "method=fedavg")
    assert name in said and "data=npz data.path=" in said and "data=table data.path=" in said


def test_unknown_dotted_names(own: str, refused: Refused) -> None:
    assert "did you mean Tiny?" in refused(f"model={own}.Tinny")
    assert f"{own}x" in refused(f"model={own}x.Tiny")
    assert "there is no placement" in refused(f"placement={own}.Tiny")
    assert "did you mean Moon?" in refused("-m", f"method={own}.Moom,fedavg")
    assert "mlp" in refused("model=Tiny")


def test_a_sweep_is_checked_before_its_first_run(refused: Refused) -> None:
    assert "method=fedva: there is no method of that name; did you mean " in refused("-m", "method=local,fedva")
    assert "clients='x': expected" in refused("-m", "seed=0,1", "clients=3,x")
    assert "rounds=0: expected" in refused("-m", "rounds=5,0")
    assert "run_dir='x/${method}-${seed}'" in refused("-m", "method=local,fedavg", "seed=0,1", "run_dir=x")
    assert "run_dir='x/${method}/${seed}'" in refused("-m", "method=local", "seed=0,1", "run_dir=x/${method}")
    assert "run_dir='x/${seed}/${method}'" in refused("-m", "method=local,fedavg", "seed=0,1", "run_dir=x/${seed}")
    assert "error: [2/2] fraction=0.01: " in refused("-m", "fraction=1,0.01")
    assert "error: eval.holdout_clients=10 " in refused("-m", "fraction=1,0.5", "eval.holdout_clients=10")
    assert "lr=1,2,3" in refused("-m", "lr=interval(0,1)")


MISTAKES = {
    "lr_deca=1": "lr_deca: no such setting. Did you mean lr_decay ",
    "alpha=1": "alpha: no such setting. Did you mean method.alpha?",
    "method.alph=1": "The settings of method: method.lam, method.mu",
    "placement.theads=2": "Did you mean placement.threads",
    "clients=abc": "clients='abc': expected a whole number",
    "trace.rounds=1": "trace.rounds=1: expected a list",
    "placement=2": "there is no placement of that name; valid: auto, one_per_client, packed",
    "method.unit=modul": "method.unit='modul': expected module, tensor or model",
    "method=fedpox": "method=fedpox: there is no method of that name; did you mean fedprox",
    "method=null": "method=null: there is no method of that name",
    "~method": "method=null: there is no method of that name",
    "~clients": "clients=null: ",
    "+experiment=nope": "experiment=nope: there is no experiment of that name; valid: ",
    "foo": "'foo' is not of the form KEY=VALUE or GROUP=NAME",
    "lr=[1": "'lr=[1' is not of the form",
    "seed=0,1": "--multirun",
    "hydra.run.dir=x": "hydra.run.dir=x: ",
    "names.method=x": "names: no such setting",
    "method.client._target_=nowhere.Client": "method.client._target_=nowhere.Client: ",
    "uplink=topk uplink.share=0": "uplink.share=0: expected a number greater than 0",
    "local_steps=1 local_epochs=1": "local_epochs=1 and local_steps=1",
    "fraction=0.01": "fraction=0.01",
    "--config-dir nowhere": "there is no such folder",
    "learning_rate=0.1": "learning_rate: no such setting. Did you mean lr or server_optimizer.lr?",
    "optimizer.beta=0.9": "optimizer.beta: no such setting",
    "-lr 0.1": "lr=VALUE",
    "--rounds 5": "rounds=VALUE",
    "--method.mu=5": "method.mu=5",
    "--rounds --cfg job": "rounds=VALUE",
    "-momentum 0.9": "see ",
    "--cfg run": "invalid choice",
    "method=fedavg method.mu=1": "method.mu: no such setting",
    "eval.metrics=macro_f1": "expected a list: eval.metrics=[macro_f1]",
    "optimizer=nonesuch": "optimizer=torch.optim.NAME",
    "local": "method=local",
    "tune local --into study": "method=local",
    "-m method=[local,fedavg]": "-m method=local,fedavg",
    "-m method=local,fedavg method.server=mine.Server": "error: method.server=mine.Server would",
}


@pytest.mark.parametrize(("words", "said"), MISTAKES.items())
def test_mistakes_are_explained(refused: Refused, words: str, said: str) -> None:
    assert said in refused(*words.split())


def test_a_tilde_in_run_dir_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = create_run_folder("fedavg", "digits", 0, "~/x")
    assert folder == tmp_path / "x" and folder.is_dir()
    (folder / "config.yaml").write_text("lr: 1")
    assert run_folder("~/x") == folder


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("method=incomplete", "method.must has no default; give it a value: method.must=..."),
        ("method=bad_key", "method.lamb: no such setting"),
        ("method=bad_yaml", "bad_yaml.yaml: "),
        ("data=bad_target", "data._target_="),
        ("data=bad_type", "data.flag='perhaps': expected true or false"),
        ("+experiment=typo", "round: no such setting. Did you mean rounds"),
        ("method=onw", "did you mean own"),
    ],
)
def test_mistakes_in_files(refused: Refused, mine: str, choice: str, said: str) -> None:
    assert said in refused("--config-dir", mine, choice)


@pytest.mark.parametrize("parallel", slow_except(["1"], ["1", "2"]))
def test_an_error_of_all_runs_of_a_sweep_is_printed_when_it_occurs_and_at_the_end(
    parallel: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "run_dir=/proc/no/${seed}", "seed=0,1,2", "executor=inline", f"sweep.parallel={parallel}"]
    assert cli.main(words) == 1
    said = capfd.readouterr().err
    assert said.count("run folder /proc/no cannot be created") == 2 and "3 of 3 runs failed" in said
    assert said.splitlines()[-1].startswith("run folder /proc/no cannot be created")


RULES = """
    import numpy as np
    from pflsim.data.dataset import Dataset
    calls = []
    def load() -> Dataset:
        calls.append("load")
        y = np.arange(60) % 2
        return Dataset("mine", np.stack([y, -y, 2 * y], 1).astype(np.float32), y, 2, 40)
    def rule(labels, num_classes, clients, rng, client_ids) -> list[np.ndarray]:
        calls.append("partition")
        return np.array_split(rng.permutation(len(labels)), clients)
"""


def test_a_sweep_prepares_a_run_of_each_kind_before_its_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers make no kind; all runs that fail are named, and runs with equal data read them once."""
    name = f"own_{next(NUMBERS)}"
    (here / f"{name}.py").write_text(dedent(RULES))
    words = [f"data={name}.load", f"partition={name}.rule", "model=linear", "executor=inline", "clients=2"]
    assert cli.main(["-m", "lr=0.1,2e-1", "method=fedavg,fedrep,fedas", "buffers=local,aggregate", *words]) == 2
    said = capsys.readouterr()
    named = [line.removeprefix("error: ").partition(": ")[0] for line in said.err.splitlines()]
    of = lambda n, name: f"[{n}/12] lr=0.1 {name} buffers=local, [{n + 1}/12] lr=0.1 {name} buffers=aggregate"  # noqa: E731
    assert named == [of(3, "FedRep"), of(5, "FedAS")] and "net.body" in said.err
    assert not said.out and not Path("runs").exists()
    assert importlib.import_module(name).calls == ["load", *["partition"] * 6]


def test_an_interrupted_sweep_runs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def run(settings: Settings) -> None:
        if settings.seed == 1:
            raise KeyboardInterrupt
        found.append(settings.seed)

    replace_runner(monkeypatch, run)
    assert cli.main(["seed=1"]) == 130
    assert cli.main(["-m", "seed=0,3,1,2"]) == 130
    assert found == [0, 3]


def test_show_config(capsys: pytest.CaptureFixture[str], runs: list[Settings]) -> None:
    assert cli.main(["--cfg", "job", "method=fedprox", "lr=${method.mu}"]) == 0
    assert "lr: ${method.mu}" in capsys.readouterr().out
    assert cli.main(["--cfg", "job", "--resolve", "method=fedprox", "lr=${method.mu}"]) == 0
    assert "lr: 0.001" in capsys.readouterr().out
    assert not runs


@pytest.mark.parametrize(
    "file",
    [f for f in sorted(CONFIGS.glob("*/*.yaml")) if f.parent.name not in ("experiment", "method")],
    ids=lambda f: f"{f.parent.name}/{f.stem}",
)
@pytest.mark.slow
def test_every_file_composes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experiments and methods are in tests/pflsim/config/test_experiments.py and tests/test_contract.py."""
    group, name = file.parent.name, file.stem
    chosen = [f"{group}={name}", *(["partition=by_client", "split.test_by=clients"] if name == "synthetic" else [])]
    assert cli.main([*chosen, "--cfg", "job"]) == 0
    assert f"{group}: {name}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("where", "name"), [(Tracker, "round"), (ServerRule, "full_participation")])
def test_an_unexpected_error_is_one_line(
    where: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In round 2, with the traceback in run.log and the states of round 1 saved; and while the run is prepared."""
    original = getattr(where, name)

    def fail(*arguments: Any) -> Any:
        if getattr(arguments[1], "round", arguments[1]) == 2:
            raise KeyError("a defect\nof this program")
        return original(*arguments)

    monkeypatch.setattr(where, name, fail)
    folder = tmp_path / "run"
    line = f"method=fedavg clients=2 rounds=2 executor=inline progress=none run_dir={folder}"
    assert cli.main(line.split()) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "KeyError" in said
    if where is Tracker:
        assert "Traceback" in (folder / "run.log").read_text()
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["round_0001"]
    else:
        assert DEBUG in said
    monkeypatch.setenv(DEBUG, "1")
    assert cli.main(line.replace(str(folder), str(tmp_path / "again")).split()) == 1
    assert "Traceback" in capsys.readouterr().err
