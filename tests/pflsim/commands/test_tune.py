"""Tuning: spaces, equal budgets, the choice by validation, and studies that are stopped. Runs are made up."""

import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import optuna
import pytest
from made_runs import make_run
from support import refusing

from pflsim import cli
from pflsim.commands import tune
from pflsim.commands.overrides import values_of
from pflsim.commands.tune_study import JOURNAL, STUDY, Method, methods_of
from pflsim.config.compose import CONFIGS, parse
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError, SettingsError
from pflsim.terminal.sweep_table import SweepTable

pytestmark = pytest.mark.slow

WORDS = ("method=fedprox,local", "clients=4")
SHORT = (*WORDS, "--trials", "4", "--seeds", "1")
Score = Callable[[Settings], int]


def near(settings: Settings) -> int:
    """Correct validation examples of 1000: most at lr = 0.02."""
    return round(1000 * math.exp(-abs(math.log(settings.lr / 0.02))))


def fake(
    score: Score = near, at_once: int = 1, stop_after: int | None = None, ran: list[Settings] | None = None
) -> Any:
    """Return what runs settings: it writes run folders with this validation accuracy, and the contrary test accuracy.

    Args:
        score: correct examples of 1000; negative: the run fails.
        at_once: how many run at the same time; the last one that started ends first.
        stop_after: stop the study after so many runs.
        ran: the settings are added.
    """
    done = [] if ran is None else ran

    def run(runs: Iterable[Settings], parallel: int, table: object) -> Iterator[tuple[int, str]]:
        running, waiting = list[tuple[int, Settings]](), enumerate(runs)
        while True:
            while len(running) < at_once and (one := next(waiting, None)):
                running.append(one)
            if not running:
                return
            if len(done) == stop_after:
                raise Stopped(2)
            number, settings = running.pop()
            done.append(settings)
            right, folder = score(settings), Path(str(settings.run_dir))
            if right >= 0 and not folder.exists():
                make_run(  # the first round is the best one
                    folder, [[(1000 - right, 1000)]] * 2, val=[[(right, 1000)], [(right // 2, 1000)]],
                    method=settings.names["method"], seed=settings.seed, lr=settings.lr,
                )  # fmt: skip
            yield number, "" if right >= 0 else f"lr={settings.lr} diverges"

    return run


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return what runs `tune` with made-up runs: its folder below a temporary one, what runs settings, and words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "check_first_runs", lambda methods: None)

    def run(folder: str, runs: Any, *words: str) -> int:
        monkeypatch.setattr(tune, "side_by_side", runs)
        return cli.main(["tune", *(words or SHORT), "--into", folder])

    return run


def trials(folder: str) -> dict[str, list[optuna.trial.FrozenTrial]]:
    """Return the trials of a study by method, as Optuna reads them."""
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(f"{folder}/{JOURNAL}"))
    names = json.loads(Path(folder, STUDY).read_text())["plan"]["methods"]
    return {name: optuna.load_study(study_name=name, storage=storage).trials for name in names}


def points(folder: str) -> dict[str, list[Mapping[str, Any]]]:
    return {name: [one.params for one in found] for name, found in trials(folder).items()}


def found(*words: str) -> list[Method]:
    """The methods with their spaces."""
    return methods_of(parse(words), [CONFIGS])


WRONG = """
search.lr={low:1,high:0.1} search.lr
search.lr={low:0.1} search.lr
search.lr={low:a,high:b} search.lr
search.lr=0.1 search.lr
search.lr=[0.1,-1] lr=-1
search.lr={low:0,high:1} lr=0
search.fedprox.mu={low:0,high:1,log:true} search.method.mu
search.fedprox.muu=[1,2] method.mu
search.batch_size={low:0.5,high:2} batch_size=0.5
search.optimizer=[sgd,adan] adam, adamw, sgd
search.seed=[1,2] search.seed
search.data.root=[a,b] search.data.root
search.ditto.lam=[0.1,1] ditto.lam
lr=0.1,0.2 search.
method=[fedavg,ditto] no method
run_dir=x --into
split.validation=0 split.validation
ray_address=auto executor=ray
"""


@pytest.mark.parametrize("line", WRONG.strip().split("\n"))
def test_spaces_are_checked_before_anything_runs(line: str) -> None:
    word, _, named = line.partition(" ")
    with refusing(named):
        found(*WORDS, word)


@pytest.mark.parametrize("block", ["{muu: [1, 2]}", "{mu: {low: 2, high: 1}}", "3"])
def test_an_error_in_the_block_of_a_method_names_the_method(block: str, tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    text = (CONFIGS / "method" / "fedprox.yaml").read_text().partition("search:")[0]
    (tmp_path / "method" / "mine.yaml").write_text(f"{text}search: {block}\n")
    folders = [CONFIGS, tmp_path]
    with pytest.raises(SettingsError, match=r"search.* of mine: "):
        methods_of({"method": "mine"}, folders)


@pytest.mark.parametrize(
    ("space", "expected"), [("[0.05]", 0.05), ("[1,0.1]", 0.1), ("{low:1,high:2}", 1), ("{low:0.01,high:0.05}", 0.05)]
)
def test_the_first_trial_is_in_the_space(space: str, expected: float) -> None:
    (method,) = found("method=local", f"search.lr={space}")
    assert method.first_point() == {"lr": expected}


def test_spaces_of_the_methods_and_of_the_command_line() -> None:
    words = ["method=fedprox,moon,local", "search.moon.mu={low:1,high:5}", "search.momentum=[0,0.9]"]
    fedprox, moon, local = (method.space for method in found(*words, "search.lr=[1,0.1]"))
    shared = {"lr": [1.0, 0.1], "momentum": [0.0, 0.9]}
    assert local == shared and [type(value) for value in local["lr"]] == [float, float]
    assert fedprox == {**shared, "method.mu": {"low": 0.001, "high": 1.0, "log": True}}
    assert moon == {**shared, "method.mu": {"low": 1, "high": 5}}
    assert found("method=local", "search.lr=null")[0].space == {}


@pytest.mark.parametrize("python", [False, True])
def test_the_space_of_a_class_of_ones_own(python: bool, mine: Path) -> None:
    name, space = "mine.body_prox.BodyProx", {"low": 0.1, "high": 2.0, "log": True}
    given = parse([f"method={name},local", f"search.{name}.mu={{low:0.1,high:2.0,log:true}}", "search.lr=null"])
    if python:
        kinds = [importlib.import_module("mine.body_prox").BodyProx, "local"]
        given = values_of({"method": kinds, "search": {f"{name}.mu": space, "lr": None}}, sweep=True)
    own, local = methods_of(given, [CONFIGS])
    assert (own.name, own.space, local.space) == (name, {"method.mu": space}, {})
    assert own.first_point() == {"method.mu": 0.1} and own.settings({"method.mu": 2.0}).method["mu"] == 2.0


def test_every_method_has_a_space_that_its_settings_accept() -> None:
    names = ",".join(sorted(file.stem for file in (CONFIGS / "method").glob("*.yaml")))
    spaces = {method.name: set(method.space) for method in found(f"method={names}")}
    assert all("lr" in space for space in spaces.values())
    assert {"lr", "server_optimizer.lr", "server_optimizer.beta1"} == spaces["fedavgm"]
    without_settings = {
        "local",
        "fedavg",
        "fedbn",
        "fedper",
        "fedrod",
        "lg_fedavg",
        "fedsa_lora",
        "ffa_lora",
        "fedmrl",
    } | {"flexlora", "hetlora"}
    assert {name for name, space in spaces.items() if space == {"lr"}} == without_settings


def test_suggestions_are_in_the_space(study: Callable[..., int]) -> None:
    words = ("method=local", "search.batch_size={low:2,high:5}", "search.model.hidden=[[4],[5,6]]", "--seeds", "1")
    for folder, more in (("a", ("--trials", "18")), ("b", ("--trials", "3")), ("c", ("--trials", "3", "seed=1"))):
        assert study(folder, fake(), *words, *more) == 0
    tried, again, other = (points(folder)["local"] for folder in "abc")
    assert tried[:3] == again and tried[0] == other[0] and tried[1] != other[1]
    for point in tried[1:]:
        assert 0.001 <= point["lr"] <= 1 and point["lr"] == float(f"{point['lr']:.4g}")
        assert type(point["batch_size"]) is int and point["model.hidden"] in ([4], [5, 6])
    assert {point["batch_size"] for point in tried[1:]} == {2, 3, 4, 5}
    distances = [abs(math.log(point["lr"] / 0.02)) for point in tried]
    assert sum(distances[11:]) / 7 < sum(distances[:11]) / 11  # it maximises


def test_a_finite_space_is_tried_once(study: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the points that Optuna does not suggest."""
    monkeypatch.setattr("pflsim.commands.tune_study.DRAWS", 1)
    words = ("method=local", "search.lr=[0.1,0.01,0.02]", "search.batch_size={low:17,high:20}", "--trials", "30")
    assert study("study", fake(), *words) == 0
    tried = [tuple(point.values()) for point in points("study")["local"]]
    assert set(tried) == set(product((0.1, 0.01, 0.02), (17, 18, 19, 20))) and len(tried) == 12
    assert "all there are" in Path("study/tuned.md").read_text()


def test_equal_budgets_and_the_choice_by_validation(study: Callable[..., int]) -> None:
    ran = list[Settings]()
    assert study("study", fake(ran=ran), "seed=4", *WORDS, "--trials", "7", "--seeds", "2") == 0
    for name, own in trials("study").items():
        assert [trial.number for trial in own] == list(range(7))
        assert own[0].params["lr"] == 0.1 and own[0].params.get("method.mu", 0.001) == 0.001  # the defaults
        scores = [round(1000 * math.exp(-abs(math.log(trial.params["lr"] / 0.02)))) / 1000 for trial in own]
        assert [trial.value for trial in own] == scores  # of the first round, the best one
        finals = [run for run in ran if run.names["method"] == name and "runs" in str(run.run_dir)]
        best = own[scores.index(max(scores))]
        assert [(run.seed, run.lr) for run in finals] == [(seed, best.params["lr"]) for seed in (5, 6)]
        assert json.loads(Path("study", STUDY).read_text())["chosen"][name] == best.params
    assert {run.seed for run in ran if "trials" in str(run.run_dir)} == {4}


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_study_that_is_stopped_has_the_same_number_of_trials_and_no_point_twice(
    at_once: int, study: Callable[..., int]
) -> None:
    """If the runs follow each other, also the same trials."""
    words = (*WORDS, "--trials", "12")
    assert study("straight", fake(at_once=at_once), *words) == 0
    for stop_after in (0, 1, 7, 10):  # each session begins where the last one was stopped
        assert study("stopped", fake(at_once=at_once, stop_after=stop_after), *words) == 130
    ran = list[Settings]()
    assert study("stopped", fake(at_once=at_once, ran=ran), *words) == 0
    for tried in points("stopped").values():
        assert len(tried) == 12 and all(point not in tried[:i] for i, point in enumerate(tried))
    assert all(one.value is not None for tried in trials("stopped").values() for one in tried)
    if at_once == 1:
        assert points("stopped") == points("straight")


def test_the_end_of_the_journal_may_be_missing(study: Callable[..., int]) -> None:
    """A process was killed while it wrote, or the disk was full."""
    assert study("straight", fake()) == 0 and study("cut", fake(stop_after=3)) == 130
    journal = Path("cut", JOURNAL)
    journal.write_bytes(journal.read_bytes()[:-7])
    Path(f"{journal}.lock").symlink_to(journal)  # as Optuna locks
    assert study("cut", fake()) == 0
    assert points("cut") == points("straight")


def test_a_finished_study_runs_nothing_again(study: Callable[..., int]) -> None:
    assert study("study", fake()) == 0
    page, ran = Path("study/tuned.md").read_text(), list[Settings]()
    assert study("study", fake(ran=ran)) == 0 and Path("study/tuned.md").read_text() == page
    assert {Path(str(one.run_dir)).parent.name for one in ran} == {"runs"}  # `finish` leaves the complete ones


def test_failed_trials_count_and_are_not_chosen(study: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    def score(settings: Settings) -> int:
        return -1 if settings.lr > 0.05 or settings.names["method"] == "local" else near(settings)

    assert study("study", fake(score)) == 1
    said, page = capsys.readouterr(), Path("study/tuned.md").read_text()
    assert "lr=0.1 diverges" in said.out and "fedprox trial 1: lr=0.1 diverges" in page
    assert "local" in said.err
    chosen = json.loads(Path("study", STUDY).read_text())["chosen"]
    assert chosen["local"] is None and chosen["fedprox"]["lr"] <= 0.05
    before = trials("study")
    assert len(before["local"]) == len(before["fedprox"]) == 4
    assert study("study", fake(lambda settings: 999)) == 1 and trials("study") == before  # they stay failed


def test_another_command_is_refused(study: Callable[..., int], refused: Callable[..., str]) -> None:
    assert study("study", fake(stop_after=0), *SHORT) == 130
    assert study("study", fake(stop_after=0), *SHORT, "sweep.parallel=3", "progress=none") == 130
    for words, named in {
        "batch_size=5": "settings.fedprox.batch_size",
        "search.lr=[0.1,0.2]": "space.fedprox.lr",
        "method=fedprox": "methods",
        "--trials 8": "trials",
        "--seeds 2": "seeds",
        "--rounds 20": "rounds",
    }.items():
        assert named in refused("tune", *SHORT, *words.split(), "--into", "study")


def test_the_tables(study: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    words = (*WORDS, "search.lr=[0.1,0.05,0.5]", "search.fedprox.mu=null", "--trials", "9")
    assert study("study", fake(lambda s: -1 if s.lr == 0.5 else near(s)), *words) == 0
    said, page = capsys.readouterr().out, Path("study/tuned.md").read_text()
    assert "fedprox" in said and "3, 1 failed, all there are" in page and "lr=0.05" in said
    assert "lr at an edge" in said
    assert page.count("| Local") == 2  # tuned, and compared


def test_runs_of_the_chosen_values_may_be_longer(study: Callable[..., int]) -> None:
    ran = list[Settings]()
    words = (*WORDS, "rounds=4", "search.fedprox.mu=null", "search.lr=[0.1,0.02]", "--rounds", "9")
    assert study("study", fake(ran=ran), *words) == 0
    assert {(one.rounds, one.seed) for one in ran[:4]} == {(4, 0)}
    assert [(one.rounds, one.lr, one.seed) for one in ran[4:]] == [(9, 0.02, seed) for seed in (1, 2, 3)] * 2


def test_crashed_runs_are_no_failed_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ended without a result: the running ones end, no other starts, and the error names it."""

    class Ended:
        def __init__(self, number: int) -> None:
            self.number, self.result = number, None if number == 1 else ""
            self.errors = "its process was killed" if number == 1 else ""

    started = list[int]()

    def processes(functions: Iterator[Any], parallel: int) -> Iterator[Ended]:
        for number, _ in enumerate(functions):
            started.append(number)
            yield Ended(number)

    monkeypatch.setattr(tune, "in_processes", processes)
    method = Method("local", {"method": "local"}, [CONFIGS])
    runs = [method.settings({"run_dir": f"run-{number}"}) for number in range(4)]
    table = SweepTable(["trial"] * 4, False)
    with pytest.raises(RunError, match="run-1.*killed"):
        list(tune.side_by_side(runs, 1, table))
    assert started == [0, 1] and table.names == ["run-0", "run-1", "trial", "trial"]
