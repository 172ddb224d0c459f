"""Log records of a run: in run.log and on standard error, once each."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pflsim.records.folder import LOG, PACKAGES, run_log

LOGGER = logging.getLogger("ray_actors.made_up")


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


def test_each_run_has_its_own_file_and_nothing_remains(tmp_path: Path) -> None:
    before = [(logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in PACKAGES]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with run_log(tmp_path / name):
            LOGGER.warning(name)
    assert [(tmp_path / name / LOG).read_text().split()[-1] for name in ("one", "two")] == ["one", "two"]
    assert before == [(logging.getLogger(name).level, logging.getLogger(name).handlers) for name in PACKAGES]
