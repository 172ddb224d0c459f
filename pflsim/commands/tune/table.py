"""The table of what was tuned."""

from __future__ import annotations

from collections.abc import Sequence

from pflsim.analysis.compare.tables import Table, numbers
from pflsim.commands.tune.space import described
from pflsim.commands.tune.study import Study, Trial
from pflsim.config.names import written
from pflsim.terminal.formats import NONE


def tuning_table(study: Study, trials: Sequence[Trial]) -> Table:
    """Return a line per method: its trials, its space, the chosen values and their validation accuracy."""
    rows = list[tuple[str, ...]]()
    for method in study.methods:
        own = [trial for trial in trials if trial.method == method.name]
        failed = sum(trial.failed is not None for trial in own)
        chosen = study.chosen(trials)[method.name]
        count = f"{len(own)}{f', {failed} failed' * (failed > 0)}{', all there are' * (len(own) < study.budget)}"
        values = chosen and ", ".join(f"{key} {written(value)}" for key, value in chosen.values.items())
        score = NONE if chosen is None else f"{chosen.accuracy:.4f}"
        rows.append((method.name, count, described(method.space), values or NONE, score))
    long = "" if study.rounds is None else f"; for {study.rounds} rounds"
    notes = (
        f"trials: at most {study.budget} of each method, with seed {study.seed}; the first has the values of the "
        "command line and the method's defaults, or the nearest ones of the space",
        "space: whole ranges and lists from the files of the methods and the command line; values are suggested by "
        "Optuna (TPE)",
        "validation accuracy: mean over clients, of the reported model in the trial's best round by validation",
        f"the chosen values run with seeds that no trial has used: {numbers(study.seeds)}{long}",
        *(f"commit {c['commit']}{', with uncommitted changes' * bool(c['dirty'])}" for c in study.code if c["commit"]),
        *(f"failed: {t.method} trial {t.number + 1}: {t.failed}" for t in trials if t.failed),
    )
    headers = ("method", "trials", "space", "chosen values", "validation\naccuracy")
    return Table("Tuning on validation data", headers, tuple(rows), notes)
