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


def test_the_last_run_is_the_one_that_started_last(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(SettingsError, match=f"there is no run folder in {root}"):
            last_run(root)
    for number, name in enumerate(("20250304-050607-a-b-s0", "mine", "20250304-050607-a-b-s0-2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "environment.json").touch()
        os.utime(tmp_path / name / "environment.json", (number, number))
    (tmp_path / "claimed").mkdir()
    assert last_run(str(tmp_path)) == tmp_path / "20250304-050607-a-b-s0-2"
    os.utime(tmp_path / "mine" / "environment.json", (9, 9))
    assert last_run(tmp_path) == tmp_path / "mine"
