"""Run folders: their names, their lock and their log, and the run that was started last."""

import faulthandler
import logging
import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from pflsim.errors import SettingsError
from pflsim.records.folder import (
    LOG,
    PACKAGES,
    STATUS,
    create_run_folder,
    last_run,
    report_death,
    run_lock,
    run_log,
    run_status,
)
from pflsim.records.older_settings import saved_config, with_older

LOGGER = logging.getLogger("ray_actors.made_up")


def test_the_folder_is_named_after_the_run_and_the_next_gets_a_number(tmp_path, monkeypatch):
    now = datetime(2025, 3, 4, 5, 6, 7)
    monkeypatch.setattr("pflsim.records.folder.datetime", SimpleNamespace(now=lambda: now))
    made = [create_run_folder("pfedcfr", "my data/x", 3, root=tmp_path / "runs") for _ in range(3)]
    name = "20250304-050607-pfedcfr-my_data_x-s3"
    assert [folder.name for folder in made] == [name, f"{name}-2", f"{name}-3"]


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "old.txt").write_text("precious")
    with pytest.raises(SettingsError, match="is not empty"):
        create_run_folder("m", "d", 0, run_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["old.txt"]


def test_a_folder_in_use_is_refused_until_it_is_free(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(SettingsError, match=f"{tmp_path} is in use"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass
    assert os.listdir(tmp_path) == [".lock"]


DIES = """
import os, sys
from pathlib import Path
from pflsim.records.folder import report_death, run_lock, run_status
folder = Path(sys.argv[1])
with run_lock(folder), run_status(folder) as write_step:
    for number in range(9):
        write_step(f"round {number} of client {'7' * (9 - number)}")
    report_death(folder)
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize(("signum", "why"), [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGKILL, "killed")])
def test_a_folder_says_how_its_process_died(
    signum: int, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In which step, with the stack if there is one, and how to continue; not while a run works in it or afterwards."""
    command = [sys.executable, "-c", DIES, str(tmp_path), str(signum)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == -signum and not done.stderr
    with run_log(tmp_path):
        pass
    report_death(tmp_path)
    (said,) = caplog.messages
    assert said.count("\n") == 0 and "round 8 of client 7:" in said and why in said and f"resume={tmp_path}" in said
    assert said in (log := (tmp_path / LOG).read_text())
    assert ("line 10" in log) == (str(tmp_path / STATUS) in said) == (why[0] == "S")
    with run_lock(tmp_path), run_status(tmp_path):
        report_death(tmp_path)
    report_death(tmp_path)
    assert caplog.messages == [said] and not (tmp_path / STATUS).exists()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_that_ends_by_itself_leaves_no_status(enabled: bool, tmp_path: Path) -> None:
    """Also after an error. Stacks are written elsewhere then, if they were before."""
    before = faulthandler.is_enabled()
    try:
        faulthandler.enable(sys.__stderr__) if enabled else faulthandler.disable()
        with pytest.raises(KeyboardInterrupt), run_lock(tmp_path), run_status(tmp_path):
            assert faulthandler.is_enabled()
            raise KeyboardInterrupt
        assert faulthandler.is_enabled() == enabled and os.listdir(tmp_path) == [".lock"]
    finally:
        faulthandler.enable(sys.__stderr__) if before else faulthandler.disable()


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


def test_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """A warning has a prefix on standard error, a note has none, and DEBUG goes to the file only."""
    with run_log(tmp_path):
        assert not (tmp_path / LOG).exists()
        LOGGER.warning("100% broken")
        LOGGER.info("a note")
        LOGGER.debug("the end")
    assert capsys.readouterr().err == "warning: 100% broken\na note\n"
    assert [line[20:] for line in (tmp_path / LOG).read_text().splitlines()] == ["100% broken", "a note", "the end"]
    assert not caplog.messages, "the root logger prints them again"


@pytest.mark.parametrize(("held", "fit"), [(0, None), (1, "all"), (["a"], "all")])
def test_an_older_run_with_new_clients_has_the_encoder_of_all_clients(
    held: object, fit: object, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"eval": {"holdout_clients": held}, "seed": 0}))
    assert saved_config(tmp_path / "config.yaml")["eval"].get("fit") == fit
    assert with_older({"eval.holdout_clients": held, "seed": 0}).get("eval.fit") == fit
    assert with_older({"eval.holdout_clients": held, "eval.fit": "training"})["eval.fit"] == "training"


def test_each_run_has_its_own_file_and_nothing_remains(tmp_path: Path) -> None:
    before = [(logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in PACKAGES]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with run_log(tmp_path / name):
            LOGGER.warning(name)
    assert [(tmp_path / name / LOG).read_text().split()[-1] for name in ("one", "two")] == ["one", "two"]
    assert before == [(logging.getLogger(name).level, logging.getLogger(name).handlers) for name in PACKAGES]
