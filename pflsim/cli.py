"""The command line: `pflsim ...`, `python -m pflsim ...`, or `python launch.py ...` in a clone.

It runs experiments, resumes them, and dispatches the other commands. `ray_actors` is imported when a run starts.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, cast

from pflsim.config.compose import CONFIGS, as_yaml, composed, composing, configs, parse, plain
from pflsim.config.help import COMMANDS, usage
from pflsim.config.installation import FOLDER, check_packages, program
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError, SettingsError
from pflsim.terminal.exit_status import exit_status
from pflsim.terminal.streams import detach_if_closed, open_closed

RESUME = "resume="
ANALYSIS = {
    "compare": "pflsim.analysis.compare.command",
    "report": "pflsim.analysis.report.command",
    "export": "pflsim.analysis.export",
}
"""Commands that read run folders, and the modules whose `main` they call."""
IMPORTS = ("ray_actors.run", "torch.utils.tensorboard")
"""What all runs of a sweep import."""
RUN_BYTES = 2 * 2**30
"""Free memory that `sweep.parallel=auto` wants for each run."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Call `main` with output streams that print `?` for unknown characters and may be closed.

    Returns:
        The exit status.
    """
    open_closed()
    for stream in (sys.stdout, sys.stderr):
        cast(TextIOWrapper, stream).reconfigure(errors="replace")
    status = main(arguments)
    for stream in (sys.stdout, sys.stderr):
        detach_if_closed(stream)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Returns:
        The exit status: 0 for success, 1 if a run fails, 2 if a setting is wrong, 128 + n if signal n stops the run.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if not {"-h", "--help"}.intersection(words) and (status := exit_status(lambda: _check_start(words))):
        return status
    if words and words[0] in ANALYSIS:
        return importlib.import_module(ANALYSIS[words[0]]).main(words[1:])
    if words and words[0] in COMMANDS:
        clone = None if CONFIGS.is_relative_to(FOLDER / "pflsim") else CONFIGS.parent
        return importlib.import_module("ray_actors.jobs.command").run(words, clone, checked)
    return exit_status(lambda: _execute(_options(words)))


def _check_start(words: Sequence[str]) -> None:
    """Check what every command needs, and what would otherwise end in errors of libraries."""
    from pflsim.memory import check_address_space

    check_packages()
    check_address_space()
    try:
        Path.cwd()
        "".join(words).encode()
    except OSError:
        raise SettingsError("the working directory does not exist any more") from None
    except UnicodeEncodeError:
        raise SettingsError("the command line is not text in the encoding of this terminal (LC_ALL, LANG)") from None


def _execute(options: argparse.Namespace) -> int:
    folders = _folders(options.config_dir)
    if options.help:
        print(usage(folders), flush=True)
        return 0
    options.overrides = [_quoted(text) for text in options.overrides]
    asked = [text for text in options.overrides if text.startswith(RESUME)]
    if asked:
        return _resume(asked, options, folders)
    jobs, found = configs(options.overrides, options.multirun, folders)
    if options.cfg:
        for config in found:
            print(as_yaml(config, options.resolve), end="")
        return 0
    return _run(jobs, [plain(config) for config in found])


def checked(overrides: Sequence[str], multirun: bool, config_dirs: Sequence[str]) -> list[Settings]:
    """Return the checked settings of the runs of a command line; none with resume=, because a run folder has its own.

    Raises:
        SettingsError: a setting is wrong.
    """
    folders, texts = _folders(config_dirs), [_quoted(text) for text in overrides]
    others = [text for text in texts if not text.startswith(RESUME)]
    if len(others) < len(texts):
        from pflsim.run_folder.resume import changed

        _resumed_folder([text for text in texts if text.startswith(RESUME)], multirun)
        known = [text for text in others if not text.startswith("data.")]  # only the run folder knows the data set
        with composing(folders):
            given = plain(composed(known, folders))
            changed(given, given, [str(override.key_or_group) for override in parse(known)])
        return []
    runs = [plain(config) for config in configs(texts, multirun, folders)[1]]
    _check(runs)
    return runs


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = _usage_error  # type: ignore[method-assign, assignment]
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        key, _, value = unknown[0].lstrip("-").partition("=")
        after = [*arguments, ""][[*arguments].index(unknown[0]) + 1]
        written = f"{key}={value or ('VALUE' if after[:1] in ('', '-') else after)}"
        raise SettingsError(f"{unknown[0]} is not an option; settings have no dash: {written}, see {program()} --help")
    return options


def _usage_error(message: str) -> NoReturn:
    raise SettingsError(f"{message}; see {program()} --help")


def _quoted(text: str) -> str:
    """Quote `on_client_error=retry(2)`, because Hydra reads parentheses as a call of one of its functions."""
    return re.sub(r"^(on_client_error=)(\w+\([^'\"]*\))$", r"\1'\2'", text)


def _folders(config_dirs: Sequence[str]) -> list[Path]:
    return [CONFIGS, *(Path(folder).absolute() for folder in config_dirs)]


def _check(runs: Sequence[Settings]) -> None:
    from pflsim.config.checks import check, check_sweep

    for settings in runs:
        check(settings)
    check_sweep(runs)


def _resumed_folder(asked: Sequence[str], sweep: bool) -> str:
    """Return the folder or URL of the only resume= on the command line."""
    from pflsim.config.urls import check_no_password

    for text in asked:
        check_no_password(text.removeprefix(RESUME))
    if len(asked) > 1 or sweep:
        raise SettingsError(f"{' '.join(asked)}: resume one run at a time, without -m and --cfg")
    return asked[0].removeprefix(RESUME)


def _run(jobs: Sequence[Sequence[str]], runs: Sequence[Settings]) -> int:
    """Check all runs, run them one after the other, then print a table of those that are complete.

    A sweep continues after a run that fails.
    """
    _check(runs)
    varying = [values[0].partition("=")[0].lstrip("+") for values in zip(*jobs, strict=True) if len({*values}) > 1]
    for settings in runs if varying else ():
        settings.names["sweep"] = ",".join(varying)
    if (parallel := _parallel(runs)) > 1:
        return _run_in_processes(jobs, runs, parallel)
    failed: list[str] = []
    done: list[Path] = []
    stopped: Stopped | None = None
    with importlib.import_module("ray_actors.run").Runner() as runner:
        for number, (job, settings) in enumerate(zip(jobs, runs, strict=True), start=1):
            name = f"[{number}/{len(runs)}] {' '.join(job)}"
            if len(runs) > 1:
                print(name, flush=True)
            try:
                done.append(runner.run(settings))
            except Stopped as error:
                if number < len(runs):
                    print(f"{len(runs) - number} runs of the sweep were not started", file=sys.stderr)
                stopped = error
                break
            except (SettingsError, RunError) as error:
                if len(runs) == 1:
                    raise
                print(f"error: {error}", file=sys.stderr)
                failed.append(name)
    return _end_sweep(done, failed, len(runs), stopped)


def _end_sweep(done: Sequence[Path], failed: Sequence[str], runs: int, stopped: Stopped | None) -> int:
    """Print what a sweep leaves, and return its exit status."""
    if len(done) > 1:
        importlib.import_module("pflsim.analysis.compare.sweeps").print_comparisons(done)
    if stopped is not None:
        raise stopped
    if failed:
        print(f"error: {len(failed)} of {runs} runs failed:\n" + "\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


def _parallel(runs: Sequence[Settings]) -> int:
    """Return how many runs of a sweep to run at the same time."""
    asked, one = runs[0].sweep.parallel, len(runs) == 1 or any(run.executor != "inline" for run in runs)
    if one or asked != "auto":
        return 1 if one else int(asked)
    import psutil

    from pflsim.run_folder.environment import usable_cpus

    if any(run.placement.gpus or run.data.get("download") for run in runs):
        return 1
    cpus = usable_cpus() // max(run.placement.threads for run in runs)
    return max(1, min(len(runs), cpus, psutil.virtual_memory().available // RUN_BYTES))


def _run_in_processes(jobs: Sequence[Sequence[str]], runs: Sequence[Settings], parallel: int) -> int:
    """Run each run in a process of its own, several at once, and print a line when one ends."""
    from pflsim.terminal.processes import in_processes
    from pflsim.terminal.result import result_line

    print(
        f"{len(runs)} runs, {parallel} at the same time (sweep.parallel); each prints a line when it ends", flush=True
    )
    names = [f"[{number}/{len(runs)}] {' '.join(job)}" for number, job in enumerate(jobs, start=1)]
    done, failed, ended = list[Path](), list[str](), 0
    stopped: Stopped | None = None
    try:
        for one in in_processes([partial(_run_alone, run) for run in runs], parallel, IMPORTS):
            ended += 1
            if one.result is not None:
                done.append(one.result)
                print(f"{names[one.number]}: {result_line(one.result)}", flush=True)
            else:
                failed.append(names[one.number])
                hints = [line for line in one.output.splitlines() if line.startswith("resume with")]
                killed = [f"killed by signal {-one.status}; sweep.parallel=1 needs less memory"] * (one.status < 0)
                print("\n".join([names[one.number], *killed, *hints]), file=sys.stderr)
            print(one.errors, end="", file=sys.stderr, flush=True)
    except Stopped as error:
        stopped = error
        if ended < len(runs):
            print(f"{len(runs) - ended} runs of the sweep were not started", file=sys.stderr)
    return _end_sweep(done, failed, len(runs), stopped)


def _run_alone(settings: Settings) -> Path:
    with importlib.import_module("ray_actors.run").Runner() as runner:
        return runner.run(settings)


def _resume(asked: Sequence[str], options: argparse.Namespace, folders: Sequence[Path]) -> int:
    """Resume a run with its own settings, given ones that cannot change its results, and perhaps more rounds."""
    from pflsim.config.urls import is_url
    from pflsim.run_folder.folder import check_no_links, is_complete
    from pflsim.run_folder.resume import changed, check_destination, run_folder, saved_settings

    name = _resumed_folder(asked, options.multirun or bool(options.cfg))
    folder, keys = run_folder(name), list[str]()
    check_no_links(folder)
    others = [text for text in options.overrides if not text.startswith(RESUME)]
    settings = saved_settings(folder)
    if others:
        with composing(folders):
            keys = [str(override.key_or_group) for override in parse(others)]
            same = [f"data={settings.names['data']}"] if any(key.startswith("data.") for key in keys) else []
            settings = changed(settings, plain(composed([*same, *others], folders)), keys)
    if is_complete(folder, settings.rounds):
        print(f"{folder} is complete: all of its {settings.rounds} rounds are done")
        return 0
    if not is_url(name):
        check_destination(settings, folder, keys)
    with importlib.import_module("ray_actors.run").Runner() as runner:
        runner.resume(folder, settings)
    return 0
