"""`pflsim probe`: its time limit and its errors; with real runs, settings whose answer is known."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support import in_this_process

from pflsim import cli
from pflsim.commands import probe
from pflsim.config.compose import CONFIGS
from pflsim.errors import SettingsError


@pytest.mark.parametrize(("seconds", "rounds"), [(float("inf"), 20), (112, 20), (62, 10), (0.1, 0)])
def test_rounds_that_fit_into_a_time(seconds: float, rounds: int) -> None:
    """Of ten runs one after the other, which start in 1 s and take 0.5 s for a round, after a first one of 2 s."""
    assert probe.rounds_within(seconds / 60, 2, 0.5, 10, 20) == (rounds, pytest.approx(37 / 60))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give data=NAME"),
        (("data=digits", "method=fedavg"), "leave out method"),
        (("data=digits", "server_optimizer=fedadam"), "leave out method, server_optimizer"),
        (("data=digits", "--minutes", "nan"), "--minutes nan"),
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
    for lines, said in ((rows, "runs of 5 rounds take about"), ([row[:-1] + "1" for row in rows], "labels are equal")):
        table.write_text("\n".join(["c,x,y", *lines]))
        assert cli.main(["probe", *settings, "--minutes", "0.001"]) == 2
        found = capsys.readouterr()
        assert said in found.err and "no difference can be clear" in found.out and not [*into.iterdir()]


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
