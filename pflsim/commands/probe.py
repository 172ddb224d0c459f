"""The command line `pflsim probe data=…`: does personalisation pay on these data?"""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pflsim.analysis.probe import APPROACHES, Answer, page, reporting, unlikeness, validation
from pflsim.analysis.runs import Run, read_run
from pflsim.commands.sweep import parallel_runs
from pflsim.commands.tune import positive, side_by_side
from pflsim.config.compose import composed, composing, config_folders, parse, to_settings
from pflsim.config.names import listed, program
from pflsim.config.settings import Settings
from pflsim.data.dataset import Dataset
from pflsim.data.federate import load_federation
from pflsim.data.federated import Partition
from pflsim.data.splits import copies_labels
from pflsim.errors import RunError, SettingsError
from pflsim.records.files import read_json, write_atomically
from pflsim.terminal.exit_status import command_parser, exit_status
from pflsim.terminal.formats import wrapped

EXAMPLES = "example:\n  {program} probe data=table data.path=visits.csv data.label=readmitted data.client=hospital\n"
OPTIONS = {"local": [""], "fedavg": [""], "ditto": ["method.lam=0.1", "method.lam=1"],
           "ifca": ["method.groups=2", "method.groups=4"]}  # fmt: skip
"""What the trials of a method have in turn."""
FACTORS = (0.1, 0.2, 0.5, 1, 2, 5)
"""Factors of `lr`, one for each trial."""
OWN = ("method", "server_optimizer", "run_dir", "resume")
"""Settings that the runs have themselves."""
PLAN = "plan.json"
"""The settings, seeds and rounds of the runs, by which the same command continues them."""
LEAST_PAIRS = 7
"""Fewer pairs (client, seed) cannot show a difference: for six, Holm's p is at least 3 · 2 · 2⁻⁶ = 0.09."""
LEAST_ROUNDS = 5
"""With fewer rounds, methods hardly differ."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Returns:
        The exit status: 0, 1 if a run fails, 2 after an error in the settings, 128 + n if signal n stops it.
    """
    parser = command_parser("probe", "Find out whether clients should train alone, together or personally.", EXAMPLES)
    add = parser.add_argument
    add("settings", nargs="*", metavar="SETTING", help="data=NAME and other settings")
    add("--seeds", type=positive, default=3, metavar="N", help="seeds; with one, no difference is clear; default: 3")
    add("--minutes", type=float, default=float("inf"), metavar="M", help="use fewer rounds, to end within M minutes")
    add("--into", type=Path, default="probe", metavar="DIR", help="folder for runs and probe.html; default: probe")
    add("--config-dir", action="append", default=[], metavar="DIR", help="look for groups in DIR too; may be repeated")
    options = vars(parser.parse_intermixed_args(arguments))
    return exit_status(lambda: run_probe(options.pop("into"), options) and None)


@dataclass(frozen=True, slots=True)
class Probe:
    """The runs of a probe.

    Args:
        folder: of the runs and the page.
        words: the settings of all runs as on the command line.
        folders: where configurations are looked for.
    """

    folder: Path
    words: Sequence[str]
    folders: Sequence[Path]

    def settings(self, name: str, text: str) -> Settings:
        """Return the settings of a run, with further ones in a text."""
        own = ["executor=inline", *self.words, *text.split(), f"run_dir='{self.folder / name}'"]
        with composing(self.folders):
            return to_settings(composed(own, self.folders))

    def drawn_at_random(self) -> Probe:
        """Return the probe with test rows that say nothing about personalisation by themselves, see `copies_labels`."""
        with composing(self.folders):
            keys = {str(override.key_or_group) for override in parse(self.words)}
        if "data" not in keys or keys & {*OWN}:
            raise SettingsError(f"give data=NAME, such as data=digits, and leave out {listed(OWN)}")
        if not copies_labels(self.settings("first", "").split):
            return self
        why = "test rows with the label shares of each client's training rows favour personal models"
        if given := keys & {"split", "split.test_by", "split.stratify"}:
            raise SettingsError(f"{listed(sorted(given))}: {why}; leave it out: split=merged draws them at random")
        print(wrapped(f"split=merged: {why}, so they are drawn at random"), flush=True)
        return replace(self, words=[*self.words, "split=merged"])

    def federation(self, seeds: int) -> tuple[Settings, Dataset, Partition]:
        """Return the settings of all runs, the data set and its clients, if they can show a difference."""
        if self.folder.exists() and any(self.folder.iterdir()) and not self.rounds(seeds):
            raise SettingsError(f"{self.folder} has another probe or other files; choose a new folder with --into DIR")
        dataset, partition = load_federation(asked := self.settings("first", "method=ditto"))
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

    def finished(self, texts: Mapping[str, str]) -> dict[str, Run]:
        """Run settings side by side and return the runs that did not fail."""
        runs, found = {name: self.settings(name, text) for name, text in texts.items()}, dict[str, Run]()
        for number, failed in side_by_side(runs.values(), parallel_runs([*runs.values()])):
            name = [*runs][number]
            print(f"{name}: {failed or 'done'} (lr={runs[name].lr:g})", flush=True)
            found |= {} if failed else {name: read_run(self.folder / name)}
        return found

    def rounds(self, seeds: int) -> int:
        """Return the rounds that an earlier session of the same command chose; 0 without one."""
        path = self.folder / PLAN
        found = read_json(path, dict[str, Any]) if path.is_file() else {}
        return found["rounds"] if found.items() >= self.about(seeds).items() else 0

    def about(self, seeds: int) -> dict[str, Any]:
        """Return what two sessions of the same probe have in common."""
        return {"settings": [*self.words], "seeds": seeds}

    def plan(self, asked: Settings, seeds: int, minutes: float) -> tuple[int, str]:
        """Run two rounds of Ditto and return how many rounds the runs have, and the plan in words."""
        began = time.monotonic()
        first = self.finished({"first": "method=ditto rounds=2 trace.rounds=[1]"}).get("first")
        if first is None or first.at("best_val") is None:
            raise RunError("the first run failed, or no client has validation examples (split.validation)")
        runs = len(OPTIONS) * len(FACTORS) + len(APPROACHES) * (seeds - 1)
        took, each = time.monotonic() - began, first.history[-1].total_seconds
        rounds, needed = rounds_within(minutes, took, each, runs / parallel_runs([asked] * runs), asked.rounds)
        rounds = self.rounds(seeds) or rounds
        if rounds < min(LEAST_ROUNDS, asked.rounds):
            shutil.rmtree(self.folder / "first")
            few = f"{runs} runs of {LEAST_ROUNDS} rounds take about {needed:.1f} minutes"
            raise SettingsError(f"--minutes {minutes:g} is too short: {few}")
        write_atomically(self.folder / PLAN, json.dumps({**self.about(seeds), "rounds": rounds}))
        fewer = f" in place of {asked.rounds}: --minutes" * (rounds < asked.rounds)
        return rounds, f"Up to {runs} runs, rounds={rounds}{fewer}"

    def fits(self, method: str) -> bool:
        """Return whether a method can run on the data with the model."""
        try:
            importlib.import_module("lightning_modules.prepare").prepare(self.settings("next", f"method={method}"))
        except SettingsError:
            return False
        return True


def run_probe(folder: Path, options: Mapping[str, Any]) -> Answer:
    """Run the trials, then the chosen values with the other seeds; print the answer and write the page.

    Args:
        folder: of the runs and the page: new, empty, or that of the same command.
        options: of the command line.

    Raises:
        SettingsError: a setting is wrong, or the folder has other files.
        RunError: all trials of a method failed, or a run with another seed did.
    """
    began, words, seeds = time.monotonic(), options["settings"], options["seeds"]
    if not options["minutes"] > 0:
        raise SettingsError(f"--minutes {options['minutes']:g}: expected a number above 0")
    probe = Probe(folder, words, config_folders(options["config_dir"])).drawn_at_random()
    asked, dataset, partition = probe.federation(seeds)
    given = partition.names or asked.names["partition"] == "explicit"
    made = "" if given else ", which deals the examples to clients that are not in the data"
    print(wrapped(f"{partition.clients} clients by partition={asked.names['partition']}{made}"), flush=True)
    rounds, plan = probe.plan(asked, seeds, options["minutes"])
    print(plan, flush=True)
    trials = {
        f"{method}-{n}": f"method={method} lr={asked.lr * factor:.3g} {own[n % len(own)]} rounds={rounds}"
        for method, own in OPTIONS.items()
        for n, factor in enumerate(FACTORS)
    }
    found, chosen = probe.finished(trials), dict[str, str]()
    for method in APPROACHES:
        tried = {validation(reporting(method, r)): n for n, r in found.items() if method.startswith(r.method)}
        if tried:
            chosen[method] = tried[max(tried)]
    again = {f"{n}-s{s}": f"{trials[n]} seed={asked.seed + s}" for n in chosen.values() for s in range(1, seeds)}
    found |= probe.finished(again) if again else {}
    if failed := sorted((APPROACHES.keys() - chosen.keys()) | (again.keys() - found.keys())):
        raise RunError(f"failed: {', '.join(failed)}")
    own = [reporting(m, run) for m, n in chosen.items() for name, run in found.items() if name.partition("-s")[0] == n]
    answer, out = Answer.of(own), folder / "probe.html"
    unlike = unlikeness(dataset, partition, folder / "first" / "trace" / "round_0001")
    advice, names = answer.next()
    where = [*probe.words, *(f"--config-dir={each}" for each in options["config_dir"])]
    names = ",".join(filter(probe.fits, names))
    command = f"{program()} tune {shlex.join([f'method={names}', *where, '--into', 'tuned'])}"
    repeat = f"{program()} probe {shlex.join([*where, f'--seeds={seeds}'])}"
    content = {"advice": advice, "command": command, "again": repeat, "plan": plan, "trials": trials, "chosen": chosen}
    out.write_text(page(answer, unlike=unlike, **content), "utf-8")
    lines = [f"{what}: {value:.2f} ({scale})".replace("-", "−") for what, value, scale in unlike]
    said = [f"Does personalisation pay? {answer.pays}.", *answer.sentences, "How unlike the clients are:", *lines]
    minutes = (time.monotonic() - began) / 60
    print(*map(wrapped, [*said, advice]), command, f"written: {out}, after {minutes:.1f} minutes", sep="\n", flush=True)
    return answer


def rounds_within(minutes: float, took: float, each: float, share: float, most: int) -> tuple[int, float]:
    """Return how many rounds runs may have to end within some minutes, and how long `LEAST_ROUNDS` take, in minutes.

    Args:
        minutes: of all runs, with the first.
        took: seconds of the first run, which had two rounds.
        each: seconds of a round of Ditto; other methods' rounds take no longer.
        share: the number of runs one after the other.
        most: the largest number of rounds.
    """
    start = max(0.0, took - 2 * each)
    rounds = ((60 * minutes - took) / share - start) / each
    return max(0, int(min(most, rounds))), (took + share * (start + LEAST_ROUNDS * each)) / 60
