"""Data sets, partitions and shifts in words, for the title of a page and of its sections."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pflsim.analysis.comparison import Comparison
from pflsim.config.names import written
from pflsim.display.formats import plural

ACRONYMS = re.compile("cifar|(e|fe)?mnist|svhn|usps")
RULES = {
    "classes_per_client": "{classes} classes per client", "dirichlet": "Dirichlet({alpha}) over classes",
    "label_lognormal": "{classes} classes per client", "n_way_k_shot": "about {n} classes per client",
    "one_class": "one class per client", "rotation": "rotated images", "inversion": "inverted images",
}  # fmt: skip
"""Partitions and shifts; others have their name, and iid is left out beside a shift."""


def about(comparison: Comparison) -> list[str]:
    """Return data, partition and shift, numbers of clients and of rounds, model, and settings of the
    partition; "" if the runs differ in it.
    """
    keys = ("data", "partition", "clients", "rounds_planned", "model")
    found = [{written(run.summary[key]) for run in comparison.runs} for key in keys]
    data, partition, clients, rounds, model = (values.pop() if len(values) == 1 else "" for values in found)
    rules = re.findall(r"(\w+)(?:\(([^()]*)\))?(?:, |$)", partition)
    texts = [
        (RULES.get(name) or name.replace("_", " ")).format_map(defaultdict(str, re.findall(r"(\w+)=([^,]+)", settings)))
        for name, settings in rules[len(rules) > 1 and rules[0][0] == "iid" :]
    ]
    counts = (value and plural(int(value), name) for value, name in ((clients, "client"), (rounds, "round")))
    name = ACRONYMS.sub(lambda found: found[0].upper(), data).replace("_", " ")
    return [name, ", ".join(texts), *counts, model, partition]


def heading(comparison: Comparison) -> str:
    """Return the line above the answer: `Digits, 2 classes per client · 10 clients · 3 seeds`."""
    data, rules, clients, *_ = about(comparison)
    what = ", ".join(filter(None, (data, rules)))
    found = " · ".join(filter(None, (what, clients, plural(comparison.seeds, "seed"))))
    return found[:1].upper() + found[1:]


def varying(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return the names of several benchmarks: the least that tells them apart of what is in `about`."""
    each, names = [about(comparison) for comparison in comparisons], list[list[str]]()
    differing = [n for n in range(len(each[0])) if len({own[n] for own in each}) > 1]
    for stop in range(len(differing) + 1):
        names = [[own[n] for n in differing[:stop] if own[n]] for own in each]
        if len({*map(tuple, names)}) == len(each):
            break
    return [own or [f"set {number}"] for number, own in enumerate(names, 1)]


def edges_of(chosen: Mapping[str, Any], space: Mapping[str, Any]) -> list[str]:
    """Return the keys of numbers at an end of what was searched, beyond which there can be better ones.

    Args:
        chosen: values by key.
        space: choices, or a range with `low`, `high` and `log`, by key; the outer 5% of a range are its ends.
    """
    found = []
    for key, value in chosen.items():
        node, scale = space[key], float
        if isinstance(node, Mapping):
            scale, node = math.log if node.get("log") else float, [node["low"], node["high"]]
        if all(isinstance(each, int | float) and not isinstance(each, bool) for each in node):
            low, high, at = scale(min(node)), scale(max(node)), scale(value)
            margin = 0.05 * (high - low) * (node is not space[key])
            if low < high and not low + margin < at < high - margin:
                found.append(key)
    return found
