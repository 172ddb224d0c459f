"""Locking a run folder, and finding the run that was started last."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pflsim.errors import SettingsError
from pflsim.records.folder import last_run, run_lock


def test_a_folder_in_use_is_refused_until_it_is_free(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        with (
            pytest.raises(SettingsError, match=f"run folder {tmp_path} is in use by another process"),
            run_lock(tmp_path),
        ):
            pass
        with pytest.raises(SettingsError), run_lock(tmp_path):
            pass
    with run_lock(tmp_path):
        pass
    assert os.listdir(tmp_path) == [".lock"]


def test_the_lock_goes_with_the_process_however_it_ends(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from pflsim.records.folder import run_lock\n"
    code += "with run_lock(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "mine\n"
    with pytest.raises(SettingsError, match="in use"), run_lock(tmp_path):
        pass
    other.kill()
    other.communicate()
    with run_lock(tmp_path):
        pass


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL])
def test_where_there_are_no_locks_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def unknown(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unknown)
    with run_lock(tmp_path), run_lock(tmp_path):
        pass


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
