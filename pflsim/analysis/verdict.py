"""What differences show, in sentences that claim no more than the weakest test."""

from collections.abc import Iterable, Iterator, Sequence

from pflsim.analysis.differences import ALPHA, Family, Level
from pflsim.config.names import listed
from pflsim.display.formats import in_text, plural
from pflsim.display.metrics import points, rounded, scale_of
from pflsim.records.evaluation import grouped

MAX_NAMES = 4
"""Longer lists of methods are replaced by their number."""


def sentences(
    means: dict[str, float], family: Family, tied: Sequence[str], unlike: Sequence[str] = (), lead: str = ""
) -> list[str]:
    """Return what the results show; nothing without differences.

    Args:
        means: the mean of the primary metric by label, best first.
        family: the differences to the reference.
        tied: the labels that cannot be told apart from the best, best first.
        unlike: reasons why the groups cannot be compared.
        lead: the evidence that the best is ahead of the next.
    """
    if unlike:
        return [f"These runs cannot be compared: {'; '.join(unlike)}."]
    found = [d for d in family.differences if d.mean is not None]
    if not found or family.reference.label not in means:
        return []
    seeds, pairs = max(len(d.by_seed) for d in found), max(d.pairs for d in found)
    few = family.least_p >= ALPHA
    if seeds == 1 or few:
        said = ["With one seed, " * (seeds == 1) + _highest(means, family)]
    else:
        said = [*_of_levels(means, family, tied, lead)]
    best, gains = next(iter(means)), any(d.level == "clear" and family.gains(d) for d in found)
    if len(found) > 1 and best != family.reference.label and (gains or seeds == 1 or few):
        said.append(f"{best} is the best of {len(means)} on test data: this choice favours it.")
    if few:
        lowest = f"of {plural(family.tests, 'comparison')} is at least {family.least_p:.2g} over {pairs} {family.unit}"
        more = "" if family.same_clients else f", that is {-(-family.pairs_needed * seeds // pairs)} seeds"
        needed = f"{lowest}, whatever the results; {family.pairs_needed} are needed{more}"
        said.append(f"So few clients cannot show a clear difference: the corrected p-value {needed}.")
    if seeds == 1:
        said.append("Another seed may turn the order round: run at least three.")
    elif seeds == 2:
        said.append("Two seeds say little about others: run at least three.")
    return said


def _highest(means: dict[str, float], family: Family) -> str:
    """Return which methods have the best mean, without a claim."""
    mean, reference, metric = next(iter(means.values())), family.reference.label, family.metric
    top = [label for label, value in means.items() if value == mean]
    extreme, side = ("highest", "above") if family.higher else ("lowest", "below")
    gap = f", {_size(mean - means[reference], metric)} {side} {reference} ({rounded(means[reference])})"
    which = f"{_are(top, 'has the', 'have the')} {extreme} {in_text(metric)}: {rounded(mean)}"
    return which + gap * (reference not in top) + "."


def _of_levels(means: dict[str, float], family: Family, tied: Sequence[str], lead: str) -> Iterator[str]:
    """Yield which methods are clearly better or worse, ahead or behind on these clients only, and which is best."""
    reference, metric, side = family.reference.label, family.metric, "above" if family.higher else "below"
    found = [(d, d.mean) for d in family.differences if d.mean is not None]
    kind = "setting" if {d.group.method for d, _ in found} == {family.reference.method} else "method"

    def those(level: Level, better: bool) -> dict[str, float]:
        own = {d.group.label: m for d, m in found if d.level == level and family.gains(d) == better}
        return dict(sorted(own.items(), key=lambda item: -abs(item[1])))

    up, down = those("clear", True), those("clear", False)
    first, than = next(iter(up), ""), f"clearly better than {reference} ({rounded(means[reference])})"
    if len(up) > 1:
        each = [f"{label} by {_size(gap, metric, unit=label == first)}" for label, gap in up.items()]
        most = f"{first} most, {_size(up[first], metric)} {side}"
        yield f"{len(up)} of {len(found)} {kind}s are {than}: {listed(each) if len(up) <= MAX_NAMES else most}."
    elif up:
        gap = f"{_size(up[first], metric)} {side}"
        yield f"{'Only ' * (len(found) > 1)}{first} is {than}: {rounded(means[first])}, {gap}."
    else:
        yield f"No {kind} is {than}."
    if down:
        yield f"{_are(down)} clearly worse than {reference}."
    seeds = max(len(d.by_seed) for d, _ in found)
    for better, where in ((True, "ahead of"), (False, "behind")):
        if labels := those("on these clients only", better):
            vary = f"on these clients, but the {seeds} seeds vary too much to call it clear"
            yield f"{_are(labels)} {where} {reference} {vary}."
    if len(tied) > 1:
        apart = f"cannot be told apart from {tied[0]}, not even on these clients"
        yield f"Which {kind} is best is open: {_are(tied[1:], '', '')}{apart}."
    elif tied and tied[0] in up and lead != "not clear":
        (_, mean), (second, next_mean) = [*means.items()][:2]
        certain, where = ("clearly ", "") if lead == "clear" else ("", ", on these clients")
        if second != reference and next_mean != mean:
            gap = _size(means[tied[0]] - next_mean, metric)
            yield f"{tied[0]} is {certain}ahead of the next, {second}, by {gap}{where}."


def _size(difference: float, metric: str, unit: bool = True) -> str:
    return points(abs(difference), metric).removeprefix("+") + scale_of(metric)[2] * unit


def over_benchmarks(families: Sequence[Family]) -> str:
    """Return what is clear in several benchmarks together, and what is so in none of them.

    Args:
        families: the differences of each benchmark to its reference.
    """
    base = _references(families)
    found = grouped((d.group.label, (d.level, family.gains(d))) for family in families for d in family.differences)
    up, down, kinds = ("clear", True), ("clear", False), dict[str, list[str]]()
    for label, own in found.items():
        kind = (
            "best" if own.count(up) == len(families)
            else "clearly better in some, clearly worse in others" if {up, down} <= {*own}
            else "clearly better in some, clearly worse in none" if up in own
            else "clearly worse in some, clearly better in none" if down in own
            else f"different from {base} on these clients only" if "on these clients only" in dict(own)
            else "not clear in any"
        )  # fmt: skip
        kinds.setdefault(kind, []).append(label)
    best = kinds.pop("best", [])
    said = [f"{kind}: {listed(labels)}" for kind, labels in sorted(kinds.items())]
    lead = f"{_are(best) if best else 'No method is'} clearly better than {base} in all benchmarks"
    return "; ".join([lead, *said]) + "."


def winners(families: Sequence[tuple[str, Family]]) -> str:
    """Return how many methods are clearly better than the reference in each benchmark.

    Args:
        families: the name of each benchmark, and the differences to its reference.
    """
    counts = []
    for name, family in families:
        up = sum(d.level == "clear" and family.gains(d) for d in family.differences)
        counts.append(f"{up or 'none'} of {plural(len(family.differences), 'method')} with {name}")
    return f"Clearly better than {_references(family for _, family in families)}: {listed(counts)}."


def _references(families: Iterable[Family]) -> str:
    labels = {family.reference.label for family in families}
    return labels.pop() if len(labels) == 1 else "their reference"


def _are(labels: Iterable[str], one: str = "is", several: str = "are") -> str:
    """Return the subject and the verb of a sentence about methods."""
    names = [*labels]
    subject = listed(names) if len(names) <= MAX_NAMES else f"{len(names)} methods"
    return f"{subject} {one if len(names) == 1 else several}"
