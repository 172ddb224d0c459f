"""The command lines of `submit`, `status`, `logs`, `stop` and `fetch`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pflsim.config.settings import Settings
from pflsim.errors import RunError, SettingsError
from ray_actors.jobs.client import DEFAULT, Cluster, connect
from ray_actors.jobs.fetch import fetch
from ray_actors.jobs.follow import Follower
from ray_actors.jobs.pack import mib
from ray_actors.jobs.show import details, stop, table
from ray_actors.jobs.submit import HOMES, Request, check_request, packed, submit

Composed = Callable[[Sequence[str], bool, Sequence[str]], Sequence[Settings]]
"""From overrides, -m and --config-dirs to the settings of the runs, checked; none for one that is taken up."""

ADDRESS = f"the dashboard of the cluster, http://HOST:8265 (default: RAY_ADDRESS if it is one, else {DEFAULT})"
WHAT = {
    "submit": "Run something on a cluster: check its settings here, send the working directory, start a job there.",
    "status": "What the jobs of a cluster do: all of pflsim's in a table, or one in detail.",
    "logs": "What a job has printed.",
    "stop": "Stop a job. It saves its state first, and can be taken up again.",
    "fetch": "Bring the run folders of a job here, also while it runs.",
}


def run(arguments: Sequence[str], root: Path, composed: Composed) -> int:
    """Do what a command line says whose first word is a command.

    Args:
        arguments: the command and what follows it.
        root: the working directory, where launch.py is.
        composed: makes settings of overrides.

    Returns:
        The exit status: of a job that was followed, its own; else 1, it could not be done; 2, it was asked wrongly.
    """
    command = arguments[0]
    options = parser(command).parse_intermixed_args(arguments[1:])
    try:
        if command == "submit":
            return _submit(options, root, composed)
        return _about(command, options, connect(options.address))
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read it has seen enough
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parser(command: str) -> argparse.ArgumentParser:
    """The parser of what follows a command."""
    made = argparse.ArgumentParser(prog=f"python launch.py {command}", description=WHAT[command], allow_abbrev=False)
    made.add_argument("--address", help=ADDRESS)
    if command == "submit":
        _add_submit(made)
    elif command == "status":
        made.add_argument("id", nargs="?", metavar="ID", help="of the job; without it: all")
    else:
        made.add_argument("id", metavar="ID", help="of the job, as submit and status say it")
    if command == "logs":
        made.add_argument("--follow", action="store_true", help="go on until the job is over")
    if command == "fetch":
        made.add_argument("folder", nargs="?", default="runs", metavar="FOLDER", help="where to (default: runs)")
        made.add_argument("--without-checkpoints", action="store_true", help="leave them there: the rest is small")
    return made


def _add_submit(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add(
        "overrides", nargs="*", metavar="OVERRIDE", help="settings, as launch.py takes them; resume=last with --home-of"
    )
    add("-m", "--multirun", action="store_true", help="run every combination of comma-separated values, in one job")
    add("--config-dir", "-cd", action="append", default=[], metavar="DIR", help="as of launch.py; inside what is sent")
    add("--detach", action="store_true", help="do not follow the log: print the id and end")
    add("--id", metavar="ID", help="of the job (default: pflsim-<date-time>-<method>-...)")
    add("--home", metavar="DIR", help=f"where runs/ will be, on the driver's machine (default: {HOMES}/ID)")
    add("--home-of", metavar="ID", help="work where that job did: in its home, on its machine")
    add("--driver-cpus", type=_amount, default=1, metavar="N", help="CPUs that the driver asks for (default: 1)")
    add("--driver-resource", type=_resource, action="append", default=[], metavar="NAME=AMOUNT",
        help="what else it asks for, to have it on a certain kind of machine; may be repeated")  # fmt: skip
    add("--exclude", action="append", default=[], metavar="PATTERN",
        help="names or paths that are not sent, such as '*.ipynb' or 'notes/old'; may be repeated")  # fmt: skip
    add("--python", default="python", metavar="PATH", help="Python on the cluster's machines (default: python)")
    add("--stop-wait", type=_seconds, default=600, metavar="SECONDS",
        help="how long the driver may take to save its state when it is stopped (default: 600)")  # fmt: skip


def _submit(options: argparse.Namespace, root: Path, composed: Composed) -> int:
    request = Request(
        overrides=options.overrides, multirun=options.multirun, config_dirs=options.config_dir, name=options.id,
        home=options.home, home_of=options.home_of, driver_cpus=options.driver_cpus,
        driver_resources=dict(options.driver_resource), exclude=options.exclude, python=options.python,
        stop_wait=options.stop_wait,
    )  # fmt: skip
    runs = composed(request.overrides, request.multirun, request.config_dirs)
    check_request(request, root, runs)
    package = packed(request, root, runs)
    for warning in package.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    cluster = connect(options.address)
    job = submit(cluster, request, package, runs)
    print(f"job {job}: {len(package.files)} files, {mib(package.bytes)} of content", flush=True)
    if not options.detach:
        status = Follower(cluster, job, sys.stdout).follow()
        if status not in (2, 127, 130):  # it has not begun, or goes on
            print(f"bring its run folder here with   {cluster.command(f'fetch {job}')}", flush=True)
        return status
    for words in (f"status {job}", f"logs {job} --follow", f"stop {job}", f"fetch {job}"):
        print(f"  {cluster.command(words)}")
    return 0


def _about(command: str, options: argparse.Namespace, cluster: Cluster) -> int:
    if command == "status":
        print(details(cluster, options.id) if options.id else table(cluster.jobs()), flush=True)
    elif command == "logs" and options.follow:
        return Follower(cluster, options.id, sys.stdout).follow()
    elif command == "logs":
        print(cluster.log(options.id), end="", flush=True)
    elif command == "stop":
        stop(cluster, options.id, say=lambda text: print(text, flush=True))
    else:
        return _fetch(cluster, options.id, Path(options.folder), not options.without_checkpoints)
    return 0


def _fetch(cluster: Cluster, job: str, into: Path, checkpoints: bool) -> int:
    found = fetch(cluster, job, into, checkpoints)
    for folder in found.brought:
        print(folder, flush=True)
    for folder in found.complete:
        print(f"{folder} has come whole before", flush=True)
    for folder, why in found.kept.items():
        print(
            f"{folder} is left as it is: {why}; move it away, or give another FOLDER, to have it anew", file=sys.stderr
        )
    return 0 if found.brought or found.complete else 2


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _seconds(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    if not name or name in ("CPU", "memory"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=AMOUNT; CPUs are asked for by --driver-cpus")
    try:
        return name, _amount(amount)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=AMOUNT, such as big=1") from None
