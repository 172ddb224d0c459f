"""The metrics of a run: names of a table, functions of torchmetrics, and one's own functions.

A metric is a function of scores [n, C] and targets. Scores are probabilities of classes or labels, or predicted values
[n, T]; targets are classes [n], or labels or values [n, T]. A metric that cannot be computed, such as the AUROC of a
client with one class, is undefined: it has no value, and is never 0.
"""

import inspect
import math
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from pflsim.config.components import resolve
from pflsim.config.names import nearest
from pflsim.config.settings import Eval
from pflsim.display.metrics import SHARES, THRESHOLD, UNDIRECTED
from pflsim.errors import SettingsError
from pflsim.records.evaluation import Measures
from pflsim.records.predictions import probabilities
from pflsim.tasks.language import METRICS
from pflsim.tasks.task import Task
from pflsim.types import TaskName

OF_EACH_CLASS = 10
"""Examples of each of two classes that calibration and thresholds of a client need."""
BINS = 15
"""The number of equally wide bins of confidence for the expected calibration error."""
PRIMARY: dict[TaskName, str] = {
    "classification": "accuracy", "multilabel": "auroc", "regression": "rmse", "language_model": "nll",
}  # fmt: skip
"""The default of `eval.primary`."""
RESERVED = ("clients", "loss", "total", "correct", "fault", "round", "client", "split", "model", "phase", "undefined")


def predicted_classes(scores: Tensor) -> Tensor:
    """Return the class with the highest score, [n] int64; −1 where a score is not finite."""
    # argmax of NaN is a class, so a diverged model would get that class right
    return scores.argmax(1).masked_fill_(~scores.isfinite().all(1), -1)


# The table. Each function has the arguments scores as `predict` returns them, probabilities, targets and options, and
# returns None where the metric is undefined.


def _library(name: str, *arguments: Any, **options: Any) -> Tensor:
    """Call a function of `torchmetrics.functional`, which is imported only then."""
    return _resolved(name)(*arguments, **options)


@cache
def _resolved(name: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = pkgutil.resolve_name(f"torchmetrics.functional.{name}")
    return found


def sums_by_client(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the sums over the examples of each client, [clients, ...] float64.

    Args:
        values: [n, ...], of one client after another.
        sizes: the clients' numbers of examples.
    """
    # the order of these sums is fixed, that of index_add on a GPU is not
    return pad_sequence([*values.double().split(sizes)], batch_first=True).sum(1)


@dataclass(frozen=True, slots=True)
class _Mean:
    """A metric that is a mean over examples, so that it is computed for many clients at once.

    Args:
        of: returns a value for each example, or for each example and target.
        root: whether the square root of the mean is meant.
    """

    of: Callable[[Tensor, Tensor, Tensor], Tensor]
    root: bool = False

    def __call__(self, scores: Tensor, p: Tensor, y: Tensor) -> Tensor:
        return self.by_client(scores, p, y, [len(y)])[0]

    def by_client(self, scores: Tensor, p: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the means of all clients, [clients] float64."""
        sums = sums_by_client(self.of(scores, p, y).reshape(len(y), -1), sizes)
        means = sums / torch.tensor(sizes, dtype=torch.float64)[:, None]
        return (means.sqrt() if self.root else means).mean(1)


@_Mean
def _accuracy(scores: Tensor, p: Tensor, y: Tensor) -> Tensor:
    return (p > 0.5) == (y > 0.5) if y.ndim > 1 else predicted_classes(scores) == y


def _per_class(score: str, scores: Tensor, y: Tensor) -> Tensor:
    """Return a torchmetrics score of every class [C]; a prediction that is not finite is a class of its own."""
    classes, guesses = scores.shape[1], predicted_classes(scores)
    guesses = torch.where(guesses < 0, classes, guesses)
    options = {"num_classes": classes + 1, "average": "none", "validate_args": False}
    return _library(f"classification.multiclass_{score}", guesses, y, **options)[:-1].double()


def _balanced_accuracy(scores: Tensor, p: Tensor, y: Tensor) -> Any:
    return _per_class("recall", scores, y)[y.unique()].mean()  # of the classes that the client has


def _reweighted_accuracy(scores: Tensor, p: Tensor, y: Tensor, shares: Sequence[float] = ()) -> Any:
    held = y.unique()
    weights = torch.tensor(shares, dtype=torch.float64, device=y.device)[held]
    return (weights * _per_class("recall", scores, y)[held]).sum() / weights.sum()  # NaN if training has none of these


def _macro_f1(scores: Tensor, p: Tensor, y: Tensor) -> Any:
    if y.ndim > 1:
        return _library("classification.multilabel_f1_score", p, y.int(), y.shape[1], validate_args=False)
    found = torch.cat((y, predicted_classes(scores))).unique()
    return _per_class("f1_score", scores, y)[found[found >= 0]].mean()


def _top_k_accuracy(scores: Tensor, p: Tensor, y: Tensor, top_k: int = 5) -> Any:
    options = {"average": "micro", "top_k": min(top_k, p.shape[1]), "validate_args": False}
    return _library("classification.multiclass_accuracy", p, y, p.shape[1], **options)


@_Mean
def _nll(scores: Tensor, p: Tensor, y: Tensor) -> Tensor:
    if y.ndim > 1:
        return functional.binary_cross_entropy_with_logits(scores.double(), y.double(), reduction="none")
    return functional.cross_entropy(scores.double(), y, reduction="none")


def _ece(scores: Tensor, p: Tensor, y: Tensor) -> Any:
    return _library("classification.multiclass_calibration_error", p, y, p.shape[1], BINS, validate_args=False)


@_Mean
def _brier(scores: Tensor, p: Tensor, y: Tensor) -> Tensor:
    squares = (p - (y if y.ndim > 1 else functional.one_hot(y, p.shape[1]))).square()
    return squares.sum(1) if y.ndim == 1 and p.shape[1] > 2 else squares


def _calibrated(fit: Callable[[np.ndarray, np.ndarray], float]) -> Callable[..., Any]:
    def calibrated(scores: Tensor, p: Tensor, y: Tensor) -> Any:
        """Return a coefficient of a logistic regression on the logit; None if one class is rare, or it separates."""
        logits, classes = (scores[:, 1].double() - scores[:, 0].double()).numpy(), y.numpy()
        no, yes = logits[classes == 0], logits[classes == 1]
        rare = min(len(no), len(yes)) < OF_EACH_CLASS
        return None if rare or no.max() <= yes.min() or yes.max() <= no.min() else fit(logits, classes)

    return calibrated


def _slope(logits: np.ndarray, y: np.ndarray) -> float:
    from sklearn.linear_model import LogisticRegression

    unit = logits.std()
    fitted = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-8).fit(logits[:, None] / unit, y)
    return float(fitted.coef_.item() / unit)


def _intercept(logits: np.ndarray, y: np.ndarray) -> float:
    """Return the intercept where the slope is 1, at which the mean probability is the share of class 1."""
    from scipy.optimize import brentq
    from scipy.special import expit, logit

    ends = logit(y.mean()) - logits.max(), logit(y.mean()) - logits.min()
    return float(brentq(lambda a: expit(logits + a).mean() - y.mean(), *ends))  # type: ignore[arg-type]


def _ranked(of_ranks: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., Any]:
    def ranked(scores: Tensor, p: Tensor, y: Tensor) -> Any:
        """Return a score of rankings: of class 1, or the mean over the classes or labels for which it is defined."""
        if y.ndim == 1 and p.shape[1] == 2:
            p, y = p[:, 1:], y[:, None]
        elif y.ndim == 1:
            y = functional.one_hot(y, p.shape[1])
        mixed = (y > 0.5).any(0) & (y < 0.5).any(0)
        return of_ranks(p[:, mixed].cpu().numpy(), y[:, mixed].cpu().numpy() > 0.5).mean() if mixed.any() else None

    return ranked


# for all columns [n, C] at once: with a call of torchmetrics for each, ten classes take five times as long


def _auroc(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the Mann-Whitney statistic of each column; a tie counts half."""
    from scipy.stats import rankdata

    positive = y.sum(0)
    above = (rankdata(p, axis=0) * y).sum(0) - positive * (positive + 1) / 2
    return above / (positive * (len(y) - positive))


def _average_precision(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the mean precision at the scores of the positives of each column."""
    from scipy.stats import rankdata

    chosen = rankdata(-p, "max", axis=0).astype(int)
    hits = np.take_along_axis(y, (-p).argsort(0), 0).cumsum(0)
    return (np.take_along_axis(hits, chosen - 1, 0) / chosen * y).sum(0) / y.sum(0)


def _of_values(name: str) -> Callable[..., Any]:
    def measured(scores: Tensor, p: Tensor, y: Tensor) -> Any:
        """Return the mean over the targets of a metric of regression that needs targets that vary."""
        y = y.double()
        if len(y) < 2 or not (y.std(0) > 0).all():
            return None
        columns = zip(p.T.contiguous(), y.T.contiguous(), strict=True)
        return torch.stack([_library(name, a, b).double() for a, b in columns]).mean()

    return measured


CLASSES: tuple[TaskName, ...] = ("classification",)
LABELS: tuple[TaskName, ...] = ("classification", "multilabel")
VALUES: tuple[TaskName, ...] = ("regression",)
TABLE: dict[str, tuple[Callable[..., Any], bool | None, tuple[TaskName, ...]]] = {
    "accuracy": (_accuracy, True, LABELS),
    "balanced_accuracy": (_balanced_accuracy, True, CLASSES),
    "reweighted_accuracy": (_reweighted_accuracy, True, CLASSES),
    "macro_f1": (_macro_f1, True, LABELS),
    "top_k_accuracy": (_top_k_accuracy, True, CLASSES),
    "nll": (_nll, False, LABELS),
    "ece": (_ece, False, CLASSES),
    "brier": (_brier, False, LABELS),
    "calibration_slope": (_calibrated(_slope), None, CLASSES),
    "calibration_intercept": (_calibrated(_intercept), None, CLASSES),
    "auroc": (_ranked(_auroc), True, LABELS),
    "average_precision": (_ranked(_average_precision), True, LABELS),
    "rmse": (_Mean(lambda scores, p, y: (p - y).square(), root=True), False, VALUES),
    "mae": (_Mean(lambda scores, p, y: (p - y).abs()), False, VALUES),
    "r2": (_of_values("r2_score"), True, VALUES),
    "pearson": (_of_values("pearson_corrcoef"), True, VALUES),
}
"""The function of each name, whether a higher value is better (None: neither), and the tasks that have the metric."""
OF_GUESSES = (_accuracy, _balanced_accuracy, _reweighted_accuracy, _macro_f1)
"""Metrics that count scores that are not finite as wrong predictions; the others are NaN."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Args:
        name: in records.
        call: a function of the table; otherwise a function of probabilities and targets, or a `torchmetrics.Metric`.
        task: of the run.
        higher: whether a higher value is better; None: not known.
        options: further arguments.
        listed: whether it is one of the table.
    """

    name: str
    call: Any
    task: TaskName
    higher: bool | None
    options: Mapping[str, Any] = field(default_factory=dict)
    listed: bool = False

    def __call__(self, scores: Tensor, targets: Tensor) -> float | None:
        """Return the value for scores [n, C] as `predict` returns them; NaN if they are not finite.

        Returns:
            None if the metric is undefined: it is NaN for finite scores, or raises a ValueError.
        """
        if not scores.isfinite().all() and self.call not in OF_GUESSES:
            return math.nan
        p = probabilities(self.task, scores)
        if self.listed:
            found = self.call(scores, p, targets, **self.options)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about what is undefined
                try:
                    found = self._foreign(p, targets)
                except ValueError:
                    return None
        try:
            return None if found is None or math.isnan(found := float(found)) else found
        except (TypeError, ValueError, RuntimeError) as error:
            raise SettingsError(f"eval.metrics: {self.name} does not return one number ({error})") from error

    def by_client(self, scores: Tensor, targets: Tensor, sizes: Sequence[int]) -> list[float | None]:
        """Return the value of each client, see `__call__`.

        Args:
            scores: [n, C], of one client after another.
            targets: of the same examples.
            sizes: the clients' numbers of examples, of each at least one.
        """
        if isinstance(self.call, _Mean) and scores.isfinite().all():
            return self.call.by_client(scores, probabilities(self.task, scores), targets, sizes).tolist()
        return [self(*own) for own in zip(scores.split(sizes), targets.split(sizes), strict=True)]

    def _foreign(self, p: Tensor, y: Tensor) -> Any:
        """Call a function of torchmetrics or of the user."""
        name = getattr(self.call, "__name__", type(self.call).__name__).lower()
        binary = name.startswith("binary") or self.options.get("task") == "binary"
        p = p[:, 1] if binary and p.shape[1] == 2 else p
        y = y.long() if self.task == "multilabel" else y
        if hasattr(self.call, "update") and hasattr(self.call, "compute"):
            self.call.reset()
            self.call.update(p, y)
            return self.call.compute()
        return self.call(p, y, **self.options)


def metrics_of(asked: Sequence[Any], task: Task, primary: str | None = None) -> tuple[Metric, ...]:
    """Return the metrics of a run besides the accuracy of classification, each once.

    Args:
        asked: `eval.metrics`: names, or mappings of a name to its options.
        task: of the run.
        primary: `eval.primary`, which is added if it is not among them; None: that of the task.

    Raises:
        SettingsError: a metric does not exist, or is not one of this task.
    """
    found, accuracy = dict[str, Metric](), task.name == "classification"
    if task.name == "language_model":  # from sums over tokens, not from scores
        for entry in filter(None, (*asked, primary)):
            if entry not in METRICS[:-1]:
                known = nearest(str(entry), METRICS[:-1])
                raise SettingsError(f"eval.metrics: {entry} is not a metric of task=language_model; {known}")
        return ()
    for entry in [*asked, primary or PRIMARY[task.name]]:
        if entry == primary and entry in found:  # by the last part of a dotted name, or the name of a function
            continue
        name, options = next(iter(entry.items())) if isinstance(entry, Mapping) else (entry, {})
        metric = _metric(name, dict(options or {}), task)
        known = found.get(metric.name)
        if known and known.options != metric.options and entry != primary or metric.name in RESERVED:
            raise SettingsError(f"eval.metrics: two metrics, or a metric and a column, have the name {metric.name}")
        if not known and not (accuracy and metric.name == "accuracy"):
            found[metric.name] = metric
    return tuple(found.values())


def measures_of(task: Task, metrics: Sequence[Metric], settings: Eval) -> Measures:
    """Return names and directions of a run's metrics. One whose direction is not known counts as higher is better.

    Raises:
        SettingsError: the direction of the primary metric is not known, or `eval.threshold` is not of two classes.
    """
    names = ("accuracy",) * (task.name == "classification") + tuple(metric.name for metric in metrics)
    names = METRICS if task.name == "language_model" else names
    chosen = (THRESHOLD, *SHARES) if settings.sensitivity else ()
    if chosen and (task.name, task.targets) != ("classification", 2):
        raise SettingsError(f"eval.threshold={settings.threshold} is of two classes; leave it out")
    for name in {*chosen}.intersection(names):
        raise SettingsError(f"eval.metrics: {name} is a column of eval.threshold={settings.threshold}; leave it out")
    primary = (settings.primary or PRIMARY[task.name]).rpartition(".")[2]
    lower = dict.fromkeys(("nll", "perplexity") if names is METRICS else (), False)
    higher = {metric.name: metric.higher for metric in metrics} | lower
    if settings.mode != "auto":
        higher[primary] = settings.mode == "max"
    elif higher.get(primary, True) is None:
        raise SettingsError(f"eval.primary={primary} does not say which values are better; set eval.mode to min or max")
    return Measures((*names, *chosen), primary, tuple(name for name in names if higher.get(name) is False))


def check_primary(measures: Measures, metrics: Sequence[Metric], task: Task, targets: Iterable[Tensor]) -> None:
    """Check that the primary metric can be computed for a client, on scores drawn at random.

    Args:
        measures: of the run.
        metrics: of the run.
        task: of the run.
        targets: the test targets of each client.

    Raises:
        SettingsError: it is undefined for all clients.
    """
    generator = torch.Generator().manual_seed(0)
    for primary in (metric for metric in metrics if metric.name == measures.primary):
        drawn = ((torch.rand(len(own), task.targets, generator=generator), own) for own in targets if len(own))
        if all(primary(*outcomes) is None for outcomes in drawn):
            raise SettingsError(f"eval.primary={primary.name} cannot be computed on the test examples of any client")


def _metric(name: str, options: dict[str, Any], task: Task) -> Metric:
    short, call = name.rpartition(".")[2], None
    if name in TABLE:
        call, higher, tasks = TABLE[name]
        if task.name not in tasks:
            own = [each for each, (*_, of) in TABLE.items() if task.name in of]
            raise SettingsError(f"eval.metrics: {name} is not a metric of task={task.name}; choose {', '.join(own)}")
        if name in UNDIRECTED and task.targets != 2:
            raise SettingsError(f"eval.metrics: {name} is a metric of two classes, and these are {task.targets}")
        if call is _reweighted_accuracy:
            options = {"shares": task.shares, **options}
        _check_options(name, call, options)
        return Metric(name, call, task.name, higher, options, listed=True)
    if "." in name:
        call = resolve(name, key="eval.metrics")
    else:
        from torchmetrics import functional as torchmetrics

        if not callable(call := getattr(torchmetrics, name, None)):
            raise SettingsError(f"eval.metrics: there is no metric {name}; {nearest(name, TABLE)}, or a dotted name")
    options = {**_filled_in(call, task), **options}
    _check_options(name, call, options)
    if inspect.isclass(call):
        try:
            call, options = call(**options), {}
        except Exception as error:
            raise SettingsError(f"eval.metrics: {name} with {options}: {error}") from error
    return Metric(short, call, task.name, getattr(call, "higher_is_better", None), options)


def _filled_in(call: Any, task: Task) -> dict[str, Any]:
    """Return the arguments of a function or class of torchmetrics that the task decides."""
    kind = "binary" if task.name == "classification" and task.targets == 2 else task.name
    given = {"task": {"classification": "multiclass"}.get(kind, kind), "num_classes": task.targets}
    given |= {"num_labels": task.targets} if task.name == "multilabel" else {}
    library = getattr(call, "__module__", "").partition(".")[0] == "torchmetrics"
    known = inspect.signature(call).parameters if library and hasattr(call, "__qualname__") else {}
    return {key: value for key, value in given.items() if key in known}


def _check_options(name: str, call: Callable[..., Any], options: Iterable[str]) -> None:
    for key in options:
        known = inspect.signature(call).parameters
        if key not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise SettingsError(f"eval.metrics: {name} has no option {key}; {nearest(key, known)}")
