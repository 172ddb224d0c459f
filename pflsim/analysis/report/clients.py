"""How the clients of one seed fare, group by group, and Local beside them."""

from __future__ import annotations

from collections.abc import Sequence

from pflsim.analysis.compare.words import plural
from pflsim.analysis.report.curves import Chart
from pflsim.analysis.results import Run
from pflsim.analysis.results.groups import Group
from pflsim.figures.clients import draw_clients
from pflsim.figures.svg import colour_of, drawing, to_svg
from pflsim.run_folder.summary import Choice


def shown_runs(groups: Sequence[Group]) -> list[Run]:
    """One run of every group: of the first seed that all of them have, else each group's first."""
    common = set.intersection(*({run.seed for run in group.runs} for group in groups))
    seed = min(common) if common else None
    return [next((run for run in group.runs if run.seed == seed), group.runs[0]) for group in groups]


def client_charts(groups: Sequence[Group], choice: Choice) -> list[Chart]:
    """Sorted bars of each group's shown run, with Local's rate on the same client where Local is among the groups."""
    runs = shown_runs(groups)
    place = next((n for n, group in enumerate(groups) if group.method == "local"), None)
    charts = []
    for number, (group, run) in enumerate(zip(groups, runs, strict=True)):
        rates = rates_of(run, choice)
        if not rates:
            continue
        local = None
        if place is not None and place != number and runs[place].partition_hash == run.partition_hash:
            local = rates_of(runs[place], choice)
        with drawing():
            name = groups[place].label if place is not None else ""
            drawn = draw_clients(rates, local, colour=colour_of(number), title=group.label, reference_name=name)
            line = run.at(choice)
            caption = f"{group.label}, seed {run.seed}, round {line.round if line else ''}"
            caption += f": {_against(rates, local, name)}" if local else ": every client's test accuracy"
            charts.append(Chart(to_svg(drawn, f"clients-{number}", caption), f"{caption}."))
    return charts


def rates_of(run: Run, choice: Choice) -> dict[int, float]:
    """Test accuracy by client in the chosen round."""
    line = run.at(choice)
    return {} if line is None else {client: found.rate for client, found in run.counts(line.round).items()}


def _against(rates: dict[int, float], local: dict[int, float], name: str) -> str:
    both = rates.keys() & local.keys()
    better = sum(rates[client] > local[client] for client in both)
    worse = sum(rates[client] < local[client] for client in both)
    same = len(both) - better - worse
    return f"{better} of {plural(len(both), 'client')} do better than with {name}, {worse} worse, {same} the same"
