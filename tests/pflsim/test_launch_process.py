"""The command line as a user runs it: exit status, streams, from another folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched import LAUNCH, launched
from made_runs import make_run

from pflsim.config.help import usage
from pflsim.config.names import program, started_as


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder."""
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def test_help_and_a_mistake(tmp_path: Path) -> None:
    """Status 0 or 2, and one message."""
    launch = "-W", "error", str(LAUNCH), "progress=none"
    done = python(tmp_path, *launch, "--help")
    assert done.returncode == 0 and not done.stderr
    for word in ("python launch.py [GROUP=NAME", "compare", "report", "export", "submit", "resume=last"):
        assert word in done.stdout
    done = python(tmp_path, *launch, "method=fedpox")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: method=fedpox: ") and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


IMPORTED = ("wcwidth", "pandas", "yaml", "numpy", "jinja2", "mine")
"""Libraries that are installed, libraries that others import if they are, and one that no library knows."""


@pytest.mark.parametrize("command", ["report .", "compare .", "resume=.", "method=no"])
@pytest.mark.slow
def test_nothing_is_imported_from_the_working_directory(command: str, tmp_path: Path) -> None:
    """A run folder may be somebody else's."""
    folder = make_run(tmp_path / "run", [[(5, 10), (6, 10)]] * 2, executor="inline")
    for name in IMPORTED:
        (folder / f"{name}.py").write_text(f"open('imported', 'w').write({name!r})")
    done = python(folder, "-m", "pflsim", *command.split())
    assert done.returncode == (2 if "=" in command else 0), done.stderr
    assert not (folder / "imported").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "executor"), [pytest.param(["-m", "pflsim"], "ray", marks=pytest.mark.ray), ([str(LAUNCH)], "inline")]
)
def test_only_own_classes_are_found_in_the_working_directory(program: list[str], executor: str, tmp_path: Path) -> None:
    """Also by Ray's actors: a file in it is not imported in the place of a library."""
    for library in ("numpy", "torch", "yaml", "jinja2", "lightning", "lightning_modules", "ray_actors"):
        (tmp_path / f"{library}.py").write_text("raise SystemExit('from the working directory')\n")
    (tmp_path / "mine.py").write_text("from lightning_modules.nets.mlp import Mlp as Net\n\nclass Mine(Net): ...\n")
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "mine.yaml").write_text("_target_: mine.Mine\n")
    small = ["data=digits", "clients=2", "rounds=1", f"executor={executor}", "progress=quiet", "run_dir=run"]
    done = python(tmp_path, *program, "--config-dir", "configs", "model=mine", *small)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["model"] == "mine"


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_it(tmp_path: Path) -> None:
    """The pipe closes after the first line, as with `| head -1`."""
    folder = tmp_path / "run"
    with launched(tmp_path, "executor=inline", "clients=3", "rounds=5", f"run_dir={folder}") as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait() == 0 and "Traceback" not in process.stderr.read()
    assert json.loads((folder / "summary.json").read_text())["complete"] is True


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
