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


def test_a_folder_that_cannot_have_a_lock_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be written to: No such file"), run_lock(tmp_path / "none"):
        pass
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="cannot be written to"), run_lock(tmp_path):
        pass


def make(root: Path, name: str, config: str | None = "seed: 0\n", summary: str | None = None) -> Path:
    (root / name).mkdir(parents=True)
    if config is not None:
        (root / name / "config.yaml").write_text(config)
    if summary is not None:
        (root / name / "summary.json").write_text(summary)
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
    make(tmp_path, "20250304-050609-fedavg-digits-s0", config=None)
    make(tmp_path, "my_run")
    make(tmp_path, "20990101-000000")
    (tmp_path / "20990101-000000-a-b-s0").write_text("a file")
    assert last_run(tmp_path) == run


def test_no_run_is_an_error_with_a_message(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(SettingsError, match=f"there is no run folder in {root}"):
            last_run(root)
    make(tmp_path, "mine")
    with pytest.raises(SettingsError, match=f"no run folder in {tmp_path} with a default name; .*{tmp_path}/mine$"):
        last_run(tmp_path)
