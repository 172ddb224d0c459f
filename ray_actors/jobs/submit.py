"""Submitting a run: what is sent, and the command that a machine of the cluster runs."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pflsim.config.settings import Settings
from pflsim.config.urls import is_url
from pflsim.errors import SettingsError
from pflsim.run_folder.environment import JOB, PACKED, code
from ray_actors.jobs.client import KIND, RUN, Cluster
from ray_actors.jobs.pack import Package, select, write_archive

HOMES = "~/pflsim-runs"
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""An id is part of file names and of addresses."""
RESUME = "resume="
PLACES = ("root", "path")
"""Settings of data that say where files are."""
NODE = "ray.io/node-id"
"""The label that Ray gives every node."""


@dataclass(frozen=True)
class Request:
    """What the command line of `submit` says."""

    overrides: Sequence[str]
    multirun: bool = False
    config_dirs: Sequence[str] = ()
    name: str | None = None
    home: str | None = None
    home_of: str | None = None
    driver_cpus: float = 1
    driver_resources: Mapping[str, float] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    python: str = "python"
    stop_wait: int = 600


def submit(cluster: Cluster, request: Request, package: Package, runs: Sequence[Settings]) -> str:
    """Send the working directory and start the job; its id.

    Args:
        cluster: where.
        request: what.
        package: the working directory's files.
        runs: the settings of what will be run; of one that is taken up they are in its folder.
    """
    job = request.name or new_id(runs)
    home, node = request.home or f"{HOMES}/{job}", None
    if request.home_of:
        home, node = home_of(cluster, request.home_of)
    resources = dict(request.driver_resources)
    gpus = resources.pop("GPU", None)
    with tempfile.TemporaryDirectory() as folder:
        return cluster.submit(
            entrypoint=entrypoint(request, home, package.root, runs),
            submission_id=job,
            runtime_env={
                "working_dir": str(write_archive(package, Path(folder) / "pflsim.zip")),
                # Read by the process that ends the driver, which is started in this environment too. Ray's 3 s are
                # not enough for a round to end and its state to be saved.
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(request.stop_wait), JOB: job},
            },
            metadata=described(request, home, runs),
            entrypoint_num_cpus=request.driver_cpus,
            entrypoint_num_gpus=gpus,
            entrypoint_resources=resources or None,
            entrypoint_label_selector={NODE: node} if node else None,
        )


def packed(request: Request, root: Path, runs: Sequence[Settings]) -> Package:
    """The working directory's files, with where they come from for the run's environment.json.

    Raises:
        SettingsError: they cannot be sent, or a --config-dir is not among them.
    """
    package = select(root, data_in(runs), request.exclude)
    for folder in request.config_dirs:
        _inside(folder, package.root)
        if not package.holds(Path(folder)):
            raise SettingsError(f"--config-dir {folder} is left out of what is sent; give it another name or place")
    package.texts[PACKED] = json.dumps(code()).encode()
    return package


def check_request(request: Request, root: Path, runs: Sequence[Settings]) -> None:
    """Refuse what would be understood, or fail, only on the cluster.

    Raises:
        SettingsError: says what, and what to do.
    """
    if request.name is not None and not ID.fullmatch(request.name):
        raise SettingsError(f"--id {request.name}: expected letters, digits, and _ . - behind the first")
    if request.home is not None and not (request.home.startswith(("/", "~/")) or request.home == "~"):
        raise SettingsError(f"--home {request.home}: expected a folder on the driver's machine, from / or ~/ on")
    if request.home is not None and request.home_of is not None:
        raise SettingsError("--home and --home-of both say where the run folder will be; leave one of them out")
    for folder in request.config_dirs:
        _inside(folder, root)
    for text in request.overrides:
        if text.startswith(RESUME):
            folder = text.removeprefix(RESUME)
            if not (request.home or request.home_of or folder.startswith("/") or is_url(folder)):
                raise SettingsError(
                    f"{text}: a job has a new home on the cluster, with no run in it; give the job whose run is to be "
                    "taken up, --home-of ID, and resume=last"
                )
    for key, value in data_places(request, runs):
        if not value.startswith("/"):
            raise SettingsError(
                f"{key}={value}: the job works in a folder of its own on the cluster; give the place as it is called "
                f"there, {key}=/..."
            )


def data_places(request: Request, runs: Sequence[Settings]) -> list[tuple[str, str]]:
    """The settings that say where data are, where those must be there already."""
    found = [
        (f"data.{name}", run.data[name])
        for run in runs
        for name in PLACES
        if isinstance(run.data.get(name), str) and run.data.get("download") is not True
    ]
    if not runs:  # one that is taken up has the others in its folder
        given = [text.partition("=") for text in request.overrides]
        found += [(key, value) for key, _, value in given if key in [f"data.{name}" for name in PLACES]]
    return found


def data_in(runs: Sequence[Settings]) -> list[Path]:
    """Where the data of the runs are, if they are on this machine."""
    return [Path(run.data[name]) for run in runs for name in PLACES if isinstance(run.data.get(name), str)]


def entrypoint(request: Request, home: str, root: Path, runs: Sequence[Settings]) -> str:
    """The job's command: it starts in the unpacked working directory, which Ray removes some time after the job.

    So the run folder is made elsewhere, in a home that stays; the code is found where it was unpacked.
    """
    folders = [f'--config-dir "$code"/{shlex.quote(_inside(folder, root))}' for folder in request.config_dirs]
    words = [*(["-m"] if request.multirun else []), *map(shlex.quote, arguments(request, runs))]
    call = " ".join(["exec", place(request.python), '"$code"/launch.py', *folders, *words])
    return f"code=$PWD && mkdir -p {place(home)} && cd {place(home)} && {call}"


def arguments(request: Request, runs: Sequence[Settings]) -> list[str]:
    """The overrides, with those that a job has unless it is told otherwise."""
    given = {text.lstrip("+").partition("=")[0] for text in request.overrides}
    own = {"progress": "plain"}
    if not runs or any(run.executor == "ray" for run in runs):
        own["ray_address"] = "auto"
    return [*request.overrides, *(f"{key}={value}" for key, value in own.items() if key not in given)]


def place(path: str) -> str:
    """A path for the shell of the job, whose user's home `~` is."""
    if path == "~":
        return '"$HOME"'
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def home_of(cluster: Cluster, job: str) -> tuple[str, str]:
    """The home and the node of a job that has run.

    Raises:
        SettingsError: it is none of ours, or has not begun.
    """
    info = cluster.info(job)
    home = (info.metadata or {}).get("home")
    if (info.metadata or {}).get(KIND) != RUN or not home:
        raise SettingsError(f"{job} was not started by `launch.py submit`; where its runs are is not known")
    if not info.driver_node_id:
        raise SettingsError(f"{job} has not begun on any machine, so there are no runs of it")
    return home, info.driver_node_id


def described(request: Request, home: str, runs: Sequence[Settings]) -> dict[str, str]:
    """What is kept with the job: for tables, and for whoever fetches its runs."""

    def each(values: Sequence[Any]) -> str:
        return ",".join(dict.fromkeys(str(value) for value in values))

    elsewhere = [run.run_dir for run in runs if run.run_dir is not None]
    named = {
        KIND: RUN,
        "method": each([run.names["method"] for run in runs]),
        "data": each([run.names["data"] for run in runs]),
        "seed": each([run.seed for run in runs]),
        "home": home,
        "python": request.python,
        "run_dirs": json.dumps(elsewhere),
        "arguments": shlex.join([*(["-m"] if request.multirun else []), *request.overrides]),
    }
    return {key: value for key, value in named.items() if value}


def new_id(runs: Sequence[Settings], now: datetime | None = None) -> str:
    """pflsim-<date-time>-<method>-<something>, which no other job has."""
    methods = dict.fromkeys(run.names["method"] for run in runs)
    word = "resume" if not methods else next(iter(methods)) if len(methods) == 1 else "sweep"
    safe = re.sub(r"[^A-Za-z0-9_.]+", "_", word)
    return f"pflsim-{now or datetime.now():%Y%m%d-%H%M%S}-{safe}-{uuid.uuid4().hex[:4]}"


def _inside(folder: str, root: Path) -> str:
    """A folder of the tree as it is called from the root."""
    try:
        return Path(folder).resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise SettingsError(
            f"--config-dir {folder} is not inside {root}, and only what is there is sent: move it there"
        ) from None
