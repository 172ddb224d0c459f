"""Tuning: spaces, equal budgets, the choice by validation, and studies that are stopped. Runs are made up."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run

from pflsim import cli
from pflsim.commands.tune import processes
from pflsim.commands.tune.methods import methods_of
from pflsim.commands.tune.space import Range, untried
from pflsim.commands.tune.study import BATCH, STUDY, Study, Trial, run_chosen, run_trials
from pflsim.commands.tune.suggest import suggest
from pflsim.config.compose import CONFIGS, composing
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError, SettingsError

WORDS = ("method=fedprox,local", "clients=4")
Score = Callable[[Settings], int]


def near(settings: Settings) -> int:
    """Correct validation examples of 1000: most at lr = 0.02."""
    return round(1000 * math.exp(-abs(math.log(settings.lr / 0.02))))


def fake(score: Score = near, order: int = 1, stop_after: int | None = None, ran: list[Settings] | None = None) -> Any:
    """Return what runs settings: it writes run folders with this validation accuracy, and the contrary test accuracy.

    Args:
        score: correct examples of 1000; negative: the run fails.
        order: -1: runs end in the reverse order.
        stop_after: stop the study after so many runs.
        ran: the settings are added.
    """

    def run(settings: Sequence[Settings]) -> Iterator[tuple[int, str]]:
        for number in range(len(settings))[::order]:
            if stop_after is not None and len(done) == stop_after:
                raise RunError("stopped")
            one = settings[number]
            done.append(one)
            right = score(one)
            if right >= 0 and not Path(str(one.run_dir)).exists():
                folder = Path(str(one.run_dir))
                make_run(  # the first round is the best one
                    folder, [[(1000 - right, 1000)]] * 2, val=[[(right, 1000)], [(right // 2, 1000)]],
                    method=one.names["method"], seed=one.seed, lr=one.lr,
                )  # fmt: skip
            yield number, "" if right >= 0 else f"lr={one.lr} diverges"

    done = [] if ran is None else ran
    return run


def tuned(folder: Path, run: Any, *words: str, budget: int = 7, seeds: int = 2) -> tuple[list[Trial], list[str]]:
    """Run a study, or continue it; return its trials and what failed."""
    folder.mkdir(exist_ok=True)
    with composing([CONFIGS]):
        methods = tuple(methods_of(words or WORDS, [CONFIGS]))
        seed = methods[0].settings({}).seed
        after = tuple(range(seed + 1, seed + 1 + seeds))
        study = Study(folder, tuple(words or WORDS), (), methods, budget, seed, after)
        trials = study.read()
        run_trials(study, trials, run)
        return trials, run_chosen(study, trials, run)[1]


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("search.lr={low:1,high:0.1}", "search.lr"),
        ("search.lr={low:0,high:0.1,log:true}", "search.lr"),
        ("search.fedprox.mu={low:0,high:1,log:true}", "with log"),
        ("search.lr={low:0.1}", "search.lr"),
        ("search.lr={low:a,high:b}", "search.lr"),
        ("search.lr=0.1", "search.lr"),
        ("search.lr=[]", "search.lr"),
        ("search.lr=[0.1,0.1]", "search.lr"),
        ("search.lr=[0.1,0.2] search.lr=[0.1,0.3]", "twice"),
        ("search.lr=[0.1,-1]", "lr=-1"),
        ("search.lr={low:0,high:1}", "lr=0"),
        ("search.lrr=[1,2]", "did you mean lr"),
        ("search.fedprox.muu=[1,2]", "method.mu"),
        ("search.batch_size={low:0.5,high:2}", "batch_size=0.5"),
        ("search.optimizer=[sgd,adan]", "valid: adam, adamw, sgd"),
        ("search.seed=[1,2]", "search.seed"),
        ("search.data.root=[a,b]", "search.data.root"),
        ("search.shift=[none,rotation]", "search.shift"),
        ("search.faults.dropout=[0,0.5]", "search.faults.dropout"),
        ("search.ditto.lam=[0.1,1]", "ditto is not among"),
        ("search.lr=0.1,0.2", "search.lr"),
        ("lr=0.1,0.2", "search.lr"),
        ("run_dir=x", "--into"),
        ("split.validation=0", "split.validation"),
        ("method=nope,local", "valid:"),
    ],
)
def test_spaces_are_checked_before_anything_runs(word: str, named: str) -> None:
    with composing([CONFIGS]), pytest.raises(SettingsError) as error:
        methods_of([*WORDS, *word.split(" ")], [CONFIGS])
    assert named.lower() in str(error.value).lower()


@pytest.mark.parametrize("block", ["mu: 3", "muu: [1, 2]", "mu: [a, 2]", "mu: {low: 2, high: 1}"])
def test_an_error_in_the_block_of_a_method_names_its_file(block: str, tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    text = (CONFIGS / "method" / "fedprox.yaml").read_text().partition("search:")[0]
    (tmp_path / "method" / "mine.yaml").write_text(f"{text}search:\n  {block}\n")
    folders = [CONFIGS, tmp_path]
    with composing(folders), pytest.raises(SettingsError, match=rf"mine\.yaml: .*{block.partition(':')[0]}"):
        methods_of(["method=mine"], folders)


def test_settings_that_cannot_be_searched_are_not_advised() -> None:
    with composing([CONFIGS]), pytest.raises(SettingsError, match="only method") as error:
        methods_of([*WORDS, "seed=0,1"], [CONFIGS])
    assert "search." not in str(error.value)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ("[0.05]", 0.05),
        ("[1,0.1]", 0.1),
        ("{low:1,high:2}", 1.0),
        ("{low:0.01,high:0.05}", 0.05),
        ("{low:0.01,high:1}", 0.1),
    ],
)
def test_the_first_trial_is_in_the_space(space: str, expected: float) -> None:
    with composing([CONFIGS]):
        (method,) = methods_of(["method=local", f"search.lr={space}"], [CONFIGS])
        assert method.defaults() == {"lr": expected}


def test_spaces_of_the_methods_and_of_the_command_line() -> None:
    words = [
        "method=fedprox,moon,local",
        "search.lr=[1,0.1]",
        "search.moon.mu={low:1,high:5}",
        "search.momentum=[0,0.9]",
    ]
    with composing([CONFIGS]):
        fedprox, moon, local = (dict(method.space) for method in methods_of(words, [CONFIGS]))
        alone = methods_of(["method=local", "search.lr=null"], [CONFIGS])[0].space
    shared = {"lr": (1.0, 0.1), "momentum": (0.0, 0.9)}
    assert local == shared and [type(value) for value in local["lr"]] == [float, float]  # type: ignore[union-attr]
    assert fedprox == {**shared, "method.mu": Range(0.001, 1.0, True)}
    assert moon == {**shared, "method.mu": Range(1, 5)}
    assert alone == {}


@pytest.mark.slow
def test_every_method_has_a_space_that_its_settings_accept() -> None:
    names = ",".join(sorted(file.stem for file in (CONFIGS / "method").glob("*.yaml")))
    with composing([CONFIGS]):
        spaces = {method.name: set(method.space) for method in methods_of([f"method={names}"], [CONFIGS])}
    assert all("lr" in space for space in spaces.values())
    without_settings = {"local", "fedavg", "fedbn", "fedper", "fedrod", "lg_fedavg"}
    assert {name for name, space in spaces.items() if space == {"lr"}} == without_settings


def test_suggestions_are_in_the_space_and_depend_on_the_arguments_only() -> None:
    space = {"a": Range(0.001, 1.0, log=True), "b": Range(2, 5), "c": ("x", None, [1, 2])}
    tried = [(point, point["a"]) for point in suggest(space, [], 12, seed=1)]
    first, again, other = (suggest(space, tried, 20, seed=seed) for seed in (2, 2, 3))
    assert first == again != other and len(first) == 20
    for point in first:
        assert 0.001 <= point["a"] <= 1 and point["a"] == float(f"{point['a']:.4g}")
        assert type(point["b"]) is int and 2 <= point["b"] <= 5 and point["c"] in space["c"]
    assert {point["b"] for point in first} | {point["b"] for point, _ in tried} == {2, 3, 4, 5}
    values = [sum(point["a"] for point in points) for points in (first, [point for point, _ in tried])]
    assert values[0] / 20 > values[1] / 12  # it maximises


def test_a_finite_space_is_tried_once() -> None:
    space = {"a": Range(1, 2), "b": (True, False, None)}
    tried = [({"a": 1, "b": None}, 0.3), ({"a": 9, "b": True}, 0.9)]  # the second is outside
    found = suggest(space, tried, 10, seed=0)
    assert len(found) == 5 and all(found[:i].count(point) == 0 for i, point in enumerate(found))
    assert untried(space, [*found, tried[0][0]]) is None and tried[0][0] not in found
    assert suggest({}, [({}, 0.5)], 3, seed=0) == []


def test_equal_budgets_and_the_choice_by_validation(tmp_path: Path) -> None:
    ran = list[Settings]()
    trials, failed = tuned(tmp_path, fake(ran=ran), "seed=4", *WORDS)
    assert not failed and [trial.method for trial in trials].count("local") == 7 == len(trials) - 7
    for name in ("fedprox", "local"):
        own = [trial for trial in trials if trial.method == name]
        assert [trial.number for trial in own] == list(range(7))
        assert own[0].values["lr"] == 0.1 and own[0].values.get("method.mu", 0.001) == 0.001  # the defaults
        assert own[0].accuracy == 0.2 and own[0].round == 1
        scores = [round(1000 * math.exp(-abs(math.log(trial.values["lr"] / 0.02)))) / 1000 for trial in own]
        assert [trial.accuracy for trial in own] == scores
        finals = [run for run in ran if run.names["method"] == name and "runs" in str(run.run_dir)]
        assert [run.seed for run in finals] == [5, 6]
        assert {run.lr for run in finals} == {own[scores.index(max(scores))].values["lr"]}
    assert {run.seed for run in ran if "trials" in str(run.run_dir)} == {4}


@pytest.mark.slow
def test_results_depend_neither_on_the_order_of_ends_nor_on_interruptions(tmp_path: Path) -> None:
    straight, _ = tuned(tmp_path / "a", fake(), budget=12)
    reverse, _ = tuned(tmp_path / "b", fake(order=-1), budget=12)
    for stop_after in (0, 3, 8, 9, 100):  # before the first, inside and between batches
        try:
            stopped = tuned(tmp_path / "c", fake(stop_after=stop_after), budget=12)[0]
        except RunError:
            continue
    assert straight == reverse == stopped and len(straight) == 24
    assert len({trial.values["lr"] for trial in straight}) > 20
    assert (tmp_path / "a" / STUDY).read_text() == (tmp_path / "b" / STUDY).read_text()


@pytest.mark.slow
def test_a_finished_trial_is_not_run_again(tmp_path: Path) -> None:
    ran = list[Settings]()
    with pytest.raises(RunError):
        tuned(tmp_path, fake(stop_after=BATCH + 1, ran=ran))
    before = {run.run_dir for run in ran}
    tuned(tmp_path, fake(ran=(again := list[Settings]())))
    assert len(before) == BATCH + 1 and not before & {run.run_dir for run in again}


def test_failed_trials_count_and_are_not_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def score(settings: Settings) -> int:
        return -1 if settings.lr > 0.05 or settings.names["method"] == "local" else near(settings)

    trials, failed = tuned(tmp_path, fake(score))
    reasons = [trial.failed for trial in trials if trial.method == "fedprox"]
    assert len(reasons) == 7 and reasons[0] == "lr=0.1 diverges" and None in reasons
    chosen = json.loads((tmp_path / STUDY).read_text())["chosen"]
    assert chosen["fedprox"]["failed"] is None and chosen["fedprox"]["values"]["lr"] <= 0.05
    assert chosen["local"] is None and len(failed) == 1 and failed[0].startswith("local")
    assert "lr=0.1 diverges" in capsys.readouterr().out
    assert tuned(tmp_path, fake(lambda settings: 999))[0] == trials  # they stay failed


def test_a_space_smaller_than_the_budget_ends(tmp_path: Path) -> None:
    trials, _ = tuned(tmp_path, fake(), *WORDS, "search.lr=[0.1,0.2,0.3]", "search.fedprox.mu=[0.001,1]", budget=12)
    assert [sum(trial.method == name for trial in trials) for name in ("fedprox", "local")] == [6, 3]
    assert all(a.values != b.values for a, b in pairwise(trials))


@pytest.mark.parametrize(
    ("words", "budget", "named"),
    [
        ([*WORDS, "batch_size=5"], 7, "batch_size was 20 and is 5"),
        ([*WORDS, "search.lr=[0.1,0.2]"], 7, "lr"),
        (["method=fedprox", "clients=4"], 7, "methods"),
        (WORDS, 8, "trials was 7 and is 8"),
    ],
)
def test_another_command_is_refused(words: Sequence[str], budget: int, named: str, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        tuned(tmp_path, fake(stop_after=0))
    with pytest.raises(SettingsError, match=named):
        tuned(tmp_path, fake(), *words, budget=budget)


def test_what_changes_no_result_may_change(tmp_path: Path) -> None:
    """And a study of a version without a setting has its default."""
    with pytest.raises(RunError):
        tuned(tmp_path, fake(stop_after=0))
    content = json.loads((tmp_path / STUDY).read_text())
    del content["plan"]["settings"]["local"]["augment"]
    (tmp_path / STUDY).write_text(json.dumps(content))
    with pytest.raises(RunError, match="stopped"):
        tuned(tmp_path, fake(stop_after=0), *WORDS, "sweep.parallel=3", "progress=none")


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(SettingsError, match="not empty"):
        tuned(tmp_path, fake())


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "run_side_by_side", fake(lambda s: -1 if s.lr == 0.5 else near(s)))
    monkeypatch.setattr(processes, "check_first_runs", lambda runs: None)
    return tmp_path / "study"


def test_the_tables(faked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", *WORDS, "search.lr=[0.1,0.05,0.5]", "search.fedprox.mu=null", "--trials", "9", "--into", "study"]
    assert cli.main(command) == 0
    said, page = capsys.readouterr().out, (faked / "tuned.md").read_text()
    assert "fedprox" in said and "3, 1 failed, all there are" in page and "lr=0.05" in said
    assert page.count("| local") == 2  # tuned, and compared
    assert cli.main(["tune", "study"]) == 0 and (faked / "tuned.md").read_text() == page
    plan = json.loads((faked / "tuned.json").read_text())["plan"]
    assert plan["seed"] not in plan["seeds"] and len(plan["seeds"]) == len(set(plan["seeds"]))


def test_runs_of_the_chosen_values_may_be_longer(faked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[Settings]()
    monkeypatch.setattr(processes, "run_side_by_side", fake(ran=ran))
    command = ["tune", *WORDS, "rounds=4", "search.fedprox.mu=null", "search.lr=[0.1,0.02]", "--into", "study"]
    assert cli.main([*command, "--rounds", "9"]) == 0
    trials, runs = ran[:4], ran[4:]
    assert {one.rounds for one in trials} == {4} and {one.seed for one in trials} == {0}
    assert [(one.rounds, one.lr, one.seed) for one in runs] == [(9, 0.02, seed) for seed in (1, 2, 3)] * 2
    assert "9 rounds" in (faked / "tuned.md").read_text()
    assert cli.main(["tune", "study"]) == 0 and ran[-1].rounds == 9
    assert cli.main(command) == 2
    assert cli.main([*command, "--rounds", "8"]) == 2


def test_rounds_that_a_method_refuses_begin_no_study(faked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", *WORDS, "rounds=40", "trace.rounds=[40]", "--rounds", "20", "--into", "study"]) == 2
    assert "trace.rounds" in capsys.readouterr().err and not faked.exists()


def test_a_method_without_a_result_is_an_error(faked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", *WORDS, "lr=0.5", "search.lr=null", "--trials", "2", "--into", "study"]) == 1
    assert "local" in capsys.readouterr().err


def test_the_commits_of_all_sessions_are_kept(faked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["tune", *WORDS, "search.lr=[0.1]", "search.fedprox.mu=null", "--into", "study"]
    for commit in ("aaa", "bbb", "aaa"):
        monkeypatch.setattr("pflsim.commands.tune.study.code", lambda commit=commit: {"commit": commit, "dirty": False})
        assert cli.main(command) == 0
    assert [one["commit"] for one in json.loads((faked / "tuned.json").read_text())["code"]] == ["aaa", "bbb"]
    page = (faked / "tuned.md").read_text()
    assert "commit aaa" in page and "commit bbb" in page


def test_a_stopped_study_says_how_to_continue(
    faked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(runs: Sequence[Settings]) -> Iterator[tuple[int, str]]:
        raise Stopped(2)

    monkeypatch.setattr(processes, "run_side_by_side", stopped)
    assert cli.main(["tune", *WORDS, "--into", "study"]) == 130
    assert "tune study" in capsys.readouterr().err


def test_a_folder_without_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", str(tmp_path)]) == 2
    assert "no study" in capsys.readouterr().err


def test_optuna_may_be_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pflsim.commands.tune.suggest.find_spec", lambda name: None)
    assert cli.main(["tune", *WORDS, "--into", "x"]) == 2
    assert "pip install 'pflsim[tune]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["method=fedprox", "search.lr=[-1]", "--into", "nowhere"]])
def test_help_and_errors_import_neither_torch_nor_optuna(arguments: list[str]) -> None:
    code = (
        f"import sys\nfrom pflsim.cli import main\ntry: main(['tune', *{arguments!r}])\nexcept SystemExit: pass\n"
        "sys.exit([name for name in ('torch', 'ray', 'optuna') if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["study", "--trials", "3"], ["method=local"], ["method=local", "--trials", "0"]])
def test_options_that_contradict_each_other(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", *words])
