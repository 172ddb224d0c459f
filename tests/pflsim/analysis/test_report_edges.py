"""Runs that are unlike others, reported without a warning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import make_run

from pflsim.analysis.comparison import row
from pflsim.analysis.groups import group_runs
from pflsim.analysis.runs import incomplete, read_run
from pflsim.cli import main

pytestmark = pytest.mark.slow


def test_nothing_evaluated_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a", [[(3, 10), (4, 10)]], every=3, complete=False)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    (folder / "run.log").write_text("error: the run ended: loss is inf\n")
    assert main(["report", str(folder)]) == 2
    found = capsys.readouterr().err
    assert "no run has an evaluated round" in found and "2 of 3 rounds are done: loss is inf" in found


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.yaml", lambda text: "{}"),
        ("summary.json", lambda text: "{}"),
        ("summary.json", lambda text: text.replace('"clients": 2', '"clients": "two"')),
        ("summary.json", lambda text: text.replace('"name": "accuracy"', '"name": "other"')),
        ("summary.json", lambda text: text.replace('"phase"', '"phases"')),
        ("metrics.jsonl", lambda text: text.replace('"total"', '"all"')),
        ("environment.json", lambda text: text.replace('"gpus"', '"none"')),
        ("metrics.jsonl", lambda text: text.replace('"cohort": 2', '"cohort": null')),
        ("per_client.csv", lambda text: text + text.splitlines()[-1] + "\n"),
        ("partition.json", lambda text: "no JSON"),
        ("per_client.csv", lambda text: "nothing of the kind"),
        ("metrics.jsonl", lambda text: text.partition("\n")[0] + "\n"),
        ("metrics.jsonl", lambda text: ""),
    ],
)
def test_damaged_runs_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: Callable[[str], str]
) -> None:
    """Also files that can be read and have less, or more, than the run says."""
    folder = make_run(tmp_path / "a", [[(3, 10), (4, 10)]] * 3)
    text = (folder / name).read_text()
    (folder / name).write_text(change(text))
    assert main(["report", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and name in line


def test_a_killed_run_has_the_rounds_and_the_time_of_its_records(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [[(5, 10), (9, 10)]] * 3, rounds=8, complete=False, seconds=2.0)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "rounds": 0, "seconds": 0.0}))  # as a start writes it
    groups = group_runs([read_run(folder)])
    assert list(incomplete(groups[0].runs)) == [f"{folder} is not complete: 3 of 8 rounds are done"]
    assert row(groups[0], "last").figures["seconds_total"].mean == 6.0
