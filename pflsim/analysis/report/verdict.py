"""Figures in words: what a reader should know before any table, and no more than can be said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pflsim.analysis.compare.paired import Difference, differences
from pflsim.analysis.compare.words import plural
from pflsim.analysis.report.rows import Row
from pflsim.analysis.report.words import ROUND, listed, rate
from pflsim.analysis.report.worst import Gap, clients_needed, worst_gap
from pflsim.analysis.results.groups import Group
from pflsim.run_folder.summary import Choice
from pflsim.terminal.console import format_bytes

SAME = 1e-9
"""Means of rates that differ by less are equal."""
NAMED = 3
"""So many methods are named one by one; of more, the first ones."""
Gaps = Callable[[Group, Group], Gap | None]


@dataclass(frozen=True, slots=True)
class Point:
    """A paragraph with what it is about in front."""

    about: str
    text: str


def in_short(rows: Sequence[Row], choice: Choice, alike: bool = True) -> list[Point]:
    """What the page comes to, from its numbers; where the groups are not evaluated alike, without a verdict."""
    if len(rows) == 1:
        return _alone(rows[0], choice)
    worst, level = _ranked(
        rows, "worst_decile", "the worst tenth of the clients", _by_worst(choice, len(rows)) if alike else _nothing
    )
    mean, _ = _ranked(
        rows, "mean", "all clients on the mean", _by_mean([row.group for row in rows], choice) if alike else _nothing
    )
    return [
        Point("Worst clients", worst),
        Point("Price", _price(rows, level)),
        Point("All clients", mean),
        Point("How sure", _how_sure(rows, choice, alike)),
    ]


def _alone(row: Row, choice: Choice) -> list[Point]:
    stats, several = row.stats, len(row.rounds) > 1
    over = f", mean of {plural(len(row.rounds), 'seed')}" if several else ""
    model = "a client's own model" if row.model == "personal" else "the global model"
    where = ROUND[choice] if several else f"round {row.rounds[0]}, {_why(choice)}"
    return [
        Point(
            "All clients",
            f"{model} classifies {rate(stats['mean'])} of a client's test examples rightly, on the mean over clients "
            f"({where}{over}).",
        ),
        Point(
            "Worst clients",
            f"the worst tenth of the clients have {rate(stats['worst_decile'])}, the best tenth "
            f"{rate(stats['best_decile'])}.",
        ),
        Point(
            "Price",
            f"{_size(row)} up to that round, all clients and both ways"
            + (f"; {format_bytes(row.up_total.mean + row.down_total.mean)} in all rounds." if row.bytes else "."),
        ),
    ]


def _why(choice: Choice) -> str:
    return {"best_val": "the best by validation", "last": "the last evaluated one"}.get(choice, choice)


def _ranked(rows: Sequence[Row], figure: str, whom: str, gaps: Gaps) -> tuple[str, list[Row]]:
    """Who leads, against whom that is clear, and against whom it is not; the leader and those that may be as good."""
    order = sorted(rows, key=lambda row: -row.stats[figure].mean)
    best = order[0].stats[figure].mean
    tied = [row for row in order if best - row.stats[figure].mean < SAME]
    found = [(row, _least([gaps(leader.group, row.group) for leader in tied])) for row in order if row not in tied]
    beaten = [(row, gap) for row, gap in found if gap is not None and gap.clear]
    level = [(row, gap) for row, gap in found if gap is not None and not gap.clear]
    unknown = [(row, None) for row, gap in found if gap is None]

    def against(pairs: Sequence[tuple[Row, Gap | None]]) -> str:
        named = [f"{row.group.label} ({rate(row.stats[figure])}{_between(gap)})" for row, gap in pairs]
        if len(pairs) > NAMED + 1:
            more = f"{len(pairs) - NAMED} more, down to {rate(pairs[-1][0].stats[figure])}"
            return listed([*named[:NAMED], more])
        return listed(named)

    names = listed([row.group.label for row in tied])
    if len(tied) == len(rows):
        return f"for {whom}, {names} have the same accuracy, {rate(best)}.", list(tied)
    pronoun, verb = ("they are", "have") if len(tied) > 1 else ("it is", "has")
    if not level and not unknown:
        return f"for {whom}, {names} {pronoun.split()[1]} best: {rate(best)} against {against(beaten)}.", list(tied)
    text = f"for {whom}, {names} {verb} the highest accuracy, {rate(best)}"
    text += f"; {pronoun} better than {against(beaten)}." if beaten else "."
    if level:
        text += f" Whether {pronoun} better than {against(level)} is not clear."
    if unknown:
        text += (
            f" Whether {pronoun} better than {against(unknown)} is not said, for they cannot be "
            "held together client by client."
        )
    return text, [*tied, *(row for row, _ in level)]


def _least(found: Sequence[Gap | None]) -> Gap | None:
    """What can be said of all that lead: the gap that is least clear; None where one of them has none."""
    known = [gap for gap in found if gap is not None]
    return min(known, key=lambda gap: (gap.clear, gap.low)) if len(known) == len(found) else None


def _between(gap: Gap | None) -> str:
    if gap is None:
        return ""
    p = "" if gap.p is None else ", p < 0.001" if gap.p < 0.001 else f", p = {gap.p:.2g}"
    low, high = (round(end, 3) + 0.0 for end in (gap.low, gap.high))  # no −0.000
    return f"; difference {low:.3f} to {high:.3f}{p}".replace("-0.", "−0.")


def _price(rows: Sequence[Row], best: Sequence[Row]) -> str:
    """What the best for the worst clients needed, what those that may be as good did, and what the others did."""
    leader, peers = best[0], best[1:]
    text = f"until the round of these figures, all clients and both ways, {leader.group.label} took {_size(leader)}."
    if peers:
        text += f" Perhaps as good for the worst clients: {_took(peers, leader)}."
    rest = [row for row in rows if all(row is not other for other in best)]
    if rest:
        text += f" The other{'s' if len(rest) > 1 else ''}: {_took(rest, leader)}."
    return text


def _took(rows: Sequence[Row], leader: Row) -> str:
    if len(rows) <= NAMED + 1:
        return listed([f"{row.group.label} took {_size(row)}{_times(row, leader)}" for row in rows])
    silent = [row.group.label for row in rows if row.bytes == 0]
    order = sorted((row for row in rows if row.bytes > 0), key=lambda row: row.bytes)
    ends = [f"{_size(row)} ({row.group.label})" for row in (order[0], order[-1])] if order else []
    parts = [f"{listed(silent)} took nothing"] if silent else []
    return listed(parts + ([f"{len(order)} methods between {listed(ends)}"] if order else []))


def _size(row: Row) -> str:
    return "nothing" if row.bytes == 0 else format_bytes(row.bytes)


def _times(row: Row, leader: Row) -> str:
    if leader.bytes == 0 or row.bytes == 0:
        return ""
    times = row.bytes / leader.bytes
    if 0.95 < times < 1.05:
        return " (about as much)"
    if times < 1:
        return f" ({times:.2g} of that)"
    return f" ({times:.{1 if times < 9.95 else 0}f} times as much)"


def _nothing(one: Group, other: Group) -> Gap | None:
    """No difference is taken."""


def _how_sure(rows: Sequence[Row], choice: Choice, alike: bool) -> str:
    fewest, most = min(len(row.rounds) for row in rows), max(len(row.rounds) for row in rows)
    text = f"the figures are of {ROUND[choice]}"
    text += f", mean of {plural(most, 'seed')}." if most > 1 else ", of one seed."
    if not alike:
        return f"{text} They are not about the same examples or clients (see above), so no method is called better."
    text += (
        " Differences are taken client by client; an interval (95 %) comes from drawing clients again. For the worst "
        "clients one method is called better where the interval, widened for the number of methods, leaves out 0 and "
        f"is of {clients_needed(len(rows) - 1)} clients or more; for all clients where the interval leaves out 0 and "
        "Wilcoxon's signed-rank test, corrected for the number of methods, has p < 0.05."
    )
    if fewest < 3:
        text += " So few seeds say little of what another partition or another start would have made of it."
    return text


def _by_worst(choice: Choice, methods: int) -> Gaps:
    return lambda one, other: worst_gap(one, other, choice, methods - 1)


def _by_mean(groups: Sequence[Group], choice: Choice) -> Gaps:
    """Differences of all groups from one of them, so that p is corrected for their number."""
    known: dict[str, list[Difference]] = {}

    def gap(one: Group, other: Group) -> Gap | None:
        if one.label not in known:
            known[one.label] = differences(groups, one, choice)
        found = next(d for d in known[one.label] if d.group is other)
        if found.mean is None or found.low is None or found.high is None:
            return None
        return Gap(-found.mean, -found.high, -found.low, found.p_holm)

    return gap
