"""The command line as a user runs it: exit status, streams, from another folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import make_run
from support import slow_except

LAUNCH = Path(__file__).resolve().parents[1] / "launch.py"


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run launch.py in a folder."""
    command = [sys.executable, "-W", "error", str(LAUNCH), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_help(tmp_path: Path) -> None:
    done = started(tmp_path, "--help")
    assert done.returncode == 0 and not done.stderr
    for word in ("python launch.py [GROUP=NAME", "compare", "report", "export", "submit", "resume=last"):
        assert word in done.stdout


def test_a_mistake_ends_with_status_2_and_one_message(tmp_path: Path) -> None:
    done = started(tmp_path, "method=fedpox")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: method=fedpox: ") and len(done.stderr.splitlines()) == 1
    assert started(tmp_path, "--bogus").returncode == 2
    assert not list(tmp_path.iterdir())


def test_the_command_line_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(LAUNCH.parent)!r})\n"
        "from pflsim import cli\n"
        "assert cli.main(['--help']) == 0 and cli.main(['lr=0']) == 2 and cli.main(['method=no']) == 2\n"
        "heavy = {'torch', 'lightning', 'ray', 'numpy', 'scipy', 'torchvision'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


IMPORTED = ("wcwidth", "pandas", "yaml", "numpy", "jinja2", "mine")
"""Libraries that are installed, libraries that others import if they are, and one that no library knows."""


@pytest.mark.parametrize("command", slow_except(["report ."], ["report .", "compare .", "resume=.", "method=no"]))
@pytest.mark.slow
def test_nothing_is_imported_from_the_working_directory(command: str, tmp_path: Path) -> None:
    """A run folder may be somebody else's."""
    folder = make_run(tmp_path / "run", [[(5, 10), (6, 10)]] * 2)
    for name in IMPORTED:
        (folder / f"{name}.py").write_text(f"open('imported', 'w').write({name!r})")
    arguments = [sys.executable, "-m", "pflsim", *command.split()]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == (2 if "=" in command else 0), done.stderr
    assert not (folder / "imported").exists()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(("program", "executor"), [(["-m", "pflsim"], "ray"), ([str(LAUNCH)], "inline")])
def test_only_own_classes_are_found_in_the_working_directory(program: list[str], executor: str, tmp_path: Path) -> None:
    """Also by Ray's actors: a file in it is not imported in the place of a library."""
    for library in ("numpy", "torch", "yaml", "jinja2", "lightning", "lightning_modules", "ray_actors"):
        (tmp_path / f"{library}.py").write_text("raise SystemExit('from the working directory')\n")
    (tmp_path / "mine.py").write_text("from lightning_modules.nets.mlp import Mlp as Net\n\nclass Mine(Net): ...\n")
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "mine.yaml").write_text("_target_: mine.Mine\n")
    small = ["data=digits", "clients=2", "rounds=1", f"executor={executor}", "progress=quiet", "run_dir=run"]
    arguments = [sys.executable, *program, "--config-dir", "configs", "model=mine", *small]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["model"] == "mine"


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_it(tmp_path: Path) -> None:
    """The pipe closes after the first line, as with `| head -1`."""
    folder = tmp_path / "run"
    command = [sys.executable, str(LAUNCH), "executor=inline", "clients=3", "rounds=5", f"run_dir={folder}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait() == 0 and "Traceback" not in process.stderr.read()
    assert json.loads((folder / "summary.json").read_text())["complete"] is True
