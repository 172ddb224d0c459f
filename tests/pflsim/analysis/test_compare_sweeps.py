"""The end of a sweep."""

import csv
import io
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_runs import make_run

import pflsim
from pflsim import cli
from pflsim.analysis.compare import print_comparisons
from pflsim.analysis.tables import tables
from pflsim.commands import sweep as sweeps
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError

pytestmark = pytest.mark.slow

TINY = ["data=digits", "clients=4", "rounds=2", "executor=inline", "sweep.parallel=1", "model.hidden=[4]"]
ONE = [[(5, 10), (6, 10)]]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a sweep below a temporary folder; returns what it says at its end."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> str:
        assert cli.main(["-m", "lockstep=false", *overrides, *TINY]) == 0
        out, err = capsys.readouterr()
        assert "could not" not in err
        return out.rpartition("tensorboard --logdir")[2].partition("\n")[2]

    return run


def test_a_sweep_ends_with_its_table(sweep: Callable[..., str]) -> None:
    said = sweep("method=local,fedavg", "seed=0,1")
    assert said.count("\nLocal  ") == 2 and said.count("\nFedAvg  ") == 3
    assert "Differences to Local" in said


def test_a_table_for_each_partition(sweep: Callable[..., str]) -> None:
    said = sweep("method=local,fedavg", "partition=dirichlet", "partition.alpha=0.5,5.0")
    titles = [line for line in said.splitlines() if line.startswith("Test accuracy")]
    assert [title.partition("alpha=")[2][:3] for title in titles] == ["0.5", "5.0"]
    assert said.count("Differences to Local") == 2 and "CAUTION" not in said
    assert "partition.alpha" not in said.replace("alpha=0.5,", "")  # not in the labels: it is in the titles


Run = Callable[[Settings], Path]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Puts a function in place of what runs the settings."""

    def replace(run: Run) -> None:
        made = {"run": lambda settings, callbacks: run(settings), "check": lambda settings, kept: None}
        fake = nullcontext(SimpleNamespace(**made))
        monkeypatch.setattr(sweeps, "new_runner", lambda first, own_process: fake)

    return replace


@pytest.mark.parametrize("end", [Stopped(signal.SIGINT), RunError("it broke"), KeyboardInterrupt()])
def test_what_was_done_before_the_end(
    runner: Callable[[Run], None], tmp_path: Path, capsys: pytest.CaptureFixture[str], end: BaseException
) -> None:
    """A sweep that is stopped compares what is complete, as one whose last run fails; no patience, no table."""

    def run(settings: Settings) -> Path:
        if settings.seed == 1 and settings.names["method"] == "fedavg":
            raise end
        method = settings.names["method"]
        return make_run(tmp_path / f"{method}{settings.seed}", ONE, method=method, seed=settings.seed)

    runner(run)
    status = cli.main(["-m", "method=local,fedavg", "seed=0,1"])
    out, err = capsys.readouterr()
    assert status == {Stopped: 130, RunError: 1, KeyboardInterrupt: 130}[type(end)]
    assert ("Test accuracy" in out) == (not isinstance(end, KeyboardInterrupt))
    assert ("1 of 4 runs failed" in err) == (type(end) is RunError)


def test_repeated_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep over what changes nothing, such as the executor: the second of each is left out, and said to be."""
    again = [make_run(tmp_path / e, ONE, executor=e) for e in ("ray", "inline")]
    print_comparisons(again)
    assert f"settings and seed: {again[1]}" in " ".join(capsys.readouterr().out.split())
    print_comparisons([*again, make_run(tmp_path / "other", [[(5, 10), (7, 10)]])])
    out, err = capsys.readouterr()
    assert out == "" and "FedAvg with seed 0" in err and err.count("\n") == 1


Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs the command; returns its status and what it said on both streams."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = cli.main(["compare", *map(str, arguments)])
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two methods, two seeds."""
    for method, seed in (("local", 0), ("local", 1), ("fedavg", 0), ("fedavg", 1)):
        make_run(tmp_path / f"runs/{method}-{seed}", [[(5, 10), (6 + seed, 10)]] * 2, method=method, seed=seed)
    return tmp_path / "runs"


def test_a_folder_of_runs_or_a_pattern(said: Said, folder: Path) -> None:
    status, out, err = said(folder)
    assert (status, err) == (0, "")
    assert "Differences to Local" in out and "examples:" in said("--help")[1]
    assert said(f"{folder}/*-?")[1] == said(folder / "fedavg-0", folder / "fedavg-1", f"{folder}/local*")[1] == out
    alone = said(f"{folder}/local*")[1]
    assert alone.count("\nLocal ") == 1 and "Differences" not in alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["--at", "best_val"], "--at best_val"),
        (["--reference", "fedprox"], "--reference fedprox: valid: fedavg, local"),
        (["--out", "table.doc"], "--out table.doc"),
        (["--out", "/dev/null/there.md"], "/dev/null"),
        (["--target", "101%"], "--target"),
    ],
)
def test_refused(said: Said, folder: Path, arguments: list[str], message: str) -> None:
    status, out, err = said(folder, *arguments)
    assert status == 2 and out == ""
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


def test_each_set_of_comparable_runs_has_its_table(said: Said, folder: Path) -> None:
    other = {"digest": "f" * 64, "parts": {"partition": {"alpha": 9}}}
    for method in ("ditto", "fedavg"):
        make_run(folder / f"{method}-9", [[(9, 10), (9, 10)]], method=method, **other)
    make_run(folder / "ditto-1", [[(9, 10), (9, 10)]], method="ditto", seed=1, complete=False, rounds=2)
    status, out, err = said(folder, "--reference", "local")
    assert status == 0 and "2 sets" in err and "missing: Ditto seed 1" in out
    # The first set lacks seeds of one method; the second has no local.
    assert "Differences to Local" in out and "Differences to FedAvg" in out
    assert "Differences to Ditto, client" in said(folder, "--reference", "ditto")[1]  # of its seed
    status, out, err = said(folder, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert status == 0 and [row["label"] for row in rows] == ["fedavg", "local", "ditto", "fedavg"]
    assert len({row["comparison"] for row in rows[:2]}) == len({row["comparison"] for row in rows[2:]}) == 1
    assert rows[0]["comparison"] != rows[2]["comparison"]


def test_other_test_sets(said: Said, tmp_path: Path) -> None:
    """All is about the chosen set; the round is still chosen on validation rows; the last table has each set."""
    for method, better in (("local", 0), ("fedavg", 10)):
        for seed in (0, 1):
            others = [[(30 + better, 100), (50 + seed, 100)], [(90, 100)] * 2]
            own, val = [[(8, 10)] * 2, [(9, 10)] * 2], [[(5, 10)] * 2, [(4, 10)] * 2]
            make_run(tmp_path / f"{method}-{seed}", own, method=method, seed=seed, val=val, sets={"others": others})
    _, out, _ = said(tmp_path, "--set=others", "--format=csv")
    fedavg, local = sorted(csv.DictReader(io.StringIO(out)), key=lambda row: row["method"])
    assert [float(row["accuracy_mean"]) for row in (local, fedavg)] == pytest.approx([0.4025, 0.4525])
    assert (float(fedavg["difference_mean"]), fedavg["better"], fedavg["equal"]) == (pytest.approx(0.05), "2", "2")
    assert float(fedavg["target"]) == 0.9 and "others" in fedavg["comparison"]
    (compared,) = pflsim.compare(tmp_path, set="others", at="last")
    assert {row.figures["mean"].mean for row in compared.rows} == {0.9}

    *_, table = tables(pflsim.compare(tmp_path)[0])
    assert table.rows == (("FedAvg", "0.800 ± 0.000", "0.453 ± 0.004"), ("Local", "0.800 ± 0.000", "0.403 ± 0.004"))
    assert f"<summary>{table.title}</summary>" in pflsim.report(tmp_path, tmp_path / "report.html").read_text()
    assert table.title not in [each.title for each in tables(compared)]
    (curve,) = pflsim.figures(tmp_path, only="curves", set="others").values()
    assert max(curve.axes[0].lines[0].get_ydata()) == 0.9
    make_run(tmp_path / "without", [[(9, 10)] * 3] * 2, method="ditto")
    status, _, err = said(tmp_path, "--set=others")
    assert status == 2 and "without: --set others: " in err and "eval.sets" in err


def test_a_wrong_test_set_lists_those_of_all_runs(said: Said, tmp_path: Path) -> None:
    for method, names in (("local", ("mine", "others", "shared")), ("fedavg", ("others", "shared", "theirs"))):
        rates = [[(8, 10)] * 2] * 2
        make_run(tmp_path / method, rates, method=method, sets=dict.fromkeys(names, rates))
    for name in ("other", "mine"):
        status, _, err = said(tmp_path, f"--set={name}")
        listed = err.partition(f"--set {name}: ")[2]
        assert status == 2 and "others" in listed and "shared" in listed
        assert "theirs" not in listed and "mine" not in listed


def test_clients_that_joined_after_the_last_round(said: Said, tmp_path: Path) -> None:
    for method, more in (("local", 0), ("fedavg", 10)):
        for seed in (0, 1):
            new = {"received": [(50 + more, 100), (60 + more, 100)], "trained": [(70 + 2 * more, 100), (70, 100)]}
            folder = tmp_path / f"{method}-{seed}"
            make_run(folder, [[(9, 10)] * 3] * 2, method=method, seed=seed, new=cast(Any, new))
    for phase, means, difference in (("received", (0.55, 0.65), 0.1), ("trained", (0.7, 0.8), 0.1)):
        _, out, _ = said(tmp_path, f"--set=new_{phase}", "--format=csv")
        fedavg, local = sorted(csv.DictReader(io.StringIO(out)), key=lambda row: row["method"])
        assert [float(row["accuracy_mean"]) for row in (local, fedavg)] == pytest.approx(means)
        assert (local["reported_model"], local["reported_phase"], local["round_mean"]) == ("newcomer", phase, "2.0")
        assert (fedavg["pairs"], fedavg["round_chosen_by"]) == ("4", "last")
        assert float(fedavg["difference_mean"]) == pytest.approx(difference)
    (table,) = pflsim.compare(tmp_path, set="new_trained")
    assert {row.figures["mean"].mean for row in table.rows} == {0.7, 0.8}
    assert "new clients" in said(tmp_path, "--set=new_trained")[1]
    make_run(tmp_path / "without", [[(9, 10)] * 3] * 2, method="ditto")
    status, _, err = said(tmp_path, "--set=new_trained")
    assert status == 2 and "without: --set new_trained: " in err and "eval.holdout_clients" in err
