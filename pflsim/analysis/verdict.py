"""What differences show, in sentences that claim no more than the weakest test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pflsim.analysis.differences import ALPHA, Family, Level
from pflsim.config.names import listed
from pflsim.terminal.formats import plural

MAX_NAMES = 4
"""Longer lists of methods are replaced by their number."""


def scale_of(metric: str) -> tuple[int, int, str]:
    """Return how differences in a metric are written: the factor, the decimals, and the unit."""
    return (100, 1, " points") if "accuracy" in metric else (1, 3, "")


def sentences(
    means: dict[str, float], family: Family, tied: Sequence[str], metric: str, higher: bool, unlike: Sequence[str] = ()
) -> list[str]:
    """Return what the results show; nothing without differences.

    Args:
        means: the mean of the primary metric by label, best first.
        family: the differences to the reference.
        tied: the labels that cannot be told apart from the best, best first.
        metric: the name of the primary metric.
        higher: whether a higher value of it is better.
        unlike: reasons why the groups cannot be compared.
    """
    if unlike:
        return [f"These runs cannot be compared: {'; '.join(unlike)}."]
    reference, found = family.reference.label, [(d, d.mean) for d in family.differences if d.mean is not None]
    if not found or reference not in means:
        return []
    above, highest = ("above", "highest") if higher else ("below", "lowest")
    scale, decimals, unit = scale_of(metric)

    def size(difference: float) -> str:
        return f"{scale * abs(difference):.{decimals}f}"

    def those(level: Level, better: bool) -> dict[str, str]:
        own = {d.group.label: m for d, m in found if d.level == level and (m > 0) == (higher == better)}
        return {label: size(m) for label, m in sorted(own.items(), key=lambda item: -abs(item[1]))}

    seeds, pairs = max(len(d.by_seed) for d, _ in found), max(d.pairs for d, _ in found)
    few, mean, said = family.least_p >= ALPHA, next(iter(means.values())), list[str]()
    if seeds == 1 or few:
        top = [label for label, value in means.items() if value == mean]
        gap = f", {size(mean - means[reference])}{unit} {above} {reference} ({means[reference]:.3f})"
        lead = f"{_are(top, 'has', 'have')} the {highest} {metric}: {mean:.3f}{gap * (reference not in top)}."
        said.append("With one seed, " * (seeds == 1) + lead)
    else:
        up, down, alone = those("clear", True), those("clear", False), family.reference.method == "local"
        other = f"training alone ({reference}, " if alone else f"{reference} ("
        first, than = next(iter(up), ""), f"clearly better than {other}{means[reference]:.3f})"
        if len(up) > 1:
            each = [f"{label} by {gap}{unit * (label == first)}" for label, gap in up.items()]
            what = listed(each) if len(up) <= MAX_NAMES else f"{first} most, {up[first]}{unit} {above}"
            said.append(f"{len(up)} of {len(found)} methods are {than}: {what}.")
        elif up:
            only = "Only " * (len(found) > 1)
            said.append(f"{only}{first} is {than}: {means[first]:.3f}, {up[first]}{unit} {above}.")
        else:
            said.append(f"No method is {than}.")
        if down:
            said.append(f"{_are(down)} clearly worse than {reference}.")
        for better, where in ((True, "ahead of"), (False, "behind")):
            if labels := those("on these clients only", better):
                vary = f"on these clients, but the {seeds} seeds vary too much to call it clear"
                said.append(f"{_are(labels)} {where} {reference} {vary}.")
        if len(tied) > 1:
            apart = f"cannot be told apart from {tied[0]}, not even on these clients"
            said.append(f"Which method is best is open: {_are(tied[1:], '', '')}{apart}.")
    if few:
        lowest = f"of {plural(family.tests, 'comparison')} is at least {family.least_p:.2g} over {pairs} {family.unit}"
        needed = f"{lowest}, whatever the results; {family.pairs_needed} are needed"
        said.append(f"So few clients cannot show a clear difference: the corrected p-value {needed}.")
    if seeds == 1:
        said.append("Another seed may turn the order round: run at least three.")
    elif seeds == 2:
        said.append("The interval over two seeds is wide, 12.7 standard errors to each side; with three it is 4.3.")
    return said


def over_benchmarks(families: Sequence[tuple[Family, bool]]) -> str:
    """Return what is clear in several benchmarks together, and what cannot be told apart in any of them.

    Args:
        families: of each benchmark, the differences to its reference, and whether a higher value is better.
    """
    found: dict[str, list[int]] = {}  # 1: clearly better, −1: clearly worse, in each benchmark that has the method
    for family, higher in families:
        for d in family.differences:
            sign = 0 if d.level != "clear" or d.mean is None else 1 if (d.mean > 0) == higher else -1
            found.setdefault(d.group.label, []).append(sign)
    everywhere = [label for label, own in found.items() if own.count(1) == len(families)]
    some = [label for label, own in found.items() if 1 in own and -1 not in own and label not in everywhere]
    both = [label for label, own in found.items() if {1, -1} <= {*own}]
    none = [label for label, own in found.items() if not any(own)]
    said = f"{_are(everywhere) if everywhere else 'No method is'} clearly better than the reference in all benchmarks"
    said += f"; clearly better in some, clearly worse in none: {listed(some)}" * bool(some)
    said += f"; clearly better in some, clearly worse in others: {listed(both)}" * bool(both)
    return said + f"; not told apart from the reference in any: {listed(none)}" * bool(none) + "."


def winners(families: Sequence[tuple[str, Family, bool]]) -> str:
    """Return how many methods are clearly better than the reference in each benchmark.

    Args:
        families: of each benchmark, its name, the differences to its reference, and whether a higher value is better.
    """
    found, counts = [family for _, family, _ in families], []
    for name, family, higher in families:
        up = [d for d in family.differences if d.level == "clear" and d.mean is not None and (d.mean > 0) == higher]
        counts.append(f"{len(up) or 'none'} of {plural(len(family.differences), 'method')} with {name}")
    references = {family.reference.label for family in found}
    than = f"than {references.pop()}" if len(references) == 1 else "than their reference"
    return f"Clearly better {than}: {listed(counts)}."


def _are(labels: Iterable[str], one: str = "is", several: str = "are") -> str:
    """Return the subject and the verb of a sentence about methods."""
    names = [*labels]
    subject = listed(names) if len(names) <= MAX_NAMES else f"{len(names)} methods"
    return f"{subject} {one if len(names) == 1 else several}"
