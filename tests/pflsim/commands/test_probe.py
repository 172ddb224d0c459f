"""`pflsim probe`: its plan, its errors, and when made-up runs go on; test_probe_answers.py has real runs."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from made_runs import make_run

from pflsim import cli
from pflsim.analysis.probe import FINETUNED, Answer
from pflsim.commands import probe
from pflsim.config.compose import CONFIGS, parse
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Stopped
from pflsim.errors import SettingsError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("seconds", "rounds"), [(float("inf"), 20), (112, 20), (62, 10), (0.1, 0)])
def test_rounds_that_fit_into_a_time(seconds: float, rounds: int) -> None:
    """Of ten runs one after the other, which start in 1 s and take 0.5 s for a round, after a first one of 2 s."""
    assert probe.rounds_within(seconds / 60, 2, 0.5, 10, 20) == (rounds, pytest.approx(52 / 60))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give data=NAME"),
        (("data=digits", "method=fedavg"), "leave out method"),
        (("data=digits", "server_optimizer=fedadam"), "leave out method, server_optimizer"),
        (("data=digits", "eval.models=[global]"), "eval.models"),
        (("data=digits", "--minutes", "nan"), "--minutes nan"),
        (("data=digits", "rounds=7"), "rounds=7"),
        (("data=digits", "lr_schedule=cosine"), "lr_schedule"),
        (("data=digits", "lr_decay=0.9"), "lr_decay"),
        (("data=digits", "stop.patience=2"), "stop.patience"),
        (("data=digits", "clients=2"), "6 pairs (client, seed) show nothing"),
        (("data=digits", "clients=1", "--seeds", "8"), "one client"),
        (("data=table", "data.path=none.csv", "data.label=y", "data.client=c"), "none.csv"),
    ],
)
def test_errors(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["probe", *words]) == 2
    assert said in capsys.readouterr().err and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("data=digits", ["split=merged"]), ("data=digits split.validation=0.2", ["split=merged"]),
        ("data=digits split=counts", []), ("data=synthetic partition=by_client split.test_by=clients", []),
        ("data=digits split=merged split.stratify=true", None), ("data=digits split=official", None),
        ("data=digits split.test_by=labels", None),
    ],
)  # fmt: skip
def test_test_rows_are_drawn_at_random(words: str, more: list[str] | None, tmp_path: Path) -> None:
    """Those with the label shares of training rows, the default, favour personal models by themselves."""
    asked = probe.Probe(tmp_path, parse(words.split()), [CONFIGS])
    if more is None:
        with pytest.raises(SettingsError, match="split=merged"):
            asked.drawn_at_random()
    else:
        assert asked.drawn_at_random().words() == [*words.split(), *more]


def test_too_few_minutes_and_equal_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the first run, its folder can be used again. Three clients of one's own are few, whatever the seeds."""
    table, into = tmp_path / "one.csv", tmp_path / "probe"
    rows = [f"c{n % 3},{n % 7},{n % 2}" for n in range(60)]
    settings = f"data=table data.path={table} data.label=y data.client=c model=linear --into {into}".split()
    for lines, said in ((rows, "runs of 8 rounds take about"), ([row[:-1] + "1" for row in rows], "labels are equal")):
        table.write_text("\n".join(["c,x,y", *lines]))
        assert cli.main(["probe", *settings, "--minutes", "0.001"]) == 2
        found = capsys.readouterr()
        assert said in found.err and "no difference can be clear" in found.out and not [*into.iterdir()]


Play = Callable[..., Answer]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return what runs `probe` with made-up runs of accuracies by method, learning rate and round.

    It stops after some runs, if a number is given.
    """
    monkeypatch.setattr(probe, "unlikeness", lambda *given: [])
    monkeypatch.setattr(probe.Probe, "fits", lambda self, method: True)
    monkeypatch.setattr(probe, "OPTIONS", dict.fromkeys(probe.OPTIONS, [""]))
    monkeypatch.setattr(probe, "FACTORS", (0.5, 1, 2))

    def run(
        accuracy: Callable[[str, float, int], float], *words: str, stop_after: int = 10**6, minutes: float = 600
    ) -> Answer:
        ended = itertools.count()

        def runs(asked: Iterable[Settings], parallel: int, table: object) -> Iterator[tuple[int, str]]:
            for number, one in enumerate(asked):
                if next(ended) >= stop_after:
                    raise Stopped(2)
                rounds, method, folder = range(1, one.rounds + 1), one.names["method"], Path(str(one.run_dir))
                counts = [[(int(1000 * accuracy(method, one.lr, t)) + c, 2000) for c in range(10)] for t in rounds]
                shutil.rmtree(folder, ignore_errors=True)
                every = min(one.eval.every, one.rounds)
                make_run(
                    folder, counts[every - 1 :: every], val=counts[every - 1 :: every], method=method, every=every,
                    lr=one.lr, seed=one.seed, seconds=0.001 if folder.name == "first" else 2,
                )  # fmt: skip
                yield number, ""

        monkeypatch.setattr(probe, "side_by_side", runs)
        options = {"settings": parse(["data=digits", *words]), "seeds": 2, "minutes": minutes, "config_dir": []}
        return probe.run_probe(tmp_path / "probe", options)

    return run


def rises_until(last: int) -> Callable[[str, float, int], float]:
    """FedAvg gets better until a round, from behind; the best learning rate is 0.1."""
    return lambda method, lr, t: 1 - abs(lr - 0.1) + (min(t, last) / 50 - 0.2 if method == "fedavg" else 0)


def test_runs_go_on_until_nothing_rises(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    found = play(rises_until(24), "rounds=8", "eval.every=5")
    said = capsys.readouterr().out
    assert {run.config["rounds"] for run in found.whole.runs} == {32}
    assert {len(run.history) for run in found.whole.runs} == {32}  # evaluated every round, at least eight times
    assert re.findall(r"still rises, .*; (rounds=\d+)", said) == ["rounds=16", "rounds=32"]
    assert found.best == "together" and "tune method=fedavg" in said and "minutes left" in said
    assert found.page and found.page.exists() and len(found.frame) == 4


def test_no_advice_while_something_rises_and_more_rounds_continue(
    play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight rounds of all runs take 8 · 8 · 2 s, more than a minute. With more rounds, trials are not repeated."""
    found = play(rises_until(24), "rounds=8", minutes=0.5)
    said = capsys.readouterr().out
    assert found.pays == "Not yet known" and "tune" not in said and "rounds=16 --seeds=2" in said
    found = play(rises_until(24), "rounds=32", minutes=0.5)
    assert found.best == "together" and "ditto-0" not in capsys.readouterr().out
    with pytest.raises(SettingsError, match="--into DIR"):
        play(rises_until(24), "rounds=32", "clients=9")


def test_rates_beyond_an_edge(play: Play) -> None:
    """0.2 is the highest rate of the trials; beyond 0.5 is 1.25, which is still the best one of Local."""
    best = {"local": 9, "fedavg": 0.5, "ditto": 0.1, "ifca": 0.02}
    found = play(lambda method, lr, t: 0.9 - abs(lr - best[method]) / 100, "rounds=8")
    rates = {run.method: run.config["lr"] for run in found.whole.runs}
    assert rates == {"local": 1.25, "fedavg": 0.5, FINETUNED: 0.5, "ditto": 0.1, "ifca": 0.02}
    assert [note for note in found.notes if "lr=" in note] == ["Local: lr=1.25 is the highest that was tried."]


@pytest.mark.parametrize(("runs", "seeds"), [(5, 0), (14, 1), (19, 2)])
def test_a_signal_keeps_what_is_finished(
    play: Play, runs: int, seeds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After 5 runs some methods have no trial; after 13, they have one seed; after 17, both, and the runs go on."""
    with pytest.raises(Stopped):
        play(rises_until(24), "rounds=8", stop_after=runs)
    said = capsys.readouterr().out
    assert (tmp_path / "probe" / "probe.html").exists() == ("Not yet known" in said) == bool(seeds)
    assert ("With one seed" in said) == (seeds == 1)
    assert play(rises_until(24), "rounds=8").whole.runs[0].done == 32
