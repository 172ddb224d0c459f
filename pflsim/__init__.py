"""pflsim simulates personalised federated learning: many clients, each with its own data and its own model.

The functions below run experiments and read their results. `pflsim.cli` is the command line.

Example:
    >>> import pflsim
    >>> run = pflsim.run(method="pfedcfr", data="digits", clients=10, rounds=5, executor="inline")
    >>> run.accuracy  # mean test accuracy over clients, last round
    >>> run.per_client()  # a row per round, client and model
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from pflsim.analysis.probe import Answer
    from pflsim.analysis.runs import Run, Runs
    from pflsim.analysis.tables import Comparisons
    from pflsim.data.federated import Partition
    from pflsim.data.sources.table import Table as Table

__all__ = [
    "Table", "compare", "export", "figures", "load", "load_model", "partition", "probe", "report", "resume", "run",
    "sweep", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "Table":
        return importlib.import_module("pflsim.data.sources.table").Table
    raise AttributeError(f"module 'pflsim' has no attribute {name!r}")


def run(
    *,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    callbacks: Iterable[Any] = (),
    **settings: Any,
) -> Run:
    """Run an experiment.

    Args:
        overrides: settings as on the command line, such as `["method.mu=0.1"]`.
        config_dirs: folders with more config files, as `--config-dir`.
        callbacks: called in order, in this process: objects with any of the methods `on_round(result)`,
            `on_evaluate(result)` (see `pflsim.engine.callbacks.RoundResult`) and `on_end(run)`; a function is an
            `on_round`. If `on_round` or `on_evaluate` returns "stop", the run ends after this round as in early
            stopping; an error ends it too, and its states are saved.
        settings: the same settings as keywords. Those with a section are dicts: `eval={"received": True}`. These also
            take objects:

            - `model`: a class or function that returns a `torch.nn.Module`.
            - `data`: a `pflsim.Table`, a `pflsim.data.dataset.Dataset`, or a pair of training and test data (see
              `pflsim.data.sources.own.as_dataset`); frames of pandas are tables with the label `label`.
            - `method`: a `ClientModule` class, or a pair of it and a `ServerRule` class.
            - `task["loss"]` and the entries of `eval["metrics"]`: functions `(scores, targets)`, modules and metrics.
            - `partition`: a partition rule, or the rows of every client: `{"train": [...], "test": [...]}`.

    Returns:
        The run, read from its folder.

    Raises:
        SettingsError: a setting is wrong; nothing was started.
        RunError: the run ended early. Its folder has what is needed to resume it.
    """
    return _own(_run(_values(settings, overrides), config_dirs, callbacks, multirun=False))[0]


def _values(settings: Mapping[str, Any], overrides: Sequence[str], sweep: bool = False) -> dict[str, Any]:
    """Return all settings by dotted key; with `sweep`, lists are those of several runs."""
    from pflsim.commands.overrides import values_of
    from pflsim.config.compose import parse

    texts = parse(overrides)
    return {key: value for key, value in values_of(settings, sweep).items() if key not in texts} | texts


def _own(folders: Iterable[Path]) -> Runs:
    """Read runs of this process, which are trusted."""
    from pflsim.analysis.runs import Runs

    return Runs(replace(run, trusted=True) for run in load(folders))


def _run(
    values: Mapping[str, Any], config_dirs: Iterable[str | Path], callbacks: Iterable[Any], multirun: bool
) -> list[Path]:
    """Run one or several runs and return their folders."""
    from pflsim.commands.sweep import run_all
    from pflsim.config.compose import config_folders, configs
    from pflsim.progress import watched

    done: list[Path] = []
    with watched(values.get("progress")):
        jobs, found = configs(values, multirun, config_folders(config_dirs))
        run_all(jobs, found, done, callbacks=callbacks)
    return done


def sweep(
    *,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    callbacks: Iterable[Any] = (),
    **settings: Any,
) -> Runs:
    """Run all combinations of settings.

    Args:
        overrides: see `run`; several values are separated by commas, as with `--multirun`: `["method.mu=0.1,1"]`.
        config_dirs: see `run`.
        callbacks: see `run`; every run calls them.
        settings: see `run`; a list has one value per run: `method=["fedavg", "ditto"], seed=[0, 1, 2]`.

    Returns:
        The runs in the order of the combinations; the last setting changes fastest.

    Raises:
        SettingsError: a setting is wrong; nothing was started.
        RunError: a run ended early; the others were run.
    """
    return _own(_run(_values(settings, overrides, sweep=True), config_dirs, [*callbacks], multirun=True))


def tune(
    into: str | Path,
    *,
    trials: int = 12,
    seeds: int = 3,
    rounds: int | None = None,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    **settings: Any,
) -> Runs:
    """Tune methods on validation data with equal budgets, then run the chosen values with other seeds.

    Args:
        into: folder of the study; the same call continues a study that was stopped.
        trials: of each method.
        seeds: runs of the chosen values of each method.
        rounds: of these runs; None: those of the trials, which `overrides=["rounds=20"]` sets.
        overrides: see `run`.
        config_dirs: see `run`.
        settings: see `run`; `method` is a list, and `search` has spaces by key: choices as in `{"lr": [0.01, 0.1]}`, a
            range as in `{"ditto.lam": {"low": 0.1, "high": 10, "log": True}}`, None for no search. Keys of one method
            begin with its name, those of a class with its dotted name: `{"mine.BodyProx.mu": [0.1, 1]}`. Trials run in
            processes of their own, so objects must be importable.

    Returns:
        The runs of the chosen values.

    Raises:
        SettingsError: a setting or a space is wrong, or the folder has another study.
        RunError: a method or a run is missing in the comparison.
    """
    from pflsim.commands.tune import run_study

    options = {"trials": trials, "seeds": seeds, "rounds": rounds, "config_dir": [*map(str, config_dirs)]}
    return load(run_study(Path(into), {"settings": _values(settings, overrides, sweep=True), **options}))


def probe(
    into: str | Path = "probe",
    *,
    seeds: int = 3,
    minutes: float = math.inf,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    **settings: Any,
) -> Answer:
    """Find out whether clients should train alone, together, in groups or with personal models.

    Args:
        into: folder of the runs and the page; the same call continues a probe that was stopped.
        seeds: runs of the chosen values of each method.
        minutes: use fewer rounds, to end within this time.
        overrides: see `run`.
        config_dirs: see `run`.
        settings: see `run`, without `method`. Runs are in processes of their own, so objects must be importable.

    Returns:
        The answer: printed, it is the text; `frame` has a row per method, and `page` is the HTML page.

    Raises:
        SettingsError: a setting is wrong, or the folder has another probe.
        RunError: all trials of a method failed, or a run with another seed did.
    """
    from pflsim.commands.probe import run_probe

    options = {"seeds": seeds, "minutes": minutes, "config_dir": [*map(str, config_dirs)]}
    return run_probe(Path(into), {"settings": _values(settings, overrides), **options})


def partition(
    into: str | Path, *, overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = (), **settings: Any
) -> Partition:
    """Partition the data without a run; write partition.json and partition.png.

    Args:
        into: the folder.
        overrides: see `run`.
        config_dirs: see `run`.
        settings: see `run`.

    Returns:
        The rows of every client, their names and their shift.

    Raises:
        SettingsError: a setting is wrong, or the folder has a partition.
    """
    from pflsim.config.compose import composed, config_folders, to_settings
    from pflsim.data.record import write_federation

    found = composed(_values(settings, overrides), config_folders(config_dirs))
    return write_federation(to_settings(found), Path(into))[1]


def export(
    run: Run | str | Path,
    client: int | str | None = None,
    round: int | str | None = None,
    model: Literal["personal", "global"] | None = None,
    out: str | Path | None = None,
    *,
    trusted: bool = False,
) -> list[Path]:
    """Write models as programs of `torch.export`, and their tensors as safetensors.

    Args:
        run: the run or its folder.
        client: its id or name, or "all"; None: the server's model.
        round: see `load_model`.
        model: see `load_model`.
        out: the folder; None: `export` in the run folder.
        trusted: see `load_model`.

    Returns:
        The files of the programs.

    Raises:
        SettingsError: there is no such model, or torch.export cannot export it.
    """
    exports, saved = _saved(run, round, trusted)
    folder = Path(out or saved.folder / "export")
    return [path for path, *_ in exports.exported(saved, None if client is None else str(client), model, folder)]


def _saved(run: Run | str | Path, round: int | str | None, trusted: bool) -> tuple[Any, Any]:
    """Return the module that reads models, and the models of a run; pflsim does not import lightning_modules."""
    from pflsim.analysis.runs import Run

    importlib.import_module("lightning_modules.quick_import")
    exports, name = importlib.import_module("lightning_modules.export"), None if round is None else str(round)
    folder, own = (run.folder, run.trusted) if isinstance(run, Run) else (Path(run), False)
    return exports, exports.SavedModels(folder, name, trusted or own)


def resume(
    run: Run | str | Path, *, overrides: Sequence[str] = (), callbacks: Iterable[Any] = (), **settings: Any
) -> Run:
    """Resume a run from its last checkpoint, or extend it with a larger `rounds`.

    Args:
        run: the run or its folder.
        overrides: changed settings as on the command line.
        callbacks: see `run`; a run does not store them.
        settings: changed settings, and the objects that the run was started with; `changed_code=True` goes on although
            your own code has changed.

    Raises:
        SettingsError: the run cannot be resumed with these settings; nothing was changed.
        RunError: the run ended early.
    """
    from pflsim.analysis.runs import Run
    from pflsim.commands.overrides import values_of
    from pflsim.commands.resume import resume_run
    from pflsim.config.components import COMPONENTS
    from pflsim.config.compose import config_folders
    from pflsim.progress import watched

    objects = {*COMPONENTS, "task", "eval"}
    given = values_of({key: value for key, value in settings.items() if key in objects})
    others = {key: value for key, value in settings.items() if key not in objects or isinstance(value, str)}
    values, folder = _values(others, overrides), str(run.folder if isinstance(run, Run) else run)
    with watched(values.get("progress")):
        return _own([resume_run(folder, values, config_folders([]), callbacks=callbacks, given=given)])[0]


def load(runs: str | Path | Iterable[str | Path]) -> Runs:
    """Read runs from their folders.

    Args:
        runs: one or several run folders, folders of runs, or patterns such as `"runs/2026*"`.

    Raises:
        SettingsError: a name matches no run, or a folder cannot be read.
    """
    from pflsim.analysis.runs import Runs, find_runs, read_run

    names = [str(runs)] if isinstance(runs, str | Path) else list(map(str, runs))
    return Runs(map(read_run, find_runs(names)))


def load_model(
    run: Run | str | Path,
    client: int | str | None = None,
    round: int | str | None = None,
    model: Literal["personal", "global"] | None = None,
    *,
    trusted: bool = False,
) -> nn.Module:
    """Load a model of a run; its data are not needed.

    Args:
        run: the run or its folder.
        client: the name of a client, or its id if no name is a number; None: the server's model, where the
            method has one.
        round: of the checkpoint: a number, "last", or "best" by validation; None: the best one, whose results `compare`
            shows, or the last one, with a line that says so, if the best one was not saved (`checkpoint.best=True`).
        model: the client's own model or the server's; None: the one that the method reports.
        trusted: whether code from outside pflsim that the folder names is run, and pickles in it are read. The runs
            that `run`, `sweep` and `resume` returned in this process are trusted.

    Returns:
        A module in evaluation mode that maps examples [B, ...], as the data source gives them, to scores [B, C]. It
        scales its inputs. Its attribute `client` is the client's module, whose `net` has the weights. Its method
        `predict_frame(frame)` returns the probabilities and classes, or the values, of the rows of a pandas frame;
        `save_pretrained(folder)` writes models of transformers and PEFT in their format; with a causal model of
        transformers, `generate(prompt)` continues a text.

    Raises:
        SettingsError: there is no such model, it cannot be read, or loading it would run code that is not trusted.
    """
    from pflsim.config.validate import checked

    checked("client", int | str | None, client)
    return _saved(run, round, trusted)[1].load(client, model)


def compare(
    runs: str | Path | Run | Iterable[Run],
    *,
    reference: str | None = None,
    at: str | None = None,
    target: float | str | None = None,
    target_on: Literal["test", "val"] = "test",
    set: str | None = None,
) -> Comparisons:
    """Compare runs over their seeds, with paired differences between clients.

    Args:
        runs: the runs, or their folder. Runs that differ only in their seed form a group.
        reference: label or method that the others are compared with; default: local, else fedavg; of one method the
            best setting, else the first group.
        at: round that figures are taken from: best_val, last or best_test_oracle; default: best_val if all runs have
            validation data, else last.
        target: mean of the primary metric to reach, as a number, or as a share of the reference's in each seed, such as
            "95%"; default: the best that every run reaches.
        target_on: the examples whose mean reaches it.
        set: judge on a test set of `eval.sets`, or the clients that joined after the last round: new_received,
            new_trained, ...; default: the clients that train, on their own rows.

    Returns:
        One comparison for each set of runs on the same clients.

    Raises:
        SettingsError: there is no such reference, two runs with the same settings have different results, or a run
            has no results on the set.
    """
    from pflsim.analysis.comparison import compare_sets
    from pflsim.analysis.runs import judged
    from pflsim.analysis.tables import Comparisons

    each = judged(_runs(runs), set)
    return Comparisons(compare_sets(each, reference, choice=cast(Any, at), target=target, target_on=target_on))


def figures(
    runs: str | Path | Run | Iterable[Run],
    style: Literal["icml", "neurips", "ieee", "thesis"] = "icml",
    *,
    only: str | Iterable[str] | None = None,
    against: Literal["rounds", "bytes", "seconds"] = "rounds",
    reference: str | None = None,
    at: str | None = None,
    target: float | str | None = None,
    target_on: Literal["test", "val"] = "test",
    set: str | None = None,
) -> dict[str, Figure]:
    """Draw figures for a paper: width of a column, font sizes and embedded fonts of a template.

    Args:
        runs: the runs, or their folder.
        style: the template.
        only: some of `forest` (differences to the reference), `curves`, `clients` (gains and losses) and `cost`
            (bytes and the primary metric); None: all.
        against: the x axis of `curves`.
        reference: see `compare`.
        at: see `compare`.
        target: see `compare`; curves have a line there, and ticks in the rounds in which seeds reach it.
        target_on: see `compare`.
        set: see `compare`.

    Returns:
        The figures by name; with several sets of comparable runs, `forest-1`, `forest-2`, …

    Raises:
        SettingsError: there is no such figure or reference, or there is nothing to draw.
    """
    from pflsim.analysis.comparison import compare_sets
    from pflsim.analysis.figures import all_figures
    from pflsim.analysis.runs import judged

    each = judged(_runs(runs), set)
    compared = compare_sets(each, reference, choice=cast(Any, at), target=target, target_on=target_on)
    return {name: figure for name, (figure, _) in all_figures(compared, style, only, against).items()}


def report(
    runs: str | Path | Run | Iterable[Run],
    out: str | Path | None = None,
    *,
    target: float | str | None = None,
    target_on: Literal["test", "val"] = "test",
) -> Path:
    """Write an HTML report and return its path.

    Args:
        runs: the runs, or their folder.
        out: the file; default: report.html in the folder of a single run, else in the current folder.
        target: see `compare`; the curves have a line at it.
        target_on: see `compare`.

    Raises:
        SettingsError: the file cannot be written, or the target is wrong.
    """
    from pflsim.analysis.report import write_report

    folders = [run.folder for run in _runs(runs)]
    return write_report(folders, None if out is None else Path(out), target=target, target_on=target_on)


def _runs(given: Any) -> list[Run]:
    """Return runs, or those in a folder, as a list."""
    from pflsim.analysis.runs import Run
    from pflsim.errors import SettingsError

    found = [given] if isinstance(given, Run) else [*(load(given) if isinstance(given, str | Path) else given or ())]
    if not found or not all(isinstance(run, Run) for run in found):
        raise SettingsError(f"runs={found}: expected runs, as pflsim.load returns them, or their folder")
    return found
