"""The command line `pflsim probe data=…`: does personalisation pay on these data?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pflsim.analysis.probe import APPROACHES, Answer, page, reporting, unlikeness, validation
from pflsim.analysis.runs import Run, read_run
from pflsim.commands.sweep import parallel_runs
from pflsim.commands.tune import positive, side_by_side
from pflsim.config.compose import composed, composing, config_folders, parse, to_settings
from pflsim.config.settings import Settings
from pflsim.data.federate import load_federation
from pflsim.errors import RunError, SettingsError
from pflsim.terminal.exit_status import command_parser, exit_status

EXAMPLES = "example:\n  {program} probe data=table data.path=visits.csv data.label=readmitted data.client=hospital\n"
OPTIONS = {"local": [""], "fedavg": [""], "ditto": ["method.lam=0.1", "method.lam=1"],
           "ifca": ["method.groups=2", "method.groups=4"]}  # fmt: skip
"""What the trials of a method have in turn."""
FACTORS = (0.1, 0.2, 0.5, 1, 2, 5)
"""Factors of `lr`, one for each trial."""
LEAST_PAIRS = 7
"""Fewer pairs (client, seed) cannot show a difference: for six, Holm's p is at least 3 · 2 · 2⁻⁶ = 0.09."""


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
    add("--into", type=Path, default="probe", metavar="DIR", help="new folder for runs and probe.html; default: probe")
    add("--config-dir", action="append", default=[], metavar="DIR", help="look for groups in DIR too; may be repeated")
    options = vars(parser.parse_intermixed_args(arguments))
    return exit_status(lambda: run_probe(options.pop("into"), options) and None)


def run_probe(folder: Path, options: Mapping[str, Any]) -> Answer:
    """Run the trials, then the chosen values with the other seeds; print the answer and write the page.

    Args:
        folder: of the runs and the page, new or empty.
        options: of the command line.

    Raises:
        SettingsError: a setting is wrong, or the folder has files.
        RunError: all trials of a method failed, or a run with another seed did.
    """
    words, seeds = options["settings"], options["seeds"]
    with composing(folders := config_folders(options["config_dir"])):

        def settings(name: str, text: str) -> Settings:
            own = ["executor=inline", *words, *text.split(), f"run_dir='{folder / name}'"]
            return to_settings(composed(own, folders))

        def finished(texts: Mapping[str, str]) -> dict[str, Run]:
            runs, found = {name: settings(name, text) for name, text in texts.items()}, dict[str, Run]()
            for number, failed in side_by_side(runs.values(), parallel_runs([*runs.values()])):
                name = [*runs][number]
                print(f"{name}: {failed or 'done'} (lr={runs[name].lr:g})", flush=True)
                found |= {} if failed else {name: read_run(folder / name)}
            return found

        keys = {str(override.key_or_group) for override in parse(words)}
        if "data" not in keys or keys & {"method", "run_dir", "resume"}:
            raise SettingsError("give data=NAME, such as data=digits, and leave out method, run_dir and resume")
        if folder.exists() and any(folder.iterdir()):
            raise SettingsError(f"{folder} is not empty; choose a new folder with --into DIR")
        asked = settings("first", "method=ditto")
        if (pairs := asked.clients * seeds) < LEAST_PAIRS or asked.clients < 2:
            raise SettingsError(f"{pairs} pairs (client, seed) show nothing; give {LEAST_PAIRS} by clients or --seeds")
        dataset, partition = load_federation(asked)
        first = finished({"first": "method=ditto rounds=2 trace.rounds=[1]"}).get("first")
        if first is None or first.at("best_val") is None:
            raise RunError("the first run failed, or no client has validation examples (split.validation)")
        runs = len(OPTIONS) * len(FACTORS) + len(APPROACHES) * (seeds - 1)
        left = (60 * options["minutes"] - first.summary["seconds"]) * parallel_runs([asked] * runs) / runs
        rounds = rounds_within(left, first, asked.rounds)
        plan = f"Up to {runs} runs, rounds={rounds}" + f" in place of {asked.rounds}: --minutes" * (
            rounds < asked.rounds
        )
        print(plan, flush=True)
        trials = {
            f"{method}-{n}": f"method={method} lr={asked.lr * factor:.3g} {own[n % len(own)]} rounds={rounds}"
            for method, own in OPTIONS.items()
            for n, factor in enumerate(FACTORS)
        }
        found, chosen = finished(trials), dict[str, str]()
        for method in APPROACHES:
            tried = {validation(reporting(method, r)): n for n, r in found.items() if method.startswith(r.method)}
            if tried:
                chosen[method] = tried[max(tried)]
        again = {f"{n}-s{s}": f"{trials[n]} seed={asked.seed + s}" for n in chosen.values() for s in range(1, seeds)}
        found |= finished(again) if again else {}
    if failed := sorted((APPROACHES.keys() - chosen.keys()) | (again.keys() - found.keys())):
        raise RunError(f"failed: {', '.join(failed)}")
    own = [reporting(m, run) for m, n in chosen.items() for name, run in found.items() if name.partition("-s")[0] == n]
    answer, out = Answer.of(own), folder / "probe.html"
    unlike = unlikeness(dataset, partition, folder / "first" / "trace" / "round_0001")
    out.write_text(page(answer, unlike=unlike, plan=plan, trials=trials, chosen=chosen, words=words), "utf-8")
    print(f"Does personalisation pay? {answer.pays}.", *answer.sentences, "How unlike the clients are:", sep="\n")
    lines = [f"{what}: {value:.2f} ({scale})" for what, value, scale in unlike]
    print(*lines, *answer.next(words), f"written: {out}", sep="\n", flush=True)
    return answer


def rounds_within(seconds: float, first: Run, rounds: int) -> int:
    """Return how many rounds a run may have to take so many seconds, at least 1.

    Args:
        seconds: of a run.
        first: a run of Ditto with two rounds; other methods' rounds take no longer.
        rounds: the most.
    """
    each = first.history[-1].total_seconds
    start = max(0.0, first.summary["seconds"] - 2 * each)
    return max(1, int(min(rounds, (seconds - start) / each)))
