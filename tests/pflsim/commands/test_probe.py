"""`pflsim probe`: its time limit and its errors; with real runs, settings whose answer is known."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_run
from support import in_this_process

from pflsim import cli
from pflsim.analysis.probe import FINETUNED, Answer
from pflsim.commands import probe
from pflsim.config.compose import CONFIGS
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Stopped
from pflsim.errors import SettingsError


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
    asked = probe.Probe(tmp_path, words.split(), [CONFIGS])
    if more is None:
        with pytest.raises(SettingsError, match="split=merged"):
            asked.drawn_at_random()
    else:
        assert asked.drawn_at_random().words == [*words.split(), *more]


def test_files_are_not_mixed_with_those_of_another_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["probe", "data=digits", "--into", str(tmp_path)]) == 2
    assert "--into DIR" in capsys.readouterr().err


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
        options = {"settings": ["data=digits", *words], "seeds": 2, "minutes": minutes, "config_dir": []}
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


def schools(path: Path) -> str:
    """Write sixty schools of 14 to 24 pupils with levels of their own (deviation 0.35); their slopes hardly differ.

    With four weights, noise 0.8 and 13 training examples, training alone has an expected excess error of
    4 · 0.64 / 13 = 0.2, one model for all 0.35² + 0.1² = 0.13, and the right shrinkage of each weight about 0.05.
    """
    rng, lines = np.random.default_rng(1), ["school,a,b,c,score"]
    for school in range(60):
        level, slopes, n = rng.normal(0, 0.35), np.array([0.5, 0.3, -0.2]), rng.integers(14, 25)
        slopes[0] += rng.normal(0, 0.1)
        x = rng.normal(size=(n, 3))
        scores = level + x @ slopes + rng.normal(0, 0.8, n)
        lines += [f"s{school:02},{','.join(f'{v:.3f}' for v in (*row, y))}" for row, y in zip(x, scores, strict=True)]
    (path / "schools.csv").write_text("\n".join(lines))
    table = f"data=table data.path={path / 'schools.csv'} data.label=score data.client=school"
    return f"{table} model=linear lr=0.05 rounds=10 eval.every=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ahead", "behind"),
    [
        ("partition=classes_per_client partition.classes=2 clients=5", "alone", "together"),
        ("partition=iid", "together", "alone"),
        ("partition=iid shift=rotation shift.groups=2", "in groups", "personal"),
        ("schools", "personal", "alone"),
        ("partition=iid shift=permuted_labels clients=8", "in groups", "together"),
    ],
    ids=["label skew", "IID", "rotations", "schools", "permuted labels"],
)  # fmt: skip
def test_settings_whose_answer_is_known(
    words: str, ahead: str, behind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "side_by_side", in_this_process)
    monkeypatch.setattr(probe, "FACTORS", (1, 2))  # the answers do not depend on the best learning rate
    settings = schools(tmp_path) if words == "schools" else f"data=digits rounds=8 eval.every=2 {words}"
    options = {"settings": [*settings.split(), "progress=none"], "seeds": 3, "minutes": 60.0, "config_dir": []}
    found = probe.run_probe(tmp_path / "probe", options)
    assert ahead in found.ahead and behind not in found.ahead, found.sentences
    if words == "partition=iid":
        first, lost = (tmp_path / "probe" / name for name in ("local-0", "ifca-1"))
        written = (first / "metrics.jsonl").stat().st_mtime_ns
        shutil.rmtree(lost)
        assert probe.run_probe(tmp_path / "probe", options | {"minutes": 1e-3}).sentences == found.sentences
        assert lost.exists() and (first / "metrics.jsonl").stat().st_mtime_ns == written
        with pytest.raises(SettingsError, match="--into DIR"):
            probe.run_probe(tmp_path / "probe", options | {"seeds": 2})
