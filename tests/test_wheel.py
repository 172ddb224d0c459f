"""The wheel: what it contains, and its commands in a new environment, from an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from benchmarks.tools import loopback

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pflsim", "lightning_modules", "ray_actors")
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
ON_RAY = [path for path in NOTEBOOKS if path.stem == "own_components"]
INLINE = [path for path in NOTEBOOKS if path not in ON_RAY]
EXECUTE = """
import os, sys
from pathlib import Path
import nbformat
from nbclient import NotebookClient
cells, parts = [], {}
for path in map(Path, sys.argv[1:]):
    os.mkdir(path.stem)
    empty = f"%reset -f\\nimport os\\nos.chdir({os.path.abspath(path.stem)!r})\\ndel os"
    parts[path.stem] = nbformat.read(path, 4).cells
    cells += [nbformat.v4.new_code_cell(empty), *parts[path.stem]]
NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=600, kernel_name="python3").execute()
for name, part in parts.items():
    outputs = [output for cell in part for output in cell.get("outputs", [])]
    assert any("text/html" in output.get("data", {}) for output in outputs), name
    assert os.path.isdir(f"{name}/runs"), name
"""
"""One kernel for all notebooks, which imports the libraries once; each has a folder, and no variable of another."""
SMALL = ["clients=3", "rounds=3", "checkpoint.every=1"]


def new_environment(folder: Path) -> Path:
    """Return the Python of a new environment that has the libraries of this one, but not pflsim."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # An editable pflsim is not among them: Python ignores .pth files in folders that another .pth file names.
    libraries = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "libraries.pth").write_text("\n".join(libraries))
    python = folder / "bin" / "python"
    found = [python, "-c", f"import importlib.util as u; print(any(map(u.find_spec, {PACKAGES})))"]
    assert run(folder, *found) == "False\n"
    return python


def run(folder: Path, *command: str | Path) -> str:
    """Run a command in a folder; return what it prints."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(ROOT, sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `pflsim` of an environment in which the wheel is installed."""
    python = new_environment(tmp_path_factory.mktemp("installed"))
    options = ["--no-deps", "--no-index", "--ignore-installed"]
    run(ROOT, sys.executable, "-m", "pip", "--python", python, "install", *options, wheel)
    return python.with_name("pflsim")


@pytest.mark.xdist_group("wheel")
def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
    packages = {path.relative_to(ROOT).as_posix() for path in files if path.is_file() and path.suffix != ".pyc"}
    configs = {f"pflsim/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "configs").rglob("*") if p.is_file()}
    assert names == packages | configs
    assert {"pflsim/analysis/report/templates/report.html", "pflsim/configs/config.yaml"} <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    project, found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], HeaderParser().parsestr(metadata)
    assert found["Author"] == "The pflsim authors" and found["Version"] == project["version"]
    assert len(found.get_all("Project-URL", [])) == len(project["urls"]) == 4


@pytest.mark.ray
def test_commands_in_an_empty_folder(program: Path, tmp_path: Path) -> None:
    assert "resume with" not in run(tmp_path, program, *SMALL, "run_dir=runs/default")
    swept = run(tmp_path, program, "-m", "seed=0,1", "executor=inline", "run_dir=runs/${seed}", *SMALL)
    assert swept.endswith("\nmore formats: pflsim compare --help\n")
    assert "pFedCFR" in run(tmp_path, program, "compare", "runs")
    run(tmp_path, program, "report", "runs")
    assert "pflsim -m seed=0,1 " in (tmp_path / "report.html").read_text()
    run(tmp_path, program, "export", "runs/default", "--client", "2")
    assert (tmp_path / "runs" / "default" / "export" / "client_2.safetensors").is_file()
    counts = (tmp_path / "runs" / "default" / "per_client.csv").read_bytes()
    shutil.rmtree(tmp_path / "runs" / "default" / "checkpoints" / "round_0003")  # as if the run had been killed
    (tmp_path / "runs" / "default" / "summary.json").unlink()
    assert "round 3/3" in run(tmp_path, program, "resume=runs/default", "executor=inline")
    assert (tmp_path / "runs" / "default" / "per_client.csv").read_bytes() == counts
    module = run(tmp_path, program.with_name("python"), "-m", "pflsim", "--help")
    assert module.replace("python -m pflsim", "pflsim") == run(tmp_path, program, "--help")


@pytest.mark.xdist_group("wheel")
def test_dockerfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its RUN commands install the program from what it copies; libraries are those of this environment."""
    text, built = (ROOT / "Dockerfile").read_text(encoding="utf-8"), tmp_path / "pflsim"
    built.mkdir()
    for *sources, target in map(str.split, re.findall(r"^COPY (.*)$", text, re.MULTILINE)):
        for source in sources:
            run(ROOT, "cp", "-r", source, built / target)
    python = new_environment(tmp_path / "installed")
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip reads this as --no-build-isolation
    for name, value in re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE):
        monkeypatch.setenv(name, value)
    for command in re.findall(r"^RUN ((?:.*\\\n)*.*)$", text, re.MULTILINE):
        run(built, "sh", "-ec", command)
    (entry,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', text, re.MULTILINE)
    assert "Usage:\n  pflsim " in run(tmp_path, python.with_name(entry), "--help")


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param(INLINE, marks=pytest.mark.xdist_group("wheel"), id="inline"),
        pytest.param(ON_RAY, marks=pytest.mark.ray, id="on Ray"),
    ],
)
def test_notebooks_in_an_empty_folder(program: Path, tmp_path: Path, paths: list[Path]) -> None:
    run(tmp_path, program.with_name("python"), "-c", EXECUTE, *paths)


@pytest.mark.ray
def test_a_job(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of the cluster has no pflsim: everything is uploaded, with a class of the user."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(loopback, "SHARED", (*loopback.SHARED, program.parents[1], tmp_path))
    python, folder = new_environment(tmp_path / "cluster"), tmp_path / "folder"
    (folder / "configs" / "model").mkdir(parents=True)
    (folder / "configs" / "model" / "mine.yaml").write_text("_target_: mine.Mine\n")
    (folder / "mine.py").write_text("from lightning_modules.nets.mlp import Mlp as Net\n\nclass Mine(Net): ...\n")
    with loopback.Cluster(1) as cluster:
        cluster.start(2)

        def started(*words: str) -> str:
            command = cluster.head.inside(["env", f"--chdir={folder}", str(program), *words])
            done = subprocess.run(
                command, env={**cluster.env, "HOME": str(cluster.head.inner_home)}, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        to, mine = ["--address", cluster.http_address], ["--config-dir", "configs", "model=mine"]
        said = started("submit", *to, "--python", str(python), "--id", "job", *mine, *SMALL, f"run_dir={folder}/run")
        assert f"ray job logs --follow job --address {cluster.http_address}" in said
        log, _ = cluster.command(loopback.RAY, "job", "logs", "--follow", "job", *to).communicate(timeout=180)
        assert (folder / "run" / "summary.json").is_file(), log
