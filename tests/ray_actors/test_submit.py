"""Submitting: what is checked before anything is uploaded, what arrives, and the command that the job runs."""

import json
import os
import re
import shlex
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray.job_submission

from benchmarks.tools.loopback import RAY, Cluster
from pflsim import cli
from pflsim.config.names import FOLDER, PACKAGES
from pflsim.records.environment import code
from ray_actors import submit
from ray_actors.submit import dashboard

pytestmark = pytest.mark.slow

MODEL = "from lightning_modules.nets.mlp import Mlp as Net\n\nclass Mine(Net): ...\n"


class FakeClient:
    """In the place of Ray's JobSubmissionClient: it unpacks the upload, and a shell runs the command."""

    def __init__(self, folder: Path):
        self.folder, self.submitted, self.printed = folder, list[dict[str, Any]](), list[str]()
        self.refusal: Exception | None = None

    def submit_job(self, **settings: Any) -> str:
        if self.refusal:
            raise self.refusal
        self.submitted.append(settings)
        with zipfile.ZipFile(settings["runtime_env"]["working_dir"]) as archive:
            archive.extractall(self.code)
        done = subprocess.run(
            settings["entrypoint"], shell=True, cwd=self.code, env={**os.environ, "HOME": str(self.folder)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        self.printed = done.stdout.splitlines()
        return settings["submission_id"] or "chosen"

    @property
    def code(self) -> Path:
        """The unpacked upload of the last job."""
        return self.folder / f"code{len(self.submitted)}"

    @property
    def uploaded(self) -> set[str]:
        """The user's files in the last upload."""
        names = {path.relative_to(self.code).as_posix() for path in self.code.rglob("*") if path.is_file()}
        return {name for name in names if name.partition("/")[0] not in PACKAGES}


@pytest.fixture
def client(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    for name in submit.ADDRESS_VARIABLES:
        monkeypatch.setenv(name, "")
    client = FakeClient(tmp_path_factory.mktemp("cluster"))
    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", lambda address: client)
    return client


@pytest.fixture
def driver(here: Path, client: FakeClient) -> Callable[..., list[str]]:
    """Submits, and returns the working directory and the arguments of `python -m pflsim` in the job."""
    python = client.folder / "a python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n')
    python.chmod(0o755)

    def submitted(*arguments: str) -> list[str]:
        assert cli.main(["submit", "--python", str(python), *arguments]) == 0
        home, dash, module, *given = client.printed
        assert (dash, module) == ("-m", "pflsim")
        return [home, *given]

    return submitted


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_the_driver_gets_what_was_typed(driver: Callable[..., list[str]], client: FakeClient) -> None:
    home = str(client.folder / "pflsim-runs")
    odd = [
        'run_dir="runs/it\'s a b-$(id)-`id`-$HOME;&|"',
        *("trace.rounds=[1,2]", "on_client_error=retry(2)", "lr=${method.mu}"),
    ]
    assert driver("method=fedprox", *odd) == [home, "method=fedprox", *odd, "progress=plain", "ray_address=auto"]
    assert driver("-m", "seed=0,1") == [home, "-m", "seed=0,1", "progress=plain", "ray_address=auto"]
    given = ["progress=quiet", "ray_address=10.0.0.1:6379"]
    assert driver(*given) == [home, *given]
    assert driver("executor=inline") == [home, "executor=inline", "progress=plain"]
    driver("data=mnist", "data.download=true")
    resumed = ["resume=last", "placement.gpus=2", "data.root=/there"]
    assert driver(*resumed) == [home, *resumed, "progress=plain", "ray_address=auto"]
    there = str(client.folder / "a place's $x")
    assert driver("--home", there)[0] == there


def test_what_is_asked_of_the_cluster(
    driver: Callable[..., list[str]], client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    driver("--address", "http://h:1/")
    (asked,) = client.submitted
    names = ("submission_id", "entrypoint_num_cpus", "entrypoint_num_gpus", "entrypoint_resources")
    assert [asked[name] for name in names] == [None, 1, None, None]
    environment = asked["runtime_env"]["env_vars"]
    assert (environment["RAY_JOB_STOP_WAIT_TIME_S"], environment["PFLSIM_JOB"]) == ("600", "pflsim submit")
    assert json.loads(environment["PFLSIM_CODE"]) == code()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("job chosen: ")
    assert [line.strip() for line in lines[1:]] == [
        f"ray job {words} chosen --address http://h:1" for words in ("status", "logs --follow", "stop")
    ]
    driver("--id", "mine", "--driver-cpus", "0.5", "--driver-resource", "big=1", "--driver-resource", "GPU=2")
    assert [client.submitted[1][name] for name in names] == ["mine", 0.5, 2, {"big": 1}]


GOOD = ("mine.py", "a b/[ü].py", "mine/build/x.py", "mine/data/x.py", "lists/config.yaml")
BAD = (
    *(".git/config", ".env", "sub/.env.local", ".ssh/id", "env/pyvenv.cfg", "env/lib/x.py", "mine/__pycache__/x.pyc"),
    *("runs/a/config.yaml", "data/x", "results/r/config.yaml", "results/r/environment.json", "results/r/checkpoints/x"),
    *("notes/old/x", "n.ipynb", "images/1.png"),
)


def test_which_files_are_uploaded(
    driver: Callable[..., list[str]], client: FakeClient, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, *GOOD, *BAD, "key.pem", "sub/id_rsa")
    (here / "link").symlink_to("/etc")
    excluded = ("--exclude", "*.ipynb", "--exclude", "notes/old/")
    driver(*excluded, "data=image_folder", f"data.root={here}/images", "model=mlp", "run_dir=/x")
    assert client.uploaded == {*GOOD}
    assert capsys.readouterr().err.splitlines()[0].endswith(": key.pem, link, sub/id_rsa")
    ours = {path.relative_to(FOLDER) for name in PACKAGES for path in (FOLDER / name).rglob("*.py")}
    assert ours == {path.relative_to(client.code) for name in PACKAGES for path in (client.code / name).rglob("*.py")}
    assert (client.code / "pflsim" / "configs" / "method" / "fedavg.yaml").is_file()


def test_an_own_config_and_class_go_along(
    driver: Callable[..., list[str]], client: FakeClient, refused: Callable[..., str]
) -> None:
    Path("configs/model").mkdir(parents=True)
    Path("configs/model/mine.yaml").write_text("_target_: submitted_mine.Mine\n")
    Path("submitted_mine.py").write_text(MODEL)
    mine = ["--config-dir", "configs", "model=mine"]
    assert driver(*mine)[1:3] == ["--config-dir", str(client.code / "configs")]
    assert client.uploaded == {"configs/model/mine.yaml", "submitted_mine.py"}
    for excluded, named in (("configs", "--config-dir configs"), ("submitted*", "submitted_mine is ")):
        assert refused("submit", "--exclude", excluded, *mine).startswith(f"error: {named}")


MISTAKES = {
    "clients=abc": "clients=",
    "-m seed=0,1 rounds=5,0": "rounds=0",
    "--config-dir /usr": "--config-dir /usr",
    "data=mnist": "data.root=data",
    "data=npz data.path=x.npz": "data.path=x.npz",
    "resume=last clients=3": "clients",
    "resume=last placement.actor=3": "placement.actors",
    "--home runs": "--home runs",
    "--address head:6379": "--address head:6379",
}


@pytest.mark.parametrize(("words", "said"), MISTAKES.items())
def test_mistakes_are_found_before_anything_is_uploaded(
    here: Path, client: FakeClient, refused: Callable[..., str], words: str, said: str
) -> None:
    error = refused("submit", *words.split())
    assert said in error and error.startswith("error: ") and not client.submitted


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [([], True), (["run_dir=x"], True), (["run_dir=/x"], False), (["run_dir=s3://b/x"], False), (["resume=x"], False)],
)
def test_results_that_stay_on_the_node(
    driver: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], warned: bool
) -> None:
    driver(*arguments)
    assert ("warning: " in capsys.readouterr().err) == warned
    driver(*arguments, "--home", str(tmp_path / "shared"))
    assert not capsys.readouterr().err


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    for variable, given, expected in (
        ("", "https://h/ray/", "https://h/ray"),
        ("http://head:8265", None, "http://head:8265"),
        ("http://head:8265", "http://other:1", "http://other:1"),
        ("10.0.0.1:6379", None, "http://127.0.0.1:8265"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", variable)
        assert dashboard(given) == expected


@pytest.mark.ray
def test_a_job_is_stopped_and_another_one_resumes_it() -> None:
    """On a Ray with a dashboard, with a class of the user and the commands that are printed."""
    with Cluster(1) as cluster:
        cluster.start(2)
        head = cluster.head
        (head.home / "mine.py").write_text(MODEL)
        run = head.home / "shared" / "run"

        def done(command: subprocess.Popen[str]) -> str:
            said, _ = command.communicate(timeout=180)
            assert command.returncode == 0, said
            return said

        def submitted(*arguments: str) -> list[list[str]]:
            to = ["--address", cluster.http_address, "--home", f"{head.inner_home}/shared"]
            said = done(cluster.launch("submit", *to, *arguments))
            return [[RAY, *shlex.split(words)] for words in re.findall("^  ray (job .*)$", said, re.MULTILINE)]

        def summary() -> dict[str, Any]:
            return json.loads((run / "summary.json").read_text())

        def wait_for(reached: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 120
            while not reached():
                assert time.monotonic() < deadline
                time.sleep(0.2)

        model, records = ["model=mine.Mine", "clients=3", "executor=inline"], run / "metrics.jsonl"
        status, logs, stop = submitted(*model, "rounds=100000", "run_dir=run")
        wait_for(lambda: records.is_file() and records.read_text().count("\n") > 2)
        done(cluster.command(*stop))
        assert f"python launch.py submit resume={head.inner_home}/shared/run" in done(cluster.command(*logs))
        assert "was stopped" in done(cluster.command(*status))
        rounds = summary()["rounds"] + 2
        submitted("resume=run", f"rounds={rounds}")
        wait_for(lambda: summary()["complete"])
        assert records.read_text().count("\n") == rounds
