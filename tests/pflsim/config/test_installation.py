"""The command that the user typed."""

from __future__ import annotations

import sys

import pytest

from pflsim.config.help import usage
from pflsim.config.names import program, started_as


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("launch.py", "python launch.py"),
        ("/env/lib/python3.11/site-packages/pflsim/__main__.py", "python -m pflsim"),
        ("/env/bin/pflsim", "pflsim"),
        ("/env/lib/python3.11/site-packages/pytest/__main__.py", None),
        ("-c", None),
    ],
)
def test_commands_are_named_as_the_user_typed_them(
    script: str, command: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "seed=1"])
    assert started_as(script) == command
    assert program() == (command or "pflsim")
    assert f"\n  {program()} resume=last  " in usage([])
