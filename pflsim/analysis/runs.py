"""Run folders: finds and reads them, and gives the settings that determine a result by dotted key."""

from __future__ import annotations

import glob
import io
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, cast

import numpy as np

from pflsim.config.components import COMPONENTS
from pflsim.config.names import listed, nearest
from pflsim.config.settings import Eval, Settings, dotted
from pflsim.display.formats import Choice
from pflsim.display.identity import identity, is_baseline
from pflsim.display.metrics import SHARES, THRESHOLD
from pflsim.errors import SettingsError, reading
from pflsim.participation import Participation
from pflsim.records.environment import read_environment, read_sessions
from pflsim.records.evaluation import Evaluation, Scope, evaluation
from pflsim.records.files import FORM, keys, read_json, valid
from pflsim.records.folder import CONFIG, report_death
from pflsim.records.history import RoundMetrics, Traffic, read_history, rounds_drawn, to_line
from pflsim.records.older_settings import saved_config
from pflsim.records.per_client import COLUMNS, PER_CLIENT
from pflsim.records.predictions import PREDICTIONS, read_predictions
from pflsim.records.summary import SummaryFile, chosen_round, epsilons
from pflsim.seeding import past_cohort
from pflsim.types import SPLITS, EvalPhase, EvalRow, ModelKind, Split

if TYPE_CHECKING:
    from pandas import DataFrame

logger = logging.getLogger(__name__)
TEXTS = ("split", "model", "phase", "fault", "name")
"""Columns of per_client.csv with words."""
WHOLE = [name for name in COLUMNS if name not in (*TEXTS, "correct", "loss")]
DESCRIPTION = ("method", "data", "partition", "model", "clients", "seed")
"""Keys of `Run.overview` that do not describe the result."""
IGNORED = (
    "seed", "names", "run_dir", "data.root", "data.path", "data.test", "data.download",
    "executor", "ray_address", "placement", "lockstep_clients", "on_client_error", "checkpoint", "trace", "tracking",
    "progress", "sweep",
    "eval.batch_size", "eval.models", "eval.sets", "eval.received", "eval.metrics", "eval.newcomer_rows",
    "eval.threshold",
)  # fmt: skip
"""Settings that two runs of one experiment may differ in: the seed, names and paths, the executor, its placement and
the size of stacks (which change at most the last bits of a result), and what is recorded."""

NEWER = ("uplink", "attack", "aggregator", "privacy")
"""Components that runs of earlier versions do not have."""
SCORED = ["round", "model", "phase", "client"]
"""The columns that match rows of per_client.csv with those of predictions.npz."""
NO_SHARE = "it is a share of no rows, or no threshold was chosen"
UNSCORED = (
    "its scores are not recorded (tracking.predictions: those of clients that train, in the last and the best round)"
)
"""Why an interval is missing."""
FEDERATION = ("data", "shift", "partition", "split", "clients")
"""Settings that determine, with the seed, every client's examples. If groups share a seed, the hash decides."""
PROTOCOL = (
    "eval.clients", "eval.every", "eval.holdout_clients", "eval.primary", "eval.mode", "task.name",
    "eval.severity", "eval.all_examples", "attack.fraction",
)  # fmt: skip
"""Settings that determine which clients are evaluated, on which rows and in which rounds."""

Inputs = keys({
    "shape": list[int], "dtype": str, "scale": float, "mean": list[float] | None, "std": list[float] | None,
    "tokens": int | None, "fields": NotRequired[list[str]],
})  # fmt: skip
PartitionFile = keys({
    "hash": str, "data": NotRequired[str], "partition": NotRequired[str], "clients": NotRequired[int],
    "classes": NotRequired[int], "inputs": NotRequired[Inputs], "train": NotRequired[list[list[int]]],
    "names": NotRequired[list[str]], "values": NotRequired[list[str]], "task": NotRequired[Mapping[str, Any]],
    "vocabulary": NotRequired[str],
    "class_counts": NotRequired[list[keys({"train": list[int]})]],
})  # fmt: skip
"""The keys of partition.json that are read back."""


def find_runs(arguments: Sequence[str]) -> list[Path]:
    """Return the run folders that paths and patterns name, each once, in the order given.

    The matches of a pattern are sorted by name. A folder that contains run folders names all of them.

    Raises:
        SettingsError: an argument names no run.
    """
    found: list[Path] = []
    for argument in arguments:
        paths = [Path(argument)] if Path(argument).exists() else [Path(p) for p in sorted(glob.glob(argument))]
        runs = [p for path in paths for p in ([path] if (path / CONFIG).is_file() else sorted(path.glob("*")))]
        runs = [path for path in runs if (path / CONFIG).is_file()]
        if not runs:
            raise SettingsError(f"{argument}: expected a run folder, a folder of runs, or a pattern of these")
        found += runs
    return list({path.resolve(): path for path in found}.values())


@dataclass(frozen=True, repr=False)
class Run:
    """The content of a run folder; the run may be incomplete.

    Args:
        folder: path of the run folder.
        config: config.yaml, the settings as nested mappings.
        summary: summary.json.
        history: the lines of metrics.jsonl.
        partition: partition.json without the rows.
        environment: environment.json.
        trusted: whether this process has run it, so that `load_model` may run the code that its folder names.
        on: the test set of the results: test, which are the clients' own rows, or one of `sets`.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    history: tuple[RoundMetrics, ...]
    partition: Mapping[str, Any]
    environment: Mapping[str, Any]
    trusted: bool = field(default=False, compare=False)
    on: Split = "test"

    @property
    def name(self) -> str:
        """The folder's name; if it is a number, such as that of a job or seed, the folder above too."""
        path = self.folder.resolve()
        return "/".join(path.parts[-2:]) if path.name.isdigit() else path.name

    @property
    def method(self) -> str:
        """The method's name on the command line."""
        return self.summary["method"]

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config["seed"]

    @property
    def complete(self) -> bool:
        """Whether all planned rounds are finished."""
        return self.summary.get("complete") is True

    @property
    def done(self) -> int:
        """The last finished round, from metrics.jsonl: a killed run does not update summary.json."""
        return self.history[-1].round if self.history else 0

    @property
    def sets(self) -> list[str]:
        """The names of the test sets besides the clients' own."""
        names = dict.fromkeys(scope.split for line in self.history for scope in line.evaluations)
        return [name for name in names if name not in SPLITS]

    @property
    def accuracy(self) -> float:
        """Mean test accuracy over clients of the reported model in the last round; NaN if it was not evaluated."""
        if "accuracy" in self.summary.get("metrics", ("accuracy",)):
            return self.mean("accuracy")
        raise AttributeError(f'this run has no accuracy: use run.mean(), its {self.primary}, or run.summary["metrics"]')

    def mean(self, metric: str | None = None) -> float:
        """Return the mean over clients of a metric (default: the primary one), as `accuracy`; NaN if there is none."""
        stats = self.stats("last")
        found = stats and stats.metrics.get(metric or self.primary)
        return found.mean if found else math.nan

    @property
    def primary(self) -> str:
        """The metric that decides: `eval.primary`."""
        return self.summary.get("primary", {}).get("name", "accuracy")

    @property
    def higher(self) -> bool:
        """Whether a higher value of the primary metric is better."""
        return self.summary.get("primary", {}).get("higher_is_better", True)

    def per_client(self) -> DataFrame:
        """Return per_client.csv with the accuracy, the method, the seed and the client's name of each row.

        `reported` says whether the method reports the model of the row. Each metric with intervals has the columns
        `METRIC_low` and `METRIC_high`, and AUROC and RMSE have `METRIC_why`, the reason if there is no interval.
        """
        from pflsim.analysis.intervals import METRICS, VARIANCES, with_interval

        found = self._described(self._clients)
        metrics = *(name for name in METRICS if name in found), *(SHARES if THRESHOLD in found else ())
        for metric in metrics:
            ends = with_interval(metric, self.estimates(metric, self._clients))
            ends = ends.loc[:, ["low", "high", *["why"] * (metric in VARIANCES)]]
            found = found.join(ends.where(found["split"] == "test").add_prefix(f"{metric}_"))
        return found

    def _described(self, rows: DataFrame) -> DataFrame:
        """Return rows of clients with the method, the seed, the client's name, and whether the model is reported."""
        names = dict(enumerate(self.partition.get("names", ())))
        name = rows["client"].map(lambda client: names.get(client, str(client)))
        reported = rows.eval(f"model == '{self.reported.model}' and phase == '{self.reported.phase}'")
        return rows.assign(method=self.method, seed=self.seed, name=name, reported=reported)

    def predictions(self) -> DataFrame:
        """Return the rows of `read_predictions` with the method, the seed and the client's name.

        `reported` says whether the method reports the model of the row.

        Raises:
            SettingsError: the run has recorded no scores.
        """
        if (found := read_predictions(self.folder)) is None:
            raise SettingsError(f"{self.folder} has no {PREDICTIONS}: run with tracking.predictions=true")
        return self._described(found)

    def scores(self, round_number: int, scope: Scope | None = None) -> DataFrame | None:
        """Return the rows of `predictions` for a round and a scope, as `counts`; None if there are none."""
        model, split, phase = scope or self.reported
        found = self._scores if split == "test" else None
        if found is not None:
            found = found.query("round == @round_number and model == @model and phase == @phase")
        return None if found is None or found.empty else found

    def estimates(self, metric: str, rows: DataFrame) -> DataFrame:
        """Return value, variance, and `n` of a proportion, of a metric for rows of per_client.csv.

        `why` is the reason if a variance is missing, see `pflsim.analysis.intervals.VARIANCES`.
        """
        from pandas import DataFrame

        from pflsim.analysis.intervals import OF_ROWS, VARIANCES, variances_of

        found = DataFrame({"value": rows[metric], "variance": math.nan, "n": math.nan, "why": ""})
        if metric in OF_ROWS:
            found["n"] = rows["total"].where(rows["correct"].notna() & (rows["total"] > 0))
        elif metric in SHARES and THRESHOLD in rows:
            found["n"] = self._share_of(metric, rows)
            found.loc[found["value"].isna(), ["n", "why"]] = math.nan, NO_SHARE
        else:
            found["why"] = UNSCORED if metric in VARIANCES else "this metric has none"
            if metric in VARIANCES and self._scores is not None:
                place = rows.query("split == 'test'").loc[:, SCORED].rename_axis("place").reset_index()
                own = self._scores.merge(place, on=SCORED)
                each = variances_of(metric, own, own["place"].to_numpy())
                for name, values in zip(("variance", "why"), zip(*each.values(), strict=True), strict=False):
                    found.loc[[*each], name] = values
        return found

    def _share_of(self, metric: str, rows: DataFrame) -> np.ndarray:
        """Return the number of examples of which each value of one of `SHARES` is a share."""
        counts, each = self.partition["class_counts"], zip(rows["client"], rows["split"], strict=True)
        no, yes = np.array([counts[client].get(split, (0, 0)) for client, split in each], float).T
        sensitivity, specificity = (rows[name].fillna(1).to_numpy() for name in SHARES[:2])
        predicted = np.rint(sensitivity * yes + (1 - specificity) * no)
        return dict(zip(SHARES, (yes, no, predicted, yes + no - predicted), strict=True))[metric]

    def threshold(self, round_number: int, client: int | None, scope: Scope) -> float:
        """Return the threshold of a client in a round, or without a client that of all; NaN if none was chosen."""
        found: Any = self.counts(round_number, scope).get(THRESHOLD, {})
        line = next((line for line in self.history if line.round == round_number and scope in line.evaluations), None)
        every = line.evaluations[scope].metrics[THRESHOLD].pooled if line else math.nan
        return float(found.get(client, every))

    @cached_property
    def _scores(self) -> Any:
        """The rows of predictions.npz, those of a round once; None if the run has none."""
        if (found := read_predictions(self.folder)) is not None:
            found = found[(found["when"] == "last") | (found["round"] != found["round"].max())]
        return found

    def untrained(self, until: int) -> set[int]:
        """Return the clients that have not taken part in a round up to this one, because of `fraction` or faults."""
        how = self._participation
        absent = self._clients.query("fault not in ('', 'straggler')").groupby("round")["client"].agg(set).to_dict()
        never = set(range(how[0]))
        for line in self.history:
            if 0 < line.round <= until and never:
                drawn = past_cohort(line.cohort, self.seed, line.round, *how)
                never -= {*drawn} - absent.get(line.round, set())
        return never

    @property
    def _participation(self) -> tuple[int, float, Participation]:
        """The number of clients that train, and how those of a round are drawn."""
        clients = self.config["clients"] - Eval(holdout_clients=run_settings(self)["eval.holdout_clients"]).newcomers
        return clients, self.config.get("fraction", 1.0), Participation(**self.config.get("participation", {}))

    def epsilon(self, until: int) -> float | None:
        """Return ε of differential privacy up to a round, the largest of all clients; None if there is none to show."""
        lines = (line for line in self.history if line.round <= until)
        about = self.summary.get("privacy")
        if about and until == about["rounds"] and (spent := about["epsilon"]) is not None:
            return spent["max"] if isinstance(spent, Mapping) else spent
        found = epsilons(about, until, rounds_drawn(lines, self.seed, *self._participation)) if about else []
        return max(found, default=None)

    def metrics(self) -> DataFrame:
        """Return a row per round with the values of metrics.jsonl by dotted key."""
        from pandas import DataFrame

        return DataFrame([dotted(json.loads(to_line(line))) for line in self.history])

    def overview(self) -> dict[str, Any]:
        """Return what ran and its result as short values by name."""
        stats, traffic = self.stats("last"), self.history[-1].traffic_total if self.history else Traffic()
        return {
            **{key: self.summary[key] for key in DESCRIPTION},
            "rounds": self.done if self.complete else f"{self.done} of {self.summary['rounds_planned']}",
            "reported model": f"{self.reported.model}, {self.reported.phase}",
            self.primary: self.mean(),
            "worst decile": math.nan if stats is None else stats.primary.worst_decile,
            "up MB": traffic.up_bytes / 1e6,
            "down MB": traffic.down_bytes / 1e6,
            "seconds": self.summary["seconds"],
            "folder": str(self.folder),
        }

    def __repr__(self) -> str:
        """Return the values of `overview`, one per line."""
        return "\n".join(f"{key:15}{_short(value)}" for key, value in self.overview().items())

    @property
    def partition_hash(self) -> str:
        """The hash of every client's examples."""
        return self.partition["hash"]

    @property
    def examples_hash(self) -> str:
        """The hash of every client's examples; with task=language_model, also of the vocabulary of its tokens."""
        return self.partition.get("vocabulary", self.partition_hash)

    @cached_property
    def own_code(self) -> dict[str, str]:
        """The digests of the user's code by module; of all sessions, joined by +, if it changed between them."""
        each = [session.get("own_code", {}) for session in read_sessions(self.folder)]
        names = dict.fromkeys(name for digests in each for name in digests)
        return {name: "+".join(dict.fromkeys(own[name][:8] for own in each if name in own)) for name in names}

    @property
    def reported(self) -> Scope:
        """The scope that the method reports: the reported model at its phase, on test data or the set `on`."""
        return self.scope()

    def scope(self, model: ModelKind | None = None) -> Scope:
        """Return the scope of a model (default: the reported model) at the phase at which it is evaluated."""
        kind = model or cast(ModelKind, self.summary["reported_model"])
        return Scope(kind, self.on, cast(EvalPhase, self.summary["accuracy_of"]["phase"][kind]))

    def at(self, choice: Choice, model: ModelKind | None = None) -> RoundMetrics | None:
        """Return the round of a choice for a model (default: the reported model); None if there is no such round."""
        return chosen_round(self.history, self.scope(model), choice)

    def stats(self, choice: Choice) -> Evaluation | None:
        """Return the reported model's test results in the round of a choice; None if there is no such round."""
        line = self.at(choice)
        return None if line is None else line.evaluations[self.reported]

    def counts(self, round_number: int, scope: Scope | None = None) -> DataFrame:
        """Return the rows of `per_client` for a round, by client; the default scope is the reported model on test data.

        Clients without examples of the split are left out.
        """
        model, split, phase = scope or self.reported
        found = self._clients.query("round == @round_number and total > 0")
        found = found.query("model == @model and split == @split and phase == @phase")
        return found.set_index("client").sort_index()

    @cached_property
    def _clients(self) -> Any:
        """The rows of per_client.csv without an incomplete last line."""
        from pandas import MultiIndex, read_csv

        with reading(self.folder / PER_CLIENT, FORM):
            text = (self.folder / PER_CLIENT).read_text(encoding="utf-8")
            text = text[: text.rfind("\n") + 1]
            others = {*text.partition("\n")[0].split(",")} - {*TEXTS, *WHOLE}
            found = read_csv(
                io.StringIO(text),
                dtype={**dict.fromkeys(TEXTS, str), **dict.fromkeys(WHOLE, int)},
                keep_default_na=False,
                converters=dict.fromkeys(others, _number),
            )
            if found["correct"].notna().to_numpy().all():
                found["correct"] = found["correct"].astype(int)
            place = found.assign(late=found["model"] == "newcomer")
            order = MultiIndex.from_frame(place.loc[:, ["round", "late", "client", "split", "model", "phase"]])
            if not (order.is_unique and order.is_monotonic_increasing):
                raise ValueError("some rows are duplicated or not in order")
            classes = "accuracy" in self.summary
            return found.assign(accuracy=found["correct"] / found["total"]) if classes else found


def _number(cell: str) -> float:
    """Return the exact number of a cell, which `read_csv` of pandas 2 does not; NaN if the cell is empty."""
    return float(cell or "nan")


class Runs(tuple[Run, ...]):
    """Runs in order, as frames with a row per run, per round, or per client and round."""

    def summary(self) -> DataFrame:
        """Return a row per run: the settings in which the runs differ, and the result."""
        from pandas import DataFrame

        found = [run_settings(run) for run in self]
        varied = dict.fromkeys(key for own in found for key in own if distinguishes(key, own, found))
        return DataFrame(
            {"method": run.method, **{key: own.get(key, "") for key in varied}, "seed": run.seed}
            | {key: value for key, value in run.overview().items() if key not in DESCRIPTION}
            for run, own in zip(self, found, strict=True)
        )

    def per_client(self) -> DataFrame:
        """Return the rows of `Run.per_client` with the name of the run."""
        return self._named(run.per_client() for run in self)

    def metrics(self) -> DataFrame:
        """Return the rows of `Run.metrics` with the name of the run."""
        return self._named(run.metrics() for run in self)

    def _named(self, frames: Iterable[DataFrame]) -> DataFrame:
        from pandas import concat

        found = concat([frame.assign(run=run.name) for run, frame in zip(self, frames, strict=True)], ignore_index=True)
        found.insert(0, "run", found.pop("run"))
        return found

    def __repr__(self) -> str:
        """Return `summary` as text."""
        return self.summary().to_string(index=False, float_format=_short)

    def _repr_html_(self) -> str:
        return self.summary().to_html(index=False, float_format=_short)


def _short(value: object) -> str:
    """Return a value as people read it: four digits of a number."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def incomplete(runs: Iterable[Run]) -> list[str]:
    """Return a line for each run that is not complete."""
    planned = [(run, run.summary["rounds_planned"]) for run in runs if not run.complete]
    return [f"{run.folder} is not complete: {run.done} of {rounds} rounds are done" for run, rounds in planned]


def read_run(folder: Path) -> Run:
    """Read a run folder; the run may still be running or may have been stopped.

    Raises:
        SettingsError: the folder is no run folder, has no finished round, or a file in it cannot be read.
    """
    with reading(folder / CONFIG, FORM):
        newer = {name: getattr(Settings(), name) for name in NEWER}
        config = {**newer, **saved_config(folder / CONFIG)}
        valid(Settings, config)
        if missing := [key for key in ("seed", "rounds", *COMPONENTS) if key not in config]:
            raise ValueError(f"{missing[0]} is missing")
    environment = read_environment(folder)
    report_death(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise SettingsError(f"{folder}: this run has not finished a round yet")
    summary = read_json(folder / "summary.json", SummaryFile)
    partition = read_json(folder / "partition.json", PartitionFile)
    partition = {key: value for key, value in partition.items() if key not in SPLITS}  # the rows are long
    with reading(folder / "metrics.jsonl", FORM):
        history = tuple(read_history(folder))
        run = Run(folder, config, summary, history, partition, environment)
        rounds = [line.round for line in history]
        if rounds != sorted(set(rounds)) or (summary.get("complete") and rounds[-1:] != [summary["rounds"]]):
            raise ValueError(f"its rounds are not in order, or are not the {summary['rounds']} of summary.json")
        if {found.measures.primary for line in history for found in line.evaluations.values()} - {run.primary}:
            raise ValueError(f"its primary metric is not {run.primary}, as in summary.json")
    return run


def other_sets(run: Run) -> list[str]:
    """Return the names of the results that `judged_on` takes."""
    return [*run.sets, *(f"new_{phase}" for phase in {*run.per_client().query("model == 'newcomer'")["phase"]})]


def judged_on(run: Run, name: str | None, others: Sequence[Run] = ()) -> Run:
    """Return a run that reports its results on another test set; without a name, the run.

    Args:
        run: the run.
        name: a test set of `eval.sets`; or new_PHASE, of the clients that join after the last round, see
            `NewcomerRecord`: new_received, new_trained, new_trained_10, new_recalibrated_10, ...
        others: the runs that it is compared with; an error lists what these have as well.

    Raises:
        SettingsError: the run has no such results.
    """
    if name is None or not run.history:
        return run
    if name in run.sets:
        return replace(run, on=name)
    scope = Scope(cast(ModelKind, "newcomer"), "test", cast(EvalPhase, name.removeprefix("new_")))
    last, rows = run.history[-1], run.counts(run.history[-1].round, scope).reset_index()
    if rows.empty or name == scope.phase:
        has = sorted({*other_sets(run)}.intersection(*map(other_sets, others)))
        none = "this run has no other test sets and no new clients; run with eval.sets or eval.holdout_clients=1"
        none = "these runs have none in common; compare fewer of them" if other_sets(run) else none
        more = "; eval.newcomer_rows=[10] adds some, and recalibrated ones for values and two classes"
        more *= any(each.startswith("new_") for each in has)
        raise SettingsError(f"{run.folder}: --set {name}: {nearest(name, has) + more if has else none}")
    measures = next(each.measures for line in run.history for each in line.evaluations.values())
    found = evaluation(
        [
            EvalRow(row["client"], "test", scope.model, scope.phase, row["correct"], row["total"], row["loss"],
                    metrics={key: row[key] for key in measures.columns if math.isfinite(row[key])})
            for row in rows.to_dict("records")
        ],
        measures,
    )  # fmt: skip
    history = [replace(line, evaluations={}) for line in run.history[:-1]]
    of = {"clients": "newcomers", "phase": {**run.summary["accuracy_of"]["phase"], scope.model: scope.phase}}
    history.append(replace(last, evaluations={scope: found} if found else {}))
    summary = {**run.summary, "reported_model": scope.model, "accuracy_of": of, "newcomers": None}
    return replace(run, history=tuple(history), summary=summary)


def judged(runs: Iterable[Run], name: str | None) -> list[Run]:
    """Return runs that report their results on another test set, see `judged_on`.

    Runs of `pflsim baselines`, which are evaluated on no sets of `eval.sets`, are left out with a warning if the other
    runs have the set.

    Raises:
        SettingsError: a run has no such results.
    """
    found, without, runs = list[Run](), list[Run](), [*runs]
    others = [run for run in runs if not is_baseline(run.method)]
    for run in runs:
        try:
            found.append(judged_on(run, name, others))
        except SettingsError:
            if not is_baseline(run.method):
                raise
            without.append(run)
    if without and not found:
        judged_on(without[0], name)
    if without:
        names = listed([*dict.fromkeys(identity(run.method).display for run in without)])
        logger.warning("left out, because they have no results on %s: %s", name, names)
    return found


def run_settings(run: Run) -> dict[str, Any]:
    """Return a run's settings without those in `IGNORED`; runs that differ only in their seed have equal settings.

    The key of a component (`method`, `data`, `model`, …) holds the name used on the command line.
    """
    names: Mapping[str, str] = run.config.get("names") or {}
    known = {"method": run.method, "data": run.summary["data"], "model": run.summary["model"]}
    names = {**names, "data": run.summary["data"]}  # the name of a file, if the option is a format such as npz
    chosen = {
        part: names.get(part) or known.get(part) or str(run.config[part].get("_target_", "")).rpartition(".")[2]
        for part in COMPONENTS
    }
    return settings_by_key(run.config, chosen)


def settings_by_key(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a config by dotted key, without those `IGNORED`.

    Args:
        config: settings as nested mappings; missing ones have their defaults.
        names: the name of each component.
    """
    default = {key: value for key, value in asdict(Settings()).items() if key not in COMPONENTS}
    found: dict[str, Any] = {part: names[part] for part in COMPONENTS} | dotted(default) | dotted(config)
    if found["local_epochs"] is None and found["local_steps"] is None:
        found["local_epochs"] = 1
    if found.get("privacy.epsilon"):
        found["privacy.noise"] = None  # it follows from epsilon
    return {key: value for key, value in found.items() if not any(f"{key}.".startswith(f"{name}.") for name in IGNORED)}


def distinguishes(name: str, key: Mapping[str, Any], keys: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a setting differs between groups; a component's setting, between groups with that component.

    The name of a method includes its server optimiser. The learning rate, which is tuned for each method, is a setting
    of the method. A setting of a baseline that it does not use, such as its learning rate, is not compared with runs.
    """
    component, baseline = name.partition(".")[0].replace("server_optimizer", "method"), is_baseline(key["method"])
    component = "method" if name == "lr" else component
    used = {name, component} & {*FEDERATION, *PROTOCOL} - {"eval.every"}
    keys = [k for k in keys if used or is_baseline(k["method"]) == baseline]
    peers = [k for k in keys if name == component or component not in COMPONENTS or k[component] == key[component]]
    return any(name not in other or other[name] != key[name] for other in peers)
