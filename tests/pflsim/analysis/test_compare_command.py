"""`pflsim compare`, in this process."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import make_run

from pflsim.analysis.compare import main

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs the command; returns its status and what it said on both streams."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
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
    assert "Differences to local" in out and "examples:" in said("--help")[1]
    assert said(f"{folder}/*-?")[1] == said(folder / "fedavg-0", folder / "fedavg-1", f"{folder}/local*")[1] == out
    alone = said(f"{folder}/local*")[1]
    assert alone.count("\nlocal ") == 1 and "Differences" not in alone


@pytest.mark.parametrize(
    ("suffix", "start"), [("txt", "Test acc"), ("md", "Test acc"), ("tex", "% needs"), ("csv", "label,")]
)
def test_files(said: Said, folder: Path, tmp_path: Path, suffix: str, start: str) -> None:
    file = tmp_path / f"table.{suffix}"
    status, out, _ = said(folder, "--out", file)
    assert (status, out) == (0, f"written to {file}\n")
    assert file.read_text(encoding="utf-8").startswith(start) and file.read_text(encoding="utf-8").endswith("\n")


@pytest.mark.parametrize(
    ("against", "suffix", "magic"),
    [("rounds", "png", b"\x89PNG"), ("bytes", "svg", b"<?xml"), ("seconds", "pdf", b"%PDF")],
)
def test_curves(said: Said, folder: Path, tmp_path: Path, against: str, suffix: str, magic: bytes) -> None:
    file = tmp_path / f"curves.{suffix}"
    status, out, err = said(folder, "--curves", file, "--against", against)
    assert (status, err) == (0, f"curves in {file}\n") and "Differences" in out
    assert file.read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["--at", "best_val"], "--at best_val"),
        (["--reference", "fedprox"], "--reference fedprox: valid: fedavg, local"),
        (["--curves", "curves.jpg"], ".png, .svg, .pdf"),
        (["--out", "table.doc"], "--out table.doc"),
        (["--out", "/not/there.md"], "/not/there.md"),
        (["--target", "90"], "--target"),
        (["--against", "bytes"], "--against needs --curves"),
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
    stopped = make_run(folder / "ditto-1", [[(9, 10), (9, 10)]], method="ditto", complete=False, rounds=2)
    status, out, err = said(folder, "--reference", "local")
    assert status == 0 and "2 sets" in err
    assert out.count("Test accuracy on") == 2 and f"CAUTION: {stopped} is not complete" in " ".join(out.split())
    assert "Differences to local" in out and "Differences to ditto" in out  # the second set has no local
    status, out, err = said(folder, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert status == 0 and [row["label"] for row in rows] == ["ditto", "fedavg", "local", "ditto", "fedavg"]
    assert len({row["comparison"] for row in rows[:3]}) == len({row["comparison"] for row in rows[3:]}) == 1
    assert rows[0]["comparison"] != rows[3]["comparison"]
    status, out, err = said(folder, "--curves", "curves.png")
    assert status == 2 and out == "" and err.startswith("error: --curves")


def test_a_broken_run(said: Said, folder: Path) -> None:
    (folder / "local-0/metrics.jsonl").write_text("{}\n")
    status, _, err = said(folder)
    assert status == 2 and err.startswith(f"error: {folder}/local-0/metrics.jsonl cannot be read")


def test_a_line_that_was_cut_off_is_left_out(said: Said, folder: Path) -> None:
    path = folder / "local-0/per_client.csv"
    whole = path.read_text()
    path.write_text(whole + "3,0,test,personal,tr")
    assert said(folder)[0] == 0
    path.write_text(whole.removesuffix("\n"))
    status, out, err = said(folder)
    assert (status, out) == (2, "") and err.startswith(f"error: {folder}/local-0: per_client.csv has 1 clients")
