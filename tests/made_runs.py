"""Run folders with counts of our own choice, written by what writes real ones."""

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from pflsim.analysis.runs import Run, read_run
from pflsim.config.settings import Settings
from pflsim.records.environment import write_environment
from pflsim.records.evaluation import Evaluation, Stats
from pflsim.records.folder import write_config
from pflsim.records.summary import RunMeta
from pflsim.records.tracker import Tracker
from pflsim.types import EvalPhase, EvalRow, ModelKind, NewcomerRecord, RoundRecord, Split, TrainReport

Counts = Sequence[tuple[int, int]]
"""(correct, total) of client 0, 1, …"""
COMPONENTS: dict[str, dict[str, Any]] = {
    "method": {"client": {"_target_": "a.Client"}, "server": {"_target_": "a.Server"}},
    "data": {"_target_": "b.load"},
    "partition": {"_target_": "c.rule", "alpha": 0.1},
    "split": {"_target_": "d.rule", "validation": 0.1},
    "model": {"_target_": "e.Net", "hidden": [100]},
}


def make_run(
    folder: Path,
    test: Sequence[Counts],
    *,
    method: str = "fedavg",
    seed: int = 0,
    val: Sequence[Counts] | None = None,
    up: int = 10,
    down: int = 20,
    seconds: float = 2.0,
    digest: str | None = None,
    reported: tuple[ModelKind, EvalPhase] = ("personal", "trained"),
    complete: bool = True,
    names: Mapping[str, str] | None = None,
    parts: Mapping[str, Mapping[str, Any]] | None = None,
    on: Literal["all", "participants"] = "all",
    every: int = 1,
    new: Mapping[EvalPhase, Counts] | None = None,
    sets: Mapping[str, Sequence[Counts]] | None = None,
    **settings: Any,
) -> Path:
    """Write a run.

    Args:
        folder: where to.
        test: how every client does in every evaluated round, on test data.
        method: its name.
        seed: its seed.
        val: the same on validation data.
        up: bytes that each client sends in a round.
        down: and gets.
        seconds: what a round takes.
        digest: the partition's hash; by default the same for runs of a seed.
        evaluated: model and phase.
        complete: whether all rounds were done.
        names: what parts were called.
        parts: further settings of parts.
        on: whose models are evaluated.
        every: how often.
        new: how clients do that join after the last round, by phase.
        sets: how every client does in every evaluated round on other test sets.
        settings: others, by name.
    """
    clients = len(test[0])
    chosen = {part: {**COMPONENTS[part], **(parts or {}).get(part, {})} for part in COMPONENTS}
    called = {"method": method, "data": "digits", "partition": "dirichlet", "split": "official", "model": "mlp"}
    rounds = len(test) * every
    called |= names or {}
    config = Settings(**{"clients": clients, "rounds": rounds, "seed": seed, **chosen, **settings, "names": called})
    config = replace(config, eval=replace(config.eval, every=every, clients=on, sets=[*(sets or ())]))
    hashed = digest or f"{seed:064d}"
    meta = RunMeta(
        method, config.names["data"], "dirichlet(alpha=0.1)", hashed, config.names["model"], config.clients,
        config.rounds, seed, *reported, evaluated_on=on,
    )  # fmt: skip
    folder.mkdir(parents=True)
    write_config(folder, asdict(config))
    write_environment(folder)
    (folder / "partition.json").write_text(json.dumps({"hash": hashed}))
    with closing(Tracker(folder, meta)) as tracker:
        for number in range(1, rounds + 1):
            place, rest = divmod(number, every)
            rows = [] if rest else [*_rows(test[place - 1], "test", *reported)]
            if val is not None and not rest:
                rows += _rows(val[place - 1], "val", *reported)
            for name, each in (sets or {}).items():
                rows += _rows(each[place - 1], name, *reported)
            reports = tuple(TrainReport(client, 1, 1, up_bytes=up) for client in range(clients))
            sent = {client: down for client in range(clients)}
            tracker.round(
                RoundRecord(
                    number, tuple(range(clients)), reports, sent, tuple(rows), {"train": seconds, "total": seconds}
                )
            )
        if new:
            late = {
                phase: tuple(
                    replace(row, client=clients + row.client, model="personal")
                    for row in _rows(counts, "test", "personal", phase)
                )
                for phase, counts in new.items()
            }
            sizes = {row.client: down for row in late["received"]}
            tracker.newcomers(NewcomerRecord(rounds, sizes, late["received"], late["trained"]))
        tracker.close(complete)
    return folder


def _rows(counts: Counts, split: Split, model: ModelKind, phase: EvalPhase) -> list[EvalRow]:
    return [EvalRow(i, split, model, phase, right, total, 0.5) for i, (right, total) in enumerate(counts)]


EVALUATED: tuple[tuple[ModelKind, EvalPhase], ...] = (("personal", "trained"), ("global", "received"))
SPLITS: tuple[Split, ...] = ("val", "test")


def random_record(number: int, *, cohort: Sequence[int] | None = None, **changes: Any) -> RoundRecord:
    """A round of six clients, of which three take part, with other values of some fields."""
    draw = random.Random(number)
    cohort = tuple(sorted(draw.sample(range(6), 3)) if cohort is None else cohort)
    reports = [TrainReport(c, 10 + c, 5, {"ce": draw.random(), "prox": draw.random()}, 100 + c) for c in cohort]
    rows = [
        EvalRow(client, split, model, phase, draw.randint(0, 9), 9 + client, draw.random())
        for client in range(6)
        for split in SPLITS
        for model, phase in EVALUATED
    ]
    down, times = {c: 200 + c for c in cohort}, {"downlink": 0.25, "train": 0.5}
    return replace(RoundRecord(number, cohort, tuple(reports), down, tuple(rows), times), **changes)


def stats(mean: float) -> Evaluation:
    """Of ten clients, as if their accuracies were spread by 0.1 around the mean."""
    return Evaluation(10, 1.0, {"accuracy": Stats(10, 0, mean, mean, mean, 0.1, mean, mean - 0.1, mean + 0.1)})


def made(folder: Path, test: Sequence[Counts], **settings: Any) -> Run:
    """A run, written and read back."""
    return read_run(make_run(folder, test, **settings))
