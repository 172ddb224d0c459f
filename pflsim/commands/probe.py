"""The command line `pflsim probe data=…`: does personalisation pay on these data?"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pflsim.analysis.probe import APPROACHES, EVALUATIONS, Answer, chosen_trials, page, reporting, unlikeness, until
from pflsim.analysis.runs import Run, read_run
from pflsim.commands.sweep import parallel_runs
from pflsim.commands.tune import positive, side_by_side
from pflsim.config.compose import composed, config_folders, parse, to_settings
from pflsim.config.names import as_value, listed, program
from pflsim.config.settings import Settings
from pflsim.data.dataset import Dataset
from pflsim.data.federate import load_federation
from pflsim.data.federated import Partition
from pflsim.data.splits import copies_labels
from pflsim.display.formats import wrapped
from pflsim.display.identity import identity
from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError, SettingsError
from pflsim.records.files import read_json, write_atomically
from pflsim.records.folder import read_summary
from pflsim.terminal.sweep_table import SweepTable

EXAMPLES = "example:\n  {program} probe data=table data.path=visits.csv data.label=readmitted data.client=hospital\n"
OPTIONS = {"local": [""], "fedavg": [""], "ditto": ["method.lam=0.1", "method.lam=1"],
           "ifca": ["method.groups=2", "method.groups=4"]}  # fmt: skip
"""What the trials of a method have in turn."""
FACTORS = (0.1, 0.2, 0.5, 1, 2, 5)
"""Factors of `lr`, one for each trial."""
BEYOND, EDGES = 2.5, 2
"""Factor of a learning rate beyond the lowest or highest one that was tried, and how often one is tried."""
DOUBLINGS = 3
"""How often the runs of the chosen values go on to twice their rounds."""
OWN = ("method", "server_optimizer", "eval.models", "run_dir", "resume")
"""Settings that the runs have themselves."""
PLAN = "plan.json"
"""The settings and the rounds of the trials, by which the same command continues them."""
LEAST_PAIRS = 7
"""Fewer pairs (client, seed) cannot show a difference: for six, Holm's p is at least 3 · 2 · 2⁻⁶ = 0.09."""
Trials = dict[str, tuple[str, float]]
"""The settings of each trial by name: the method with its own setting, and the learning rate."""


def options(add: Callable[..., Any]) -> None:
    """Add the options of the command."""
    add("settings", nargs="*", metavar="SETTING", help="data=NAME and other settings")
    add("--seeds", type=positive, default=3, metavar="N", help="seeds; with one, no difference is clear; default: 3")
    add("--minutes", type=float, default=float("inf"), metavar="M", help="use fewer rounds, to end within M minutes")
    add("--into", type=Path, default="probe", metavar="DIR", help="folder for runs and probe.html; default: probe")
    add("--config-dir", action="append", default=[], metavar="DIR", help="look for groups in DIR too; may be repeated")


def execute(options: argparse.Namespace) -> None:
    """Find out whether clients should train alone, together or personally."""
    run_probe(options.into, vars(options) | {"settings": parse(options.settings)})


@dataclass(slots=True)
class Probe:
    """The runs of a probe.

    Args:
        folder: of the runs and the page.
        given: the settings of all runs by dotted key.
        folders: where configurations are looked for.
        every: rounds between two evaluations; 0: as the settings say.
        stopped: the signal after which no run starts; None: there was none.
    """

    folder: Path
    given: Mapping[str, Any]
    folders: Sequence[Path]
    every: int = 0
    stopped: Stopped | None = None

    def settings(self, name: str, text: str) -> Settings:
        """Return the settings of a run, with further ones in a text."""
        own = {"executor": "inline", **self.given, **parse(text.split()), "run_dir": str(self.folder / name)}
        return to_settings(composed(own | {"eval.every": self.every} if self.every else own, self.folders))

    def drawn_at_random(self) -> Probe:
        """Return the probe with test rows that say nothing about personalisation by themselves, see `copies_labels`."""
        keys = self.given.keys()
        if "data" not in keys or keys & {*OWN}:
            raise SettingsError(f"give data=NAME, such as data=digits, and leave out {listed(OWN)}")
        if not copies_labels(self.settings("first", "").split):
            return self
        why = "test rows with the label shares of each client's training rows favour personal models"
        if given := keys & {"split", "split.test_by", "split.stratify"}:
            raise SettingsError(f"{listed(sorted(given))}: {why}; leave it out: split=merged draws them at random")
        print(wrapped(f"split=merged: {why}, so they are drawn at random"), flush=True)
        return replace(self, given={**self.given, "split": "merged"})

    def federation(self, seeds: int) -> tuple[Settings, Dataset, Partition]:
        """Return the settings of all runs, the data set and its clients, if they can show a difference."""
        if self.folder.exists() and any(self.folder.iterdir()) and not self.earlier():
            raise SettingsError(f"{self.folder} has another probe or other files; choose a new folder with --into DIR")
        asked = self.settings("first", "method=ditto")
        if asked.rounds < EVALUATIONS:
            raise SettingsError(
                f"rounds={asked.rounds}: give at least {EVALUATIONS}, to see whether results still rise"
            )
        if asked.lr_schedule == "cosine" or asked.lr_decay < 1 or asked.stop.patience:
            why = "whether results still rise shows only at a constant learning rate"
            raise SettingsError(f"{why}; leave out lr_schedule, lr_decay and stop.patience")
        dataset, partition = load_federation(asked)
        if partition.clients < 2:
            raise SettingsError("there is one client; give at least two")
        if not partition.names and (pairs := partition.clients * seeds) < LEAST_PAIRS:
            raise SettingsError(f"{pairs} pairs (client, seed) show nothing; give {LEAST_PAIRS} by clients or --seeds")
        if partition.names and partition.clients < LEAST_PAIRS:
            print(
                f"With {partition.clients} clients, no difference can be clear; with {LEAST_PAIRS}, it can.", flush=True
            )
        if (dataset.y == dataset.y[0]).all():
            raise SettingsError("all labels are equal")
        return asked, dataset, partition

    def missing(self, names: Iterable[str], rounds: int) -> list[str]:
        """Return which runs have done fewer rounds."""
        return [name for name in names if read_summary(self.folder / name).get("rounds", 0) < rounds]

    def finished(self, texts: Mapping[str, str], rounds: int, later: int = 0) -> dict[str, Run]:
        """Run settings side by side, or continue them; return the runs that did not fail, as they are after a round.

        Args:
            texts: the settings by name.
            rounds: the round.
            later: number of runs that follow, for the time that is left.
        """
        names, began = self.missing(texts, rounds), time.monotonic()
        lost, runs = {*names}, [self.settings(name, f"{texts[name]} rounds={rounds}") for name in names]
        try:
            with SweepTable(names, bool(runs) and runs[0].progress in ("auto", "live")) as table:
                each = side_by_side(runs, parallel_runs(runs), table) if runs and not self.stopped else ()
                for ended, (number, failed) in enumerate(each, start=1):
                    lost -= set() if failed else {names[number]}
                    minutes = (time.monotonic() - began) / 60 * (len(runs) + later - ended) / ended
                    left = f"; about {minutes:.1f} minutes left" * (minutes > 0)
                    print(f"{names[number]}: {failed or 'done'} (lr={runs[number].lr:g}){left}", flush=True)
        except Stopped as stopped:
            self.stopped = stopped
        return {name: until(read_run(self.folder / name), rounds) for name in texts if name not in lost}

    def earlier(self) -> dict[str, Any]:
        """Return the plan of an earlier session with the same settings, but for rounds; empty without one."""
        path = self.folder / PLAN
        found = read_json(path, dict[str, Any]) if path.is_file() else {}
        return found if found.get("settings") == self.words("rounds") else {}

    def words(self, without: str = "") -> list[str]:
        """Return the settings as on the command line, on request without one that may change between sessions."""
        return [f"{key}={as_value(value)}" for key, value in self.given.items() if key != without]

    def plan(self, asked: Settings, seeds: int, minutes: float) -> tuple[int, int, str]:
        """Run two rounds of Ditto; return the rounds of trials and of the runs after them, and the plan in words."""
        began, earlier = time.monotonic(), self.earlier()
        first = self.finished({"first": "method=ditto trace.rounds=[1]"}, 2).get("first")
        if first is None or first.at("best_val") is None:
            failed = "the first run failed, or no client has validation examples (split.validation)"
            raise self.stopped or RunError(failed)
        runs = len(OPTIONS) * len(FACTORS) + len(APPROACHES) * (seeds - 1)
        twice = len(OPTIONS) * seeds if minutes < float("inf") else 0  # the time to double the rounds once
        took, each = time.monotonic() - began, first.history[-1].total_seconds
        share = (runs + twice) / parallel_runs([asked] * runs)
        rounds, needed = rounds_within(minutes, took, each, share, asked.rounds)
        plan = {"settings": self.words("rounds"), "asked": asked.rounds, "rounds": rounds} | earlier
        if plan["rounds"] < EVALUATIONS:
            shutil.rmtree(self.folder / "first")
            few = f"{runs} runs of {EVALUATIONS} rounds take about {needed:.1f} minutes"
            raise SettingsError(f"--minutes {minutes:g} is too short: {few}")
        write_atomically(self.folder / PLAN, json.dumps(plan))
        rounds, self.every = plan["rounds"], min(asked.eval.every, plan["rounds"] // EVALUATIONS)
        fewer = f" in place of {asked.rounds}: --minutes" * (rounds < plan["asked"])
        after = rounds if asked.rounds == plan["asked"] else max(rounds, asked.rounds)
        return rounds, after, f"Up to {runs} runs, rounds={rounds}{fewer}"

    def trials(self, lr: float, rounds: int, later: int) -> tuple[dict[str, str], dict[str, str], list[str]]:
        """Run the trials of all methods, and more beyond the lowest and highest learning rate if it is chosen.

        Returns:
            The settings of all trials by name, the chosen trial of each method, and lines about rates at an edge.
        """
        tried, found, chosen, lines, texts = Trials(), dict[str, Run](), dict[str, str](), list[str](), dict[str, str]()
        new: Trials = {
            f"{method}-{n}": (f"method={method} {own[n % len(own)]}", lr * factor)
            for method, own in OPTIONS.items()
            for n, factor in enumerate(FACTORS)
        }
        for _ in range(1 + EDGES):
            tried |= new
            texts = {name: f"{own} lr={rate:.3g}" for name, (own, rate) in tried.items()}
            found |= self.finished({name: texts[name] for name in new}, rounds, later) if new else {}
            chosen = chosen_trials(found)
            new, lines = beyond(tried, chosen)
        if failed := sorted(APPROACHES.keys() - chosen.keys()):
            raise self.stopped or RunError(f"failed: {', '.join(failed)}")
        return texts, chosen, lines

    def answer(
        self, asked: Settings, names: Sequence[Mapping[str, str]], texts: Mapping[str, str], end: float
    ) -> Answer:
        """Return the answer after the rounds of the runs, or after twice as many while an approach still rises.

        Args:
            asked: the settings of all runs; their rounds are the first.
            names: the run of each method, for each seed.
            texts: the settings of the runs by name.
            end: when no other runs start, by `time.monotonic`.
        """
        found, runs, rounds = None, dict[str, Run](), asked.rounds
        for _ in range(1 + DOUBLINGS):
            runs = self.finished(texts, rounds)
            whole = [own for own in names if runs.keys() >= {*own.values()}]
            if len(whole) < len(names) and (found or not (whole and self.stopped)):
                break
            found = Answer.of(reporting(method, runs[name]) for own in whole for method, name in own.items())
            more = self.missing(texts, rounds := 2 * rounds)
            seconds = sum(line.total_seconds for name in more if name in runs for line in runs[name].history)
            seconds /= parallel_runs([asked] * len(texts))
            if not found.rises or self.stopped or time.monotonic() + seconds > end:
                break
            if more:
                print(f"{found.sentences[0]} About {seconds / 60:.1f} minutes.", flush=True)
        if found is None:
            raise self.stopped or RunError(f"failed: {', '.join(sorted(texts.keys() - runs.keys()))}")
        return found

    def fits(self, method: str) -> bool:
        """Return whether a method can run on the data with the model."""
        try:
            importlib.import_module("lightning_modules.prepare").prepare(self.settings("next", f"method={method}"))
        except SettingsError:
            return False
        return True


def run_probe(folder: Path, options: Mapping[str, Any]) -> Answer:
    """Run the trials, then the chosen values with all seeds; print the answer and write the page.

    Args:
        folder: of the runs and the page: new, empty, or that of the same command.
        options: of the command line; `settings` by dotted key.

    Raises:
        SettingsError: a setting is wrong, or the folder has other files.
        RunError: all trials of a method failed, or a run with another seed did; `Stopped`, after the answer from what
            is finished, if a signal stopped the probe.
    """
    began, seeds, minutes = time.monotonic(), options["seeds"], options["minutes"]
    if not minutes > 0:
        raise SettingsError(f"--minutes {minutes:g}: expected a number above 0")
    probe = Probe(folder, options["settings"], config_folders(options["config_dir"])).drawn_at_random()
    asked, dataset, partition = probe.federation(seeds)
    given = partition.names or asked.names["partition"] == "explicit"
    made = "" if given else ", which deals the examples to clients that are not in the data"
    print(wrapped(f"{partition.clients} clients by partition={asked.names['partition']}{made}"), flush=True)
    rounds, after, plan = probe.plan(asked, seeds, minutes)
    print(plan, flush=True)
    trials, chosen, notes = probe.trials(asked.lr, rounds, len(APPROACHES) * (seeds - 1))
    names = [{method: n + f"-s{s}" * (s > 0) for method, n in chosen.items()} for s in range(seeds)]
    texts = {own[m]: f"{trials[n]} seed={asked.seed + s}" for s, own in enumerate(names) for m, n in chosen.items()}
    answer = probe.answer(replace(asked, rounds=after), names, texts, began + 60 * minutes)
    if partition.names and asked.names["model"] == "linear":
        notes.append("Clients are given and the model is linear: compare the answer with a mixed-effects model too.")
    answer = replace(answer, notes=notes, page=folder / "probe.html")
    unlike = unlikeness(dataset, partition, folder / "first" / "trace" / "round_0001")
    (advice, methods), where = answer.next(), [f"--config-dir={each}" for each in options["config_dir"]]
    probed, longer = [*where, f"--seeds={seeds}", "--into", str(folder)], f"rounds={2 * answer.whole.runs[0].done}"
    words = ["tune", f"method={','.join(filter(probe.fits, methods))}", *probe.words(), *where, "--into", "tuned"]
    words = words if methods else ["probe", *probe.words("rounds"), longer, *probed]
    command, again = (f"{program()} {shlex.join(each)}" for each in (words, ["probe", *probe.words(), *probed]))
    content = {"advice": advice, "command": command, "again": again, "plan": plan, "trials": trials, "chosen": chosen}
    (folder / "probe.html").write_text(page(answer, unlike=unlike, **content), "utf-8")
    lines = [f"{what}: {value:.2f} ({scale})".replace("-", "−") for what, value, scale in unlike]
    said = [*repr(answer).split("\n"), "How unlike the clients are:", *lines, advice]
    ended = f"written: {answer.page}, after {(time.monotonic() - began) / 60:.1f} minutes"
    print(*map(wrapped, said), command, ended, sep="\n", flush=True)
    if probe.stopped:
        raise probe.stopped
    return answer


def beyond(tried: Trials, chosen: Mapping[str, str]) -> tuple[Trials, list[str]]:
    """Return trials beyond the lowest and highest learning rates if these are chosen, and a line for each method."""
    new, lines = Trials(), list[str]()
    for method, name in chosen.items():
        words, rate = tried[name]
        rates = [other for own, other in tried.values() if own == words]
        for end, factor, which in ((max(rates), BEYOND, "highest"), (min(rates), 1 / BEYOND, "lowest")):
            if rate == end:
                new[f"{name}-{which}"] = words, rate * factor
                lines.append(f"{identity(method).display}: lr={rate:.3g} is the {which} that was tried.")
    return new, lines


def rounds_within(minutes: float, took: float, each: float, share: float, most: int) -> tuple[int, float]:
    """Return how many rounds runs may have to end within some minutes, and how long the fewest take, in minutes.

    Args:
        minutes: of all runs, with the first.
        took: seconds of the first run, which had two rounds.
        each: seconds of a round of Ditto; other methods' rounds take no longer.
        share: the number of runs one after the other.
        most: the largest number of rounds.
    """
    start = max(0.0, took - 2 * each)
    rounds = ((60 * minutes - took) / share - start) / each
    return max(0, int(min(most, rounds))), (took + share * (start + EVALUATIONS * each)) / 60
