"""Runs beside a paper's values: which runs are used, and the notes on the others."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import main, paper_table, read_published, render_paper
from pflsim.analysis.runs import Run, read_run
from pflsim.config.compose import CONFIGS, composed, composing
from pflsim.config.compose import to_settings as settings_of
from pflsim.errors import SettingsError
from pflsim.records.environment import write_environment
from pflsim.records.folder import write_config
from pflsim.records.summary import RunMeta
from pflsim.records.tracker import Tracker
from pflsim.types import EvalPhase, EvalRow, ModelKind, RoundRecord

NAME = "pfedcfr_table2_mnist"
ROUNDS = (((8, 10), (2, 4)), ((9, 10), (4, 4)), ((8, 10), (4, 4)))
"""Correct and total of two clients in three rounds: means 0.65, 0.95, 0.9."""
PHASES: dict[str, tuple[ModelKind, EvalPhase]] = {"fedavg": ("global", "received"), "fedalp": ("personal", "received")}


def made(
    folder: Path,
    *overrides: str,
    counts: Sequence[Any] = ROUNDS,
    complete: bool = True,
    other: ModelKind | None = None,
    before: Sequence[tuple[int, int]] = (),
) -> Run:
    """A run with settings as the command line would make them.

    Args:
        folder: its folder.
        overrides: of the command line.
        counts: correct and total by client and round.
        complete: whether it did all rounds.
        other: another model, that gets one less right.
        before: how many the personal model as received has right, by client and round.
    """
    with composing([CONFIGS]):
        settings = settings_of(composed([*overrides, f"run_dir={folder}"], [CONFIGS]))
    method = settings.names["method"]
    model, phase = PHASES.get(method, ("personal", "trained"))
    names = (method, settings.names["data"], "partition", "0" * 64, settings.names["model"])
    meta = RunMeta(*names, settings.clients, settings.rounds, settings.seed, model, phase)
    folder.mkdir()
    write_config(folder, asdict(settings))
    write_environment(folder)
    (folder / "partition.json").write_text(json.dumps({"hash": "0" * 64}))
    with Tracker(folder, meta) as tracker:
        for number, row in enumerate(counts, start=1):
            rows = [EvalRow(i, "test", model, phase, right, n, 0.5) for i, (right, n) in enumerate(row)]
            if other:
                of = meta.phase(other)
                rows += [EvalRow(i, "test", other, of, right - 1, n, 0.5) for i, (right, n) in enumerate(row)]
            if before:
                known = zip(before[number - 1], row, strict=True)
                rows += [
                    EvalRow(i, "test", model, "received", right, n, 0.5) for i, (right, (_, n)) in enumerate(known)
                ]
            tracker.round(RoundRecord(number, (0, 1), (), {0: 1, 1: 1}, tuple(rows), {"total": 1.0}))
        tracker.close(complete)
    return read_run(folder)


def lines(name: str, runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """The table's rows by their labels."""
    return {row[0]: row[1:] for row in paper_table(name, runs).table.rows}


def test_mean_and_spread_of_the_oracle_s_round(tmp_path: Path) -> None:
    """0.9 and 1.0 make 0.95 in round 2; the other seed has 0.85 in round 1."""
    runs = [
        made(tmp_path / "a", f"+experiment={NAME}"),
        made(tmp_path / "b", f"+experiment={NAME}", "seed=2", counts=[((7, 10), (4, 4)), ((1, 10), (4, 4))]),
    ]
    found = paper_table(NAME, runs)
    assert found.table.title.endswith("Table II, MNIST (DNN)")
    assert found.table.headers == ("row", "paper", "ours", "difference", "round\n(oracle)", "seeds")
    assert lines(NAME, runs)["pFedCFR"] == ("95.63 ± 0.08", "90.00 ± 7.07", "-5.63", "1–2", "0,2")
    assert lines(NAME, runs)["Ditto"] == ("95.30 ± 0.60", "—", "—", "—", "—")
    assert any("ORACLE" in note for note in found.table.notes)
    assert any("sample standard deviation over seeds" in note for note in found.table.notes)


def test_the_last_round_where_the_paper_says_so(tmp_path: Path) -> None:
    run = made(tmp_path / "a", "+experiment=pfedla_table1_cifar10", "method=local", "eval.received=false")
    assert lines("pfedla_table1_cifar10", [run])["Local Training"] == ("59.44 ± 0.40", "90.00", "+30.56", "3", "0")
    assert paper_table("pfedla_table1_cifar10", [run]).table.headers[4] == "round"


def test_both_phases_of_runs_that_evaluate_them(tmp_path: Path) -> None:
    """In the round that is best after training: the second, with 0.6 and 0.5 as received."""
    both = made(tmp_path / "a", f"+experiment={NAME}", "eval.received=true", before=[(6, 1), (6, 2), (8, 3)])
    one = made(tmp_path / "b", f"+experiment={NAME}", "seed=2", counts=ROUNDS[:1])
    found = paper_table(NAME, [both, one]).table
    assert found.headers[2:6] == ("ours", "difference", "received", "trained")
    rows = {row[0]: row for row in found.rows}
    assert rows["pFedCFR"][2:] == ("80.00 ± 21.21", "-15.63", "55.00", "80.00 ± 21.21", "1–2", "0,2")
    assert len({len(row) for row in found.rows}) == 1
    assert rows["FedAvg"][4:6] == ("—", "—")


def test_the_model_that_a_row_names(tmp_path: Path) -> None:
    run = made(tmp_path / "a", "+experiment=fedalp_table2_mnist", other="global")
    found = lines("fedalp_table2_mnist", [run])
    assert found["FedALP, MNIST-NN"][1:3] == ("95.00", "+0.54")
    assert found["FedALP_global, MNIST-NN"][1:3] == ("77.50", "-9.15")
    assert found["FedALP, MNIST-CNN"][1] == "—"


def test_commands_make_what_is_missing(tmp_path: Path) -> None:
    """Rows of one run share a command."""
    missing = paper_table(NAME, []).missing
    assert len(missing) == 6
    for number, (command, labels) in enumerate(missing.items()):
        run = made(tmp_path / str(number), *command.split()[1:])
        filled = [label for label, row in lines(NAME, [run]).items() if row[1] != "—"]
        assert filled == labels
        assert command not in paper_table(NAME, [run]).missing
    assert missing[f"pflsim +experiment={NAME} data.root=DIR"] == ["pFedCFR"]
    both = [*paper_table("fedalp_table2_mnist", []).missing.values()]
    assert both == [[f"FedALP_global, {net}", f"FedALP, {net}"] for net in ("MNIST-NN", "MNIST-CNN")]


@pytest.mark.parametrize(
    ("overrides", "complete", "said"),
    [
        (["rounds=20"], True, "rounds=20 instead of 100"),
        (
            ["momentum=0.9", "method.sigma=1.0"],
            True,
            "momentum=0.9 instead of 0.0, method.sigma=1.0 instead of 1000000.0",
        ),
        ([], False, "stopped after round 3 of 100"),
    ],
)
def test_runs_that_deviate_have_lines_of_their_own(
    overrides: list[str], complete: bool, said: str, tmp_path: Path
) -> None:
    run = made(tmp_path / "a", f"+experiment={NAME}", *overrides, complete=complete)
    found = lines(NAME, [run])
    assert {label for label, cells in found.items() if cells[1] != "—"} == {f"pFedCFR; {said}"}
    assert found[f"pFedCFR; {said}"][1] == "95.00"


def test_deviations_that_several_lines_share_are_a_note(tmp_path: Path) -> None:
    name, scaled = "pfedla_table1_cifar10", ["eval.received=false", "lr=0.1", "rounds=3"]
    runs = [
        made(tmp_path / "a", f"+experiment={name}", "method=local", *scaled),
        made(tmp_path / "b", f"+experiment={name}", "method=fedrep", *scaled, "momentum=0.9"),
        made(tmp_path / "c", f"+experiment={name}", "method=fedrep", "eval.received=false"),
    ]
    found = paper_table(name, runs).table
    labels = [row[0] for row in found.rows if row[2] != "—"]
    assert labels == ["Local Training *", "FedRep", "FedRep *; momentum=0.9 instead of 0.0"]
    assert "Local Training" not in [row[0] for row in found.rows]  # the line of the run has the paper's value
    assert found.notes[0].startswith("* with") and "lr=0.1 instead of 0.01, rounds=3 instead of 600" in found.notes[0]


def test_csv_names_all_deviations(tmp_path: Path) -> None:
    scaled = ["rounds=3", "lr=0.1", "momentum=0.9", "clients=7", "batch_size=3", "method.sigma=1.0"]
    runs = [made(tmp_path / str(seed), f"+experiment={NAME}", *scaled, f"seed={seed}") for seed in (0, 1)]
    found = render_paper(paper_table(NAME, runs), "csv")
    (line,) = (line for line in csv.DictReader(found.splitlines()) if line["ours"] != "—")
    assert all(f"{setting} instead of" in line["other settings"] for setting in scaled)
    assert line["row"].startswith("pFedCFR")


def test_runs_of_no_experiment_and_other_settings_are_passed_over(tmp_path: Path) -> None:
    run = made(tmp_path / "a", "data=digits")
    assert all(row[2] == "—" for row in paper_table(NAME, [run]).table.rows)


def test_settings_that_change_no_result_do_not_matter(tmp_path: Path) -> None:
    free = ["executor=inline", "data.root=/elsewhere", "checkpoint.every=5", "trace.rounds=[1]", "lockstep=false"]
    run = made(tmp_path / "a", f"+experiment={NAME}", *free, "eval.every=5")
    found = paper_table(NAME, [run])
    assert lines(NAME, [run])["pFedCFR"][1] == "95.00"
    assert any("a: every 5 rounds" in note for note in found.table.notes)


def test_quick_runs_are_not_the_paper_s(tmp_path: Path) -> None:
    found = lines(NAME, [made(tmp_path / "a", f"+experiment={NAME}", "quick=true")])
    (label,) = (label for label, cells in found.items() if cells[1] != "—")
    assert "rounds=30 instead of 100" in label


def test_the_file_of_a_paper(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "x.toml").write_text(
        'paper = "P"\nround = "last"\nnotes = ["A"]\n[x]\nwhere = "W"\nnotes = ["B"]\n'
        'rows = [{label = "R", value = 50, std = 25, command = "seed=1"}]\n'
    )
    published = read_published("x", tmp_path)
    assert (published.title, published.notes) == ("P; W", ("A", "B"))
    assert (published.rows[0].value, published.rows[0].std) == (50, 25)
    with pytest.raises(SettingsError, match="valid: x"):
        read_published("y", tmp_path)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fedfcd_figure6"]) == 2
    assert "fedfcd_figure6: no paper prints values" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    made(tmp_path / "runs" / "a", f"+experiment={NAME}")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "config.yaml").write_text("seed: 0\n")
    assert main([NAME]) == 0
    output = capsys.readouterr()
    assert "warning: " in output.err and "broken" in output.err
    (ours,) = (line.split() for line in output.out.splitlines() if line.startswith("pFedCFR"))
    assert ours == ["pFedCFR", "95.63", "±", "0.08", "95.00", "-0.63", "2", "0"]
    assert "\n# FedAvg\npflsim method=fedavg data=mnist " in output.out
    for suffix in ("md", "tex", "csv", "txt"):
        assert main([NAME, "runs", "--out", f"t.{suffix}"]) == 0
        assert "95.00" in (tmp_path / f"t.{suffix}").read_text()
