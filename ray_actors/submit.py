"""`pflsim submit`: check the settings of a run, upload its code, and start it as a job of a Ray cluster."""

import argparse
import json
import os
import shlex
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pflsim.config.compose import CONFIGS
from pflsim.config.names import FOLDER, PACKAGES, program
from pflsim.config.settings import Settings
from pflsim.config.validate import is_url
from pflsim.errors import RunError, SettingsError
from pflsim.records.environment import CODE, JOB, code
from pflsim.records.own_code import own_modules

ADDRESS = "http://127.0.0.1:8265"
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
HOME = "~/pflsim-runs"
STOP_WAIT_S = "600"
"""Time for a run to save its state after `ray job stop`. Ray's default is 3 seconds."""
EXCLUDED = (".*", "__pycache__", "*.pyc", "*.egg-info", "node_modules")
"""Names that are not uploaded: what begins with a dot, such as .git, .venv, .env and .ssh, and generated files."""
EXCLUDED_AT_TOP = ("runs", "data", "build", "dist", "multirun", "outputs", "benchmarks/out")
SECRETS = ("*.pem", "*.key", "id_rsa*", "id_ed25519*")
MAX_MIB = 80
"""Largest total size of the files. The dashboard accepts requests of up to 100 MiB."""


def options(add: Callable[..., Any]) -> None:
    """Add the options of the command."""
    repeated: dict[str, Any] = {"action": "append", "default": []}
    add("overrides", nargs="*", metavar="OVERRIDE", help="settings as for a run, or resume=FOLDER_OR_URL")
    add("-m", "--multirun", action="store_true", help="run all combinations of comma-separated values in one job")
    add("--config-dir", "-cd", metavar="DIR", **repeated, help="folder with more configs, in the working directory")
    add("--address", metavar="URL", help=f"the dashboard (default: RAY_ADDRESS if it is a URL, else {ADDRESS})")
    add("--id", metavar="ID", help="id of the job (default: Ray chooses one)")
    add("--home", metavar="DIR", help=f"folder on the driver's node that contains runs/ (default: {HOME})")
    add("--python", default="python", metavar="PATH", help="Python on the cluster's nodes (default: python)")
    add("--driver-cpus", type=float, default=1, metavar="N", help="CPUs that the driver requests (default: 1)")
    add("--driver-resource", type=resource, metavar="NAME=AMOUNT", **repeated,
        help="another resource that the driver requests, to choose its node; may be repeated")  # fmt: skip
    add("--exclude", metavar="PATTERN", **repeated,
        help="names or paths that are not uploaded, such as '*.ipynb' or notes/old; may be repeated")  # fmt: skip


def resource(text: str) -> tuple[str, float]:
    """Parse NAME=AMOUNT."""
    name, _, amount = text.partition("=")
    return name, float(amount)


def execute(options: argparse.Namespace) -> None:
    """Check the settings of a run, upload the working directory, and start the run as a job of Ray."""
    from pflsim.cli import checked

    runs, root = checked(options.overrides, options.multirun, options.config_dir), Path.cwd()
    paths = [(f"data.{name}", run.data[name], run) for run in runs for name in ("root", "path") if run.data.get(name)]
    for key, path, run in paths:
        if not path.startswith("/") and run.data.get("download") is not True:
            raise SettingsError(f"{key}={path}: expected an absolute path on the cluster, {key}=/...")
    if not (options.home or "/").startswith("/"):
        raise SettingsError(f"--home {options.home}: expected an absolute path on the driver's node")
    address = dashboard(options.address)
    files, skipped = files_to_send(root, options.exclude, [Path(path).resolve() for _, path, _ in paths])
    for folder in options.config_dir:
        if not any(file.is_relative_to(Path(folder).resolve()) for file in files.values()):
            raise SettingsError(f"--config-dir {folder} is not uploaded: put it into {root}, without --exclude")
    for module, file in {module: file for run in runs for module, file in own_modules(run).items()}.items():
        if file.resolve() not in files.values():
            raise SettingsError(f"{module} is {file}, which is not uploaded: put it into {root}, without --exclude")
    if skipped:
        print(f"warning: links and possible secrets are not uploaded: {', '.join(skipped)}", file=sys.stderr)
    given = [run.run_dir or "" for run in runs]
    if not options.home and not all(is_url(folder) or folder.startswith(("/", "~")) for folder in given):
        where = f"results stay in {HOME} on the driver's node"
        print(f"warning: {where}: set run_dir=URL, or run_dir or --home to shared storage", file=sys.stderr)
    job = start(address, options, files, entrypoint(options, root, runs))
    print(f"job {job}: {len(files)} files from {root}")
    for words in ("status", "logs --follow", "stop"):
        print(f"  ray job {words} {job} --address {address}")


def files_to_send(
    root: Path, exclude: Sequence[str] = (), data: Sequence[Path] = ()
) -> tuple[dict[str, Path], list[str]]:
    """Return the files of the working directory and of pflsim by their paths in the upload, and what is left out.

    Args:
        root: the working directory. Its run folders and virtual environments are not uploaded.
        exclude: patterns of names, or of paths relative to `root`, that are not uploaded.
        data: files and folders of data sets, which are not uploaded.

    Returns:
        The files, and the names of symbolic links and possible secrets, which are not uploaded.

    Raises:
        SettingsError: the files are too large.
    """
    root, files, skipped = root.resolve(), dict[str, Path](), list[str]()
    patterns = [*EXCLUDED, *(pattern.rstrip("/") for pattern in exclude)]
    for folder, folders, names in os.walk(root):
        if "pyvenv.cfg" in names or {"config.yaml", "environment.json"} <= {*names}:
            folders.clear()
            continue
        for name in sorted((*folders, *names)):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            left_out = relative in EXCLUDED_AT_TOP or path in data
            left_out = left_out or any(fnmatch(text, pattern) for text in (name, relative) for pattern in patterns)
            if not left_out and (path.is_symlink() or any(fnmatch(name, pattern) for pattern in SECRETS)):
                skipped.append(relative)
                left_out = True
            if left_out and name in folders:
                folders.remove(name)
            elif not left_out and path.is_file():
                files[relative] = path
    ours = {path: path.relative_to(FOLDER) for name in PACKAGES for path in (FOLDER / name).rglob("*")}
    ours |= {path: Path("pflsim", "configs", path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*")}
    files |= {name.as_posix(): path for path, name in ours.items() if path.is_file() and path.suffix != ".pyc"}
    sizes = {name: path.stat().st_size / 2**20 for name, path in files.items()}
    if (total := sum(sizes.values())) > MAX_MIB:
        largest = [f"{name} ({sizes[name]:.1f} MiB)" for name in sorted(sizes, key=lambda name: -sizes[name])[:5]]
        raise SettingsError(
            f"{root} has {total:.1f} MiB to upload, more than {MAX_MIB}: use --exclude PATTERN, or start in another "
            f"folder; largest: {', '.join(largest)}"
        )
    return files, skipped


def entrypoint(options: argparse.Namespace, root: Path, runs: Sequence[Settings]) -> str:
    """Return the shell command of the job.

    It starts in the unpacked upload, which Ray adds to PYTHONPATH and removes after the job. It changes to the home
    folder, which stays.
    """
    given = {text.lstrip("+").partition("=")[0] for text in options.overrides}
    defaults = ["progress=plain", *(["ray_address=auto"] if not runs or any(r.executor == "ray" for r in runs) else [])]
    words = [*options.overrides, *(text for text in defaults if text.partition("=")[0] not in given)]
    words = [*(["-m"] if options.multirun else []), *words]
    folders = [os.path.relpath(Path(folder).resolve(), root.resolve()) for folder in options.config_dir]
    folders = [f'--config-dir "$code"/{shlex.quote(folder)}' for folder in folders]
    home = shlex.quote(options.home) if options.home else HOME
    call = " ".join([shlex.quote(options.python), "-m", "pflsim", *folders, *map(shlex.quote, words)])
    return f"code=$PWD && mkdir -p {home} && cd {home} && exec {call}"


def dashboard(asked: str | None) -> str:
    """Return the address of the cluster's dashboard: what was asked for, that of the environment, or the default.

    Raises:
        SettingsError: it is not a URL.
    """
    named = [os.environ.get(name, "") for name in ADDRESS_VARIABLES]
    address = asked or next((value for value in named if value.startswith("http")), ADDRESS)
    if not address.startswith(("http://", "https://")):
        raise SettingsError(f"--address {address}: expected the cluster's dashboard, --address http://HOST:8265")
    return address.rstrip("/")


def start(address: str, options: argparse.Namespace, files: Mapping[str, Path], command: str) -> str:
    """Upload the files, unless the cluster has them, and start the job.

    Returns:
        The id of the job.

    Raises:
        RunError: the cluster does not answer or does not accept the job.
    """
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    os.environ.update(dict.fromkeys(ADDRESS_VARIABLES, address))  # Ray prefers them to its argument
    resources: dict[str, Any] = dict(options.driver_resource)
    env_vars = {"RAY_JOB_STOP_WAIT_TIME_S": STOP_WAIT_S, JOB: f"{program()} submit", CODE: json.dumps(code())}
    try:
        client = JobSubmissionClient(address)
        with tempfile.TemporaryDirectory() as folder:
            # An archive: for a folder, Ray would apply .gitignore, and `excludes` to pflsim/data too.
            archive = Path(folder, "code.zip")
            with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as written:
                for name in sorted(files):
                    written.write(files[name], name)
            return client.submit_job(
                entrypoint=command,
                submission_id=options.id,
                runtime_env={"working_dir": str(archive), "env_vars": env_vars},
                entrypoint_num_cpus=options.driver_cpus,
                entrypoint_num_gpus=resources.pop("GPU", None),
                entrypoint_resources=resources or None,
            )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        reason = [line.strip() for line in str(error).splitlines() if line.strip(" .")][-1:]
        raise RunError(f"{address} has not started the job: {''.join(reason)}") from error
