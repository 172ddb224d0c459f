"""The command line: `pflsim ...`, `python -m pflsim ...`, or `python launch.py ...` in a clone.

It runs experiments, resumes them, and dispatches the other commands. `ray_actors` is imported when a run starts.
"""

import argparse
import faulthandler
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, cast

from pflsim.commands.sweep import LIGHT, run_all
from pflsim.config import validate
from pflsim.config.checks import check_sweep
from pflsim.config.compose import as_yaml, composed, config_folders, configs, parse, to_settings
from pflsim.config.help import usage
from pflsim.config.names import program
from pflsim.config.settings import Settings
from pflsim.errors import RunError, SettingsError
from pflsim.progress import doing
from pflsim.terminal.exit_status import exit_status

RESUME = "resume="
INTO = "into="
PARTITION = "partition"
"""Command that partitions the data without a run."""
COMMANDS = {
    "compare": "pflsim.analysis.compare",
    "report": "pflsim.analysis.report",
    "figures": "pflsim.analysis.figures",
    "export": "lightning_modules.export",
    "predict": "lightning_modules.predict",
    "check-method": "lightning_modules.contract.command",
    "submit": "ray_actors.submit",
    "tune": "pflsim.commands.tune",
    "probe": "pflsim.commands.probe",
    "baselines": "pflsim.commands.baselines",
    "leave-out": "pflsim.commands.leave_out",
}
"""Commands, and their modules: `options` adds the options of a command, `execute` runs it and describes it."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Call `main` with output streams that print `?` for unknown characters.

    Returns:
        The exit status.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads sleep while they wait for each other
    os.environ["MPLBACKEND"] = "agg"  # a notebook sets one for its own processes, which need not exist here
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream]
    if sys.__stderr__:
        faulthandler.enable(sys.__stderr__)  # a crash before there is a run folder
    for stream in streams:
        cast(TextIOWrapper, stream).reconfigure(errors="replace")
    status = main(arguments)
    for stream in streams:
        try:
            stream.flush()
        except OSError:  # its reader is gone; Python would fail on it when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    gc.freeze()  # or the interpreter looks for garbage among all objects when it ends, which takes a second
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Returns:
        The exit status: 0 for success, 1 if a run fails, 2 if a setting is wrong, 128 + n if signal n stops the run.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in COMMANDS:
        return exit_status(lambda: _command(*words))
    partition = words[:1] == [PARTITION]
    return exit_status(lambda: _execute(_options(words[partition:]), partition))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise an error in one line, without the usage."""
        raise SettingsError(f"{message}; see {self.prog} --help")


def _command(name: str, *words: str) -> int | None:
    doing(f"importing the packages of {name}")
    module = importlib.import_module(COMMANDS[name])
    parser = _Parser(
        prog=f"{program()} {name}",
        description=inspect.getdoc(module.execute),
        epilog=getattr(module, "EXAMPLES", "").format(program=program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.options(parser.add_argument)
    return module.execute(parser.parse_intermixed_args(words))


def _execute(options: argparse.Namespace, partition: bool) -> int:
    folders, overrides = config_folders(options.config_dir), options.overrides
    if options.help:
        print(usage(folders), flush=True)
        return 0
    asked = [text for text in overrides if text.startswith(RESUME)]
    if partition or asked or options.cfg:
        importlib.import_module(LIGHT)
    if partition:
        return _partition(overrides, options)
    if asked:
        from pflsim.commands.resume import resume_run

        name = _resumed_folder(asked, options.multirun or bool(options.cfg))
        resume_run(name, parse(text for text in overrides if text not in asked), folders, own_process=True)
        return 0
    jobs, found = configs(parse(overrides), options.multirun, folders)
    if options.cfg:
        for config in found:
            print(as_yaml(config, options.resolve), end="")
        return 0
    done: list[Path] = []
    failure: RunError | None = None
    try:
        run_all(jobs, found, done, own_process=True)
    except RunError as error:
        failure = error
    if len(done) > 1:
        importlib.import_module("pflsim.analysis.compare").print_comparisons(done)
    if failure:
        raise failure
    return 0


def checked(overrides: Sequence[str], multirun: bool, config_dirs: Sequence[str]) -> list[Settings]:
    """Return the checked settings of the runs of a command line; none with resume=, because a run folder has its own.

    Raises:
        SettingsError: a setting is wrong.
    """
    folders, asked = config_folders(config_dirs), [text for text in overrides if text.startswith(RESUME)]
    values = parse(text for text in overrides if text not in asked)
    if asked:
        from pflsim.records.saved_settings import CHANGED_CODE, changed

        _resumed_folder(asked, multirun)
        validate.checked(CHANGED_CODE, bool, values.pop(CHANGED_CODE, False))
        known = {key: value for key, value in values.items() if not key.startswith("data.")}  # of the run folder's data
        given = to_settings(composed(known, folders))
        changed(given, given, [*known])
        return []
    jobs, found = configs(values, multirun, folders)
    runs = [to_settings(config) for config in found]
    check_sweep(runs, jobs)
    return runs


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(program(), add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        key = unknown[0].lstrip("-").partition("=")[0]
        raise SettingsError(f"{unknown[0]} is not an option; a setting is {key}=VALUE; see {program()} --help")
    return options


def _resumed_folder(asked: Sequence[str], sweep: bool) -> str:
    """Return the folder or URL of the only resume= on the command line."""
    for text in asked:
        validate.check_no_password(text.removeprefix(RESUME))
    if sweep or len({*asked}) > 1:
        raise SettingsError(f"{' '.join(asked)}: resume one run at a time, without -m and --cfg")
    return asked[0].removeprefix(RESUME)


def _partition(overrides: Sequence[str], options: argparse.Namespace) -> int:
    """Partition the data, write partition.json and partition.png, and print the sizes."""
    from pflsim.data.record import sizes, write_federation

    into = [text for text in overrides if text.startswith(INTO)]
    others = [text for text in overrides if text not in into]
    if options.multirun or options.cfg or len(into) > 1 or any(text.startswith(RESUME) for text in others):
        raise SettingsError(f"{PARTITION} makes one partition: leave out -m, --cfg and resume=, and give {INTO} once")
    folder = Path("".join(into).removeprefix(INTO) or PARTITION)
    (settings,) = checked(others, False, options.config_dir)
    dataset, partition = write_federation(settings, folder)
    print(f"{sizes(dataset, partition)}\nwritten: {folder / 'partition.json'}, {folder / 'partition.png'}")
    return 0
