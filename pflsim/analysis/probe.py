"""Whether personalisation pays: an answer from the runs of `pflsim probe`, how unlike the clients are, and the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pflsim.analysis.comparison import Comparison, best_first, compare
from pflsim.analysis.differences import Difference
from pflsim.analysis.groups import Group, group_runs
from pflsim.analysis.report.forest import Benchmark
from pflsim.analysis.report.page import environment
from pflsim.analysis.runs import Run
from pflsim.analysis.verdict import scale_of, signed
from pflsim.analysis.words import heading
from pflsim.config.names import listed
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition, shard
from pflsim.records.evaluation import grouped
from pflsim.terminal.identity import identity

FINETUNED = "fedavg+fine-tuning"
"""FedAvg's model after a round of local training by each client, which FedAvg's runs evaluate as personal model."""
APPROACHES = {"local": "alone", "fedavg": "together", FINETUNED: "personal", "ditto": "personal", "ifca": "in groups"}
NEXT = {
    "alone": ("local,fedrep,lg_fedavg,fedamp", "that share a part of the model, or only with similar clients"),
    "together": ("fedavg,fedprox,scaffold,fedadam", "that train one model and correct for unlike clients"),
    "in groups": ("ifca,fesem,fedamp,pfedcfr", "that find out which clients are similar"),
    "personal": ("ditto,fedrep,apfl,pfedme", "that combine a common model with own ones in other ways"),
}
"""Methods to try if an approach is ahead, and what they do. The simplest approach comes first."""
SHARE = "share of the variance that lies between clients; 0: equal means, 1: all of it"
DISTANCE = "mean total variation distance to the shares of all clients; 0: equal shares, 1: none in common"
COSINE = "mean cosine between two clients' updates in round 1; 1: the same, 0: unrelated, below 0: opposed"


def reporting(method: str, run: Run) -> Run:
    """Return a run as one of the method; of FedAvg with fine-tuning, it reports the clients' models after training."""
    if method != FINETUNED:
        return run
    config = {**run.config, "names": {**run.config["names"], "method": method}}
    return replace(run, config=config, summary={**run.summary, "method": method, "reported_model": "personal"})


def validation(run: Run) -> tuple[float, float]:
    """Return the score and the negative loss of the reported model on validation data in the best round."""
    line = run.at("best_val")
    found = line and line.evaluations[run.reported._replace(split="val")]
    return (found.score, -found.loss) if found else (-np.inf, -np.inf)


def shown(group: Group) -> str:
    """Return a method's display name with its approach."""
    return f"{identity(group.method).display} ({APPROACHES[group.method]})"


@dataclass(frozen=True, slots=True)
class Answer:
    """Which approaches are ahead.

    Args:
        whole: the methods of `APPROACHES` compared with Local.
        between: the methods of the approaches compared with the one that has the best test mean, best first. That of
            two personal ones is chosen on validation data.
    """

    whole: Comparison
    between: Comparison

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Answer:
        """Compare the runs of all methods, the same seeds of each."""
        whole, chosen = compare(group_runs(runs)), dict[str, Group]()
        for group in sorted(whole.groups, key=lambda own: tuple(np.mean([*map(validation, own.runs)], axis=0))):
            chosen[APPROACHES[group.method]] = group
        order = [row.group for row in best_first(whole.rows) if chosen[APPROACHES[row.group.method]] is row.group]
        return cls(whole, compare(order, whole.choice, reference=order[0].label))

    @property
    def ahead(self) -> list[str]:
        """The approach with the best mean, and those that are not clearly behind it; not alone if a method beats it."""
        others = [APPROACHES[d.group.method] for d in self.between.differences if d.level != "clear"]
        beaten = ["alone"] * bool(self.beyond_alone)
        return [APPROACHES[self.between.reference.method], *(name for name in others if name not in beaten)]

    @property
    def beyond_alone(self) -> list[str]:
        """The methods of the approaches that are clearly better than training alone."""
        found = [d for d in self.whole.families[0].differences if d.group in self.between.groups]
        return [shown(d.group) for d in found if d.level == "clear" and ((d.mean or 0) > 0) == self.whole.higher]

    @property
    def by_approach(self) -> list[tuple[str, list[str]]]:
        """Each approach with the names of its methods."""
        return [*grouped((approach, identity(name).display) for name, approach in APPROACHES.items()).items()]

    @property
    def pays(self) -> str:
        """Whether personal models, or one for each group, are ahead of one model and of training alone."""
        personal = {name in ("personal", "in groups") for name in self.ahead}
        return "No clear gain" if len(personal) > 1 else f"Yes, {listed(self.ahead)}" if True in personal else "No"

    @property
    def sentences(self) -> list[str]:
        """What the differences show, and for how many clients each method is worse than training alone."""
        (first, *others), seeds, each = self.ahead, len(self.whole.groups[0].runs), self.whole.families[0]
        behind = f", but {listed(others)} {'is' if len(others) == 1 else 'are'} not clearly behind" if others else ""
        said = [f"Ahead: {first}{behind}."] + ["With one seed, no difference is clear."] * (seeds == 1)
        for d in self.between.differences:
            ahead = f"is ahead of {shown(d.group)} by {self.gap(d)}: {d.level}"
            said.append(f"{shown(self.between.reference)} {ahead if d.mean else f'equals {shown(d.group)}'}.")
        for labels in self.whole.identical:
            names = [shown(group) for group in self.whole.groups if group.label in labels]
            said.append(f"Equal on every client: {listed(names)}.")
        if self.beyond_alone:
            said.append(f"Clearly better than training alone: {listed(self.beyond_alone)}.")
        worse = [f"{shown(d.group)} for {d.worse}" for d in sorted(each.differences, key=lambda d: -d.worse)]
        clients, which = max(d.pairs for d in each.differences), " of all seeds" * (not each.same_clients and seeds > 1)
        return [*said, f"Worse than training alone: {listed(worse)} of {clients} clients{which}."]

    def gap(self, d: Difference) -> str:
        """Return how far the first approach is ahead, with the interval over seeds, or over pairs with one seed."""
        scale, digits, unit = scale_of(self.whole.primary)
        ends = d.over_seeds if len(d.by_seed) > 1 else (d.low, d.high)
        gaps = [(-scale if self.whole.higher else scale) * (end or 0.0) for end in (d.mean, *ends)]
        mean, low, high = (signed(gap, digits).removeprefix("+") for gap in (gaps[0], min(gaps), max(gaps)))
        return f"{mean}{unit} (95% interval {low} to {high})"

    def next(self) -> tuple[str, list[str]]:
        """Return what to try, and the methods: those of the simplest approach that nothing is clearly ahead of."""
        several = len(self.ahead) > 1 and len(self.whole.groups[0].runs) > 1
        first = next(name for name in NEXT if name in self.ahead[: None if several else 1])
        methods, what = NEXT[first]
        start = f"The simplest of these is {first}: start with it. " * several
        return f"{start}Compare it with methods {what}:", methods.split(",")


def unlikeness(dataset: Dataset, partition: Partition, trace: Path) -> list[tuple[str, float, str]]:
    """Measure how unlike the clients' training examples, of all at most about 10,000, and their first updates are.

    Returns:
        What was compared, the value, and its scale, for labels or targets, inputs, and updates. By chance: the value
        if the same examples are dealt to the clients at random.

    Args:
        dataset: the data set.
        partition: its rows and shift of each client.
        trace: the folder of round 1, in which all send the model that they trained.
    """
    rng, most = np.random.default_rng(0), max(1, 10_000 // partition.clients)
    own = replace(partition, train=tuple(rng.permutation(rows)[:most] for rows in partition.train))
    parts = [shard(dataset, own, client).train.batch(slice(None)) for client in range(own.clients)]
    sizes, (x, y) = [len(rows) for rows in own.train], (np.concatenate(each) for each in zip(*parts, strict=True))
    groups, found = sizes, [("targets", variance_between, y, sizes, SHARE)]
    if classes := y.ndim == 1:  # inputs are compared within each class, without the label skew
        number = np.unique(y, return_inverse=True)[1]
        x = x - np.stack([x[number == n].mean(0) for n in range(number.max() + 1)])[number]
        cells = np.repeat(np.arange(len(sizes)), sizes) * (number.max() + 1) + number
        x, groups = x[np.argsort(cells)], np.unique(cells, return_counts=True)[1].tolist()
        found = [("labels", label_distance, y, sizes, DISTANCE)]
    if dataset.kind != "token sequences":
        found.append(("inputs" + " within a class" * classes, variance_between, x.reshape(len(x), -1), groups, SHARE))
    said = [(what, f(v, k), f"{text}; {f(rng.permutation(v), k):.2f} by chance") for what, f, v, k, text in found]
    return [*said, ("updates", update_cosine(trace), COSINE)]


def label_distance(values: np.ndarray, sizes: Sequence[int]) -> float:
    """Return 1/N · Σ_i 1/2 · Σ_c |p_i(c) − p(c)|, where p are the shares of all examples.

    Args:
        values: [n] classes, by client.
        sizes: the number of each client's examples.
    """
    counts = np.stack(
        [np.bincount(part, minlength=values.max() + 1) for part in np.split(values, np.cumsum(sizes)[:-1])]
    )
    shares, pooled = counts / counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    return float(np.abs(shares - pooled).sum(1).mean() / 2)


def variance_between(values: np.ndarray, sizes: Sequence[int]) -> float:
    """Return Σ_i n_i·‖m_i − m‖² / Σ_j ‖v_j − m‖², with the means m_i of the clients and m of all.

    Args:
        values: [n, d], by client.
        sizes: the number n_i of each client's examples.
    """
    centred = values - values.mean(0, dtype=float)
    sums = np.add.reduceat(centred, np.cumsum([0, *sizes[:-1]]))
    return float((sums**2 / np.array(sizes)[:, None]).sum() / (centred**2).sum())


def update_cosine(trace: Path) -> float:
    """Return the mean cosine over all pairs of clients of a traced round, between their weights' changes u_i.

    It is (‖Σ_i u_i/‖u_i‖‖² − N) / (N·(N − 1)). Running statistics are left out.
    """
    from safetensors.numpy import load_file

    total, paths = np.zeros(1), sorted(trace.glob("up_*"))
    for path in paths:
        sent, trained = load_file(path.with_name(path.name.replace("up", "down"))), load_file(path)
        keys = [key for key, value in sorted(sent.items()) if value.dtype.kind == "f" and "running_" not in key]
        change = np.concatenate([(trained[key].astype(float) - sent[key]).ravel() for key in keys])
        total = total + change / np.linalg.norm(change)
    return float((total @ total - len(paths)) / (len(paths) * (len(paths) - 1)))


def page(answer: Answer, **content: Any) -> str:
    """Return the page with an answer and other values of the template."""
    shown = Benchmark(answer.whole, answer.whole, None)
    env = environment([line.who for line in shown.lines])
    return env.get_template("probe.html").render(content, answer=answer, b=shown, about=heading(answer.whole))
