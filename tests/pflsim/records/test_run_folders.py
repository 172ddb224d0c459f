"""Locking a run folder, and finding the run that was started last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pflsim.errors import SettingsError
from pflsim.records.folder import last_run, run_lock


def test_a_folder_in_use_is_refused_until_it_is_free(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(SettingsError, match=f"{tmp_path} is in use"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass
    assert os.listdir(tmp_path) == [".lock"]


def make(root: Path, name: str, config: str = "seed: 0\n") -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "config.yaml").write_text(config)
    return root / name


def test_the_last_run_is_the_one_that_started_last(tmp_path: Path) -> None:
    """By the time in the name, then by the number behind it, which is no text: 10 comes after 9."""
    newest = make(tmp_path, "20250304-050607-fedavg-digits-s0-10")
    for number in (2, 9):
        make(tmp_path, f"20250304-050607-fedavg-digits-s0-{number}")
    for name in ("20250304-050607-pfedhn-digits-s0", "20250304-050606-z-z-s0-99", "20241231-235959-z-z-s9"):
        make(tmp_path, name)
    assert last_run(tmp_path) == newest
    later = make(tmp_path, "20250304-050608-a-a.b_c-s-1")
    assert last_run(tmp_path) == later
    again = make(tmp_path, "20250304-050608-a-a.b_c-s-1-2")
    assert last_run(str(tmp_path)) == again


def test_what_is_no_run_does_not_count(tmp_path: Path) -> None:
    run = make(tmp_path, "20250304-050607-fedavg-digits-s0")
    make(tmp_path, "20250304-050608-fedavg-digits-s0", config="")  # claimed, and then nothing came of it
    make(tmp_path, "my_run")
    make(tmp_path, "20990101-000000")
    assert last_run(tmp_path) == run


def test_no_run_is_an_error_with_a_message(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(SettingsError, match=f"there is no run folder in {root}"):
            last_run(root)
    make(tmp_path, "mine")
    with pytest.raises(SettingsError, match=f"{tmp_path}/mine"):
        last_run(tmp_path)
