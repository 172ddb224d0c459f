"""Charts of every client's accuracy, for one seed of every group."""

from __future__ import annotations

from collections.abc import Sequence

from pflsim.analysis.report.curves import Chart
from pflsim.analysis.results import Group, Run
from pflsim.figures.clients import draw_clients
from pflsim.figures.svg import colour_of, drawing, to_svg
from pflsim.run_folder.summary import Choice
from pflsim.terminal.formats import plural


def shown_runs(groups: Sequence[Group]) -> list[Run]:
    """Return one run of every group: that of the smallest common seed, else of the group's smallest seed."""
    common = set.intersection(*({run.seed for run in group.runs} for group in groups))
    seed = min(common) if common else None
    return [next((run for run in group.runs if run.seed == seed), group.runs[0]) for group in groups]


def client_charts(groups: Sequence[Group], choice: Choice) -> list[Chart]:
    """Return a chart of sorted bars for each group, with Local's accuracy on the same client if Local is a group."""
    runs = shown_runs(groups)
    local = next((pair for pair in zip(groups, runs, strict=True) if pair[0].method == "local"), None)
    charts = []
    for number, (group, run) in enumerate(zip(groups, runs, strict=True)):
        rates, line = _rates(run, choice), run.at(choice)
        if not rates or line is None:
            continue
        caption = f"{group.label}, seed {run.seed}, round {line.round}: "
        reference, name = None, ""
        if local and local[1] is not run and local[1].partition_hash == run.partition_hash:
            reference, name = _rates(local[1], choice), local[0].label
        caption += _counts(rates, reference, name) if reference else "every client's test accuracy"
        with drawing():
            colour = colour_of(number)
            drawn = draw_clients(rates, reference, colour=colour, title=group.label, reference_name=name)
            charts.append(Chart(to_svg(drawn, f"clients-{number}", caption), f"{caption}."))
    return charts


def _rates(run: Run, choice: Choice) -> dict[int, float]:
    line = run.at(choice)
    return {} if line is None else {client: found.rate for client, found in run.counts(line.round).items()}


def _counts(rates: dict[int, float], reference: dict[int, float], name: str) -> str:
    both = rates.keys() & reference.keys()
    better = sum(rates[client] > reference[client] for client in both)
    worse = sum(rates[client] < reference[client] for client in both)
    equal = len(both) - better - worse
    return f"{better} of {plural(len(both), 'client')} are better than with {name}, {worse} worse, {equal} equal"
