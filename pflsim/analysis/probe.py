"""Whether personalisation pays: an answer from the runs of `pflsim probe`, how unlike the clients are, and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pflsim.analysis.comparison import Comparison, best_first, compare
from pflsim.analysis.differences import Difference
from pflsim.analysis.groups import Group, group_runs
from pflsim.analysis.headings import heading
from pflsim.analysis.report.charts import Benchmark
from pflsim.analysis.report.page import environment
from pflsim.analysis.runs import Run
from pflsim.config.names import listed
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition, shard
from pflsim.display.identity import identity
from pflsim.display.metrics import points, scale_of
from pflsim.records.evaluation import grouped
from pflsim.records.history import validation_scores

if TYPE_CHECKING:
    from pandas import DataFrame

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
PERSONAL = ("personal", "in groups")
LEVELS = ("not clear", "on these clients only", "clear")
EVALUATIONS = 8
"""The least number of evaluations by which `rising` decides."""
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


def until(run: Run, rounds: int) -> Run:
    """Return a run as it was after a round."""
    history = tuple(line for line in run.history if line.round <= rounds)
    return replace(run, config={**run.config, "rounds": rounds}, history=history)


def chosen_trials(found: Mapping[str, Run]) -> dict[str, str]:
    """Return the name of the trial with the best validation results, of each method that has one."""
    tried = {
        m: {n: validation(reporting(m, r)) for n, r in found.items() if m.startswith(r.method)} for m in APPROACHES
    }
    return {method: max(own, key=own.__getitem__) for method, own in tried.items() if own}


def risen(group: Group) -> tuple[float, float]:
    """Return how much better the best validation value is than that of three quarters of the rounds, and its error.

    The error is the standard error of the mean over pairs (client, seed).
    """
    gains = list[np.ndarray]()
    for run in group.runs:
        scores, scope = validation_scores(run.history, run.reported), run.reported._replace(split="val")
        chosen = [max((r for r in scores if r <= at), key=scores.__getitem__) for at in (run.done, run.done * 3 // 4)]
        now, before = (run.counts(each, scope)[run.primary] for each in chosen)
        gains.append((now - before).dropna().to_numpy() * (1 if run.higher else -1))
    every = np.concatenate(gains)
    return float(every.mean()), float(every.std(ddof=1) / np.sqrt(len(every)))


def rising(groups: Sequence[Group], tolerance: float) -> list[tuple[float, Group]]:
    """Return the methods that still rise, and by how much in the last quarter of the rounds, the steepest first.

    A method rises if this exceeds two standard errors and half of its distance on validation data to the next better
    approach (of the best one, to the second), or half of the tolerance if this is more.
    """
    values, found = [np.mean([validation(run)[0] for run in group.runs]) for group in groups], []
    for group, own in zip(groups, values, strict=True):
        others = [v for v, g in zip(values, groups, strict=True) if APPROACHES[g.method] != APPROACHES[group.method]]
        gap = min((other - own for other in others if other > own), default=own - max(others))
        gain, error = risen(group)
        found += [(gain, group)] if gain > max(2 * error, gap / 2, tolerance / 2) else []
    return sorted(found, key=lambda each: -each[0])


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """Which approach is best, how certain this is, and what decides.

    Args:
        whole: the methods of `APPROACHES` compared with Local.
        between: the methods of the approaches compared with the one that has the best test mean, best first. That of
            two personal ones is chosen on validation data.
        tolerance: values that differ by less are equal in practice: 0.5 points, or 1% of a metric that is no accuracy.
        rises: see `rising`; if there are any, nothing is advised.
        notes: further sentences.
        page: the HTML page.
    """

    whole: Comparison
    between: Comparison
    tolerance: float
    rises: Sequence[tuple[float, Group]]
    notes: Sequence[str] = ()
    page: Path | None = None

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Answer:
        """Compare the runs of all methods, the same seeds and rounds of each."""
        whole, chosen = compare(group_runs(runs)), dict[str, Group]()
        for group in sorted(whole.groups, key=lambda own: tuple(np.mean([*map(validation, own.runs)], axis=0))):
            chosen[APPROACHES[group.method]] = group
        rows = best_first(whole.rows)
        order = [row.group for row in rows if chosen[APPROACHES[row.group.method]] is row.group]
        tolerance = 0.005 if scale_of(whole.primary)[2] else 0.01 * abs(rows[0].figures["mean"].mean)
        between = compare(order, whole.choice, reference=order[0].label)
        return cls(whole, between, tolerance, rising(whole.groups, tolerance))

    @property
    def ahead(self) -> list[str]:
        """The approach with the best test mean, and those that are within the tolerance and not clearly behind."""
        found = [d for d in self.between.differences if abs(d.mean or 0.0) <= self.tolerance and d.level != "clear"]
        return [APPROACHES[group.method] for group in (self.between.reference, *(d.group for d in found))]

    @property
    def best(self) -> str:
        """The simplest of these."""
        return next(name for name in NEXT if name in self.ahead)

    @property
    def undecided(self) -> list[str]:
        """The first approach and those not clearly behind whose interval reaches beyond twice the tolerance, if any."""
        found = [
            d.group
            for d in self.between.differences
            if d.level != "clear" and max(map(abs, self.ends(d))) > 2 * self.tolerance
        ]
        return [APPROACHES[group.method] for group in ([self.between.reference, *found] if found else ())]

    @property
    def beyond_alone(self) -> list[str]:
        """The methods of the approaches that are clearly better than training alone."""
        each = self.whole.families[0]
        found = [d for d in each.differences if d.level == "clear" and each.gains(d)]
        return [shown(d.group) for d in found if d.group in self.between.groups]

    @property
    def by_approach(self) -> list[tuple[str, list[str]]]:
        """Each approach with the names of its methods."""
        return [*grouped((approach, identity(name).display) for name, approach in APPROACHES.items()).items()]

    @property
    def pays(self) -> str:
        """Whether personal models, or one for each group, are better than one model and than training alone."""
        if self.rises:
            return "Not yet known"
        yes, sure = self.best in PERSONAL, len({name in PERSONAL for name in (self.best, *self.undecided)}) == 1
        return f"{('Yes' if yes else 'No') if sure else 'Perhaps' if yes else 'Perhaps not'}: {self.best}"

    @property
    def sentences(self) -> list[str]:
        """What is best or still rises, what decides, and what the differences show, also against training alone."""
        seeds, each = len(self.whole.groups[0].runs), self.whole.families[0]
        said = [self.verdict, *["With one seed, no difference is clear."] * (seeds == 1)]
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
        return [*said, f"Worse than training alone: {listed(worse)} of {clients} clients{which}.", *self.notes]

    @property
    def verdict(self) -> str:
        """What is best, how certain this is, and what decides, or what still rises."""
        metric, run, found = self.whole.primary, self.whole.runs[0], self.between.differences
        unit = scale_of(metric)[2]
        for gain, group in self.rises[:1]:
            by = f"{points(gain, metric)}{unit} in the last {run.done - run.done * 3 // 4} rounds"
            return f"Not yet: {shown(group)} still rises, {by}; rounds={2 * run.done}."
        levels = [d.level for d in found if APPROACHES[d.group.method] not in self.ahead]
        level = min(levels, key=LEVELS.index, default="equal")
        within = f"{points(self.tolerance, metric).removeprefix('+')}{unit}"
        equal = f"{listed(self.ahead)}, equal within {within}; the simplest is {self.best}"
        best = equal if len(self.ahead) > 1 else f"{self.best} ({level})"
        seeds = f"three more seeds, --seeds {len(self.between.reference.runs) + 3} ({listed(self.undecided)})"
        nothing = f"nothing, {'clear' if len(self.ahead) == 1 and level == 'clear' else 'equal'}"
        return f"Best: {best}. What decides: {seeds if self.undecided else nothing}."

    def ends(self, d: Difference) -> Sequence[float]:
        """Return the ends of a difference's interval over seeds, or over pairs with one seed."""
        return [end for end in d.over_seeds if end is not None] or [d.low or 0.0, d.high or 0.0]

    def gap(self, d: Difference) -> str:
        """Return how far the first approach is ahead, with the interval."""
        gaps, metric = (
            [(-1 if self.whole.higher else 1) * end for end in (d.mean or 0.0, *self.ends(d))],
            self.whole.primary,
        )
        mean, low, high = (points(gap, metric).removeprefix("+") for gap in (gaps[0], min(gaps), max(gaps)))
        return f"{mean}{scale_of(metric)[2]} (95% interval {low} to {high})"

    def next(self) -> tuple[str, list[str]]:
        """Return what to try, and the methods; none while an approach rises."""
        if self.rises:
            return "Continue it with more rounds:", []
        methods, what = NEXT[self.best]
        return f"Compare it with methods {what}:", methods.split(",")

    @property
    def frame(self) -> DataFrame:
        """The rows of `pflsim.compare(...).records()` for the methods of the approaches."""
        from pflsim.analysis.tables import Comparisons

        return Comparisons([self.between]).records()

    def __repr__(self) -> str:
        """Return the answer as `pflsim probe` prints it."""
        return "\n".join([f"Does personalisation pay? {self.pays}.", *self.sentences])


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
    whole = answer.whole
    template = environment([line.who for line in whole.lines]).get_template("probe.html")
    return template.render(content, answer=answer, b=Benchmark(whole, whole, None), about=heading(whole))
