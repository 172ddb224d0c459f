"""The command that the user typed, and packages that hide those of pflsim."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from pflsim.config.help import usage
from pflsim.config.installation import PACKAGES, check_packages, program, started_as
from pflsim.errors import SettingsError


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("launch.py", "python launch.py"),
        ("/a b/launch.py", "python launch.py"),
        ("/env/lib/python3.11/site-packages/pflsim/__main__.py", "python -m pflsim"),
        ("/env/bin/pflsim", "pflsim"),
        ("/env/lib/python3.11/site-packages/pytest/__main__.py", None),
        ("/mine/train.py", None),
        ("-c", None),
        ("", None),
    ],
)
def test_commands_are_named_as_the_user_typed_them(
    script: str, command: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "seed=1"])
    assert started_as(script) == command
    assert program() == (command or "pflsim")
    assert f"\n  {program()} resume=last  " in usage([])


def test_packages_that_are_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in PACKAGES:
        (tmp_path / name).mkdir()  # without __init__.py, Python prefers ours
    check_packages()
    for name in PACKAGES:
        for file, named in ((f"{name}/__init__.py", name), (f"{name}.py", f"{name}.py")):
            (tmp_path / file).write_text("")
            importlib.invalidate_caches()
            with pytest.raises(SettingsError, match=f"^{tmp_path / named} hides the package {name} of pflsim: rename"):
                check_packages()
            (tmp_path / file).unlink()
            importlib.invalidate_caches()
    monkeypatch.setattr(sys, "path", [*sys.path[1:], str(tmp_path)])
    (tmp_path / "ray_actors.py").write_text("")
    importlib.invalidate_caches()
    check_packages()
