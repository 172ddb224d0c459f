"""The task of a run: what is predicted, and the loss on the outputs of a net."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from pflsim.config.components import resolve
from pflsim.config.names import nearest
from pflsim.config.settings import Settings, TaskChoice
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.errors import SettingsError, in_one_line
from pflsim.tasks.language import IGNORED, token_losses
from pflsim.types import TaskName

LOSSES: dict[TaskName, str] = {
    "classification": "CrossEntropyLoss", "multilabel": "BCEWithLogitsLoss", "regression": "MSELoss",
    "language_model": "CrossEntropyLoss",
}  # fmt: skip
"""The default loss of each task, in `torch.nn`."""
WEIGHTS = ("pos_weight", "weight")
"""Names of class weights among the arguments of a loss: of the positives of each label, or of each class."""


def cross_entropy(logits: Float[Tensor, "B C"], labels: Int[Tensor, " B"]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of a batch in nats.

    Equal to `torch.nn.functional.cross_entropy`, without its `ignore_index`, which is slow under `torch.vmap`.
    """
    return -logits.log_softmax(1).gather(1, labels[:, None]).mean()


def in_float32(values: Tensor) -> Tensor:
    """Return values of a lower precision as float32, others as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@dataclass(frozen=True, slots=True)
class Task:
    """What is predicted, and the loss.

    Args:
        name: classification, multilabel, regression or language_model.
        targets: number of classes, of labels, of values per example, or of different tokens.
        choice: loss, its arguments, label smoothing and class weights, as the settings give them.
        weights: of classes or labels, where the settings or the training data of all clients that train decide them.
        mean, std: of each target, with which training standardises them; empty: targets are used as they are.
        shares: of the classes in these training data; empty: there are no classes.
    """

    name: TaskName = "classification"
    targets: int = 0
    choice: TaskChoice = field(default_factory=TaskChoice)
    weights: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def loss(self) -> Any:
        """The class, function or module of the loss; None: `cross_entropy`.

        Raises:
            SettingsError: there is no such loss.
        """
        choice, name = self.choice, self.choice.loss or LOSSES[self.name]
        plain = not choice.options and not choice.label_smoothing and choice.class_weights == "none"
        if plain and name == "CrossEntropyLoss" and self.name in ("classification", "language_model"):
            return None
        if self.name == "language_model":
            raise SettingsError(
                "task.loss, options, label_smoothing, class_weights: not of task=language_model; leave them out"
            )
        if "." in name:
            return resolve(name, key="task.loss")
        if not (inspect.isclass(found := getattr(nn, name, None)) and issubclass(found, nn.Module)):
            losses = [each for each in vars(nn) if each.endswith("Loss")]
            raise SettingsError(f"task.loss={name}: torch.nn has no such loss; {nearest(name, losses)}")
        return found

    @property
    def one_output(self) -> bool:
        """Whether one output, the logit of class 1, stands for two classes."""
        loss = self.loss
        kind = loss if inspect.isclass(loss) else type(loss)
        return self.name == "classification" and self.targets == 2 and issubclass(kind, nn.BCEWithLogitsLoss)

    @property
    def outputs(self) -> int:
        """The number of outputs of a net."""
        return 1 if self.one_output else self.targets

    def record(self) -> dict[str, Any]:
        """Return the content for a JSON file, without the settings and what only metrics need."""
        return {key: value for key, value in asdict(self).items() if key not in ("choice", "shares")}

    @classmethod
    def of(cls, record: Mapping[str, Any], choice: TaskChoice) -> Task:
        """Return the task of a `record` and its settings."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        return cls(choice=choice, **values)

    def balanced(self, counts: np.ndarray) -> tuple[float, ...]:
        """Return class weights from the number of positive examples.

        Args:
            counts: [targets + 1]: examples with each class or label, and the number of examples.

        Returns:
            n / (k · n_c) for the k classes that occur; for the losses with `pos_weight` (n − n_c) / n_c. 1 for classes
            that do not occur.
        """
        n, positive = counts[-1], counts[1:-1] if self.one_output else counts[:-1]
        with np.errstate(divide="ignore"):
            if self.one_output or self.name == "multilabel":
                weights = (n - positive) / positive
            else:
                weights = n / (np.count_nonzero(positive) * positive)
        return tuple(np.where(np.isfinite(weights) & (weights > 0), weights, 1.0).tolist())


class Criterion(nn.Module):
    """The loss of a task, and the scores that the outputs of a net stand for.

    Args:
        task: the task.

    Raises:
        SettingsError: the loss does not exist, or does not take the given arguments.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, task: Task):
        super().__init__()
        self.task, self.one_output = task, task.one_output
        self.loss = _made(task)
        self.term = "ce" if self.loss is None or isinstance(self.loss, nn.CrossEntropyLoss) else "loss"
        """The name of the loss among the terms of an objective."""
        for name in ("mean", "std") if task.mean else ():
            self.register_buffer(name, torch.tensor(getattr(task, name)))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, from outputs [B, O] and targets [B] or [B, T].

        With task=language_model it is the mean over the predicted tokens, from [B, L, V] and [B, L]; 0 without any.
        """
        outputs = in_float32(outputs)
        if self.task.name == "language_model":
            return token_losses(outputs, targets).sum() / self.weight(targets).clamp(min=1)
        if self.loss is None:
            return cross_entropy(outputs, targets)
        if self.one_output:
            targets = targets[:, None]
        if self.one_output or self.task.name != "classification":
            targets = targets.to(outputs.dtype)
        found = self.loss(outputs, (targets - self.mean) / self.std if self.task.mean else targets)
        if not isinstance(found, Tensor) or found.numel() != 1:
            name, shape = self.task.choice.loss or LOSSES[self.task.name], [*getattr(found, "shape", ())]
            raise SettingsError(f"task.loss={name}: returns a {type(found).__name__} {shape}; expected one number")
        return found

    def weight(self, targets: Tensor) -> Any:
        """Return the number of examples of a batch, or of next tokens that of the predicted ones."""
        return (targets != IGNORED).sum() if self.task.name == "language_model" else len(targets)

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch times its size."""
        if self.loss is None:
            return functional.cross_entropy(outputs, targets, reduction="sum")
        return self(outputs, targets) * len(targets)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return the loss of each example, [B]; None if the loss gives that of a batch only."""
        if self.loss is None:
            return functional.cross_entropy(outputs, targets, reduction="none")
        if type(self.loss) is nn.MSELoss and self.loss.reduction == "mean" and self.task.name == "regression":
            wanted = (targets - self.mean) / self.std if self.task.mean else targets
            return functional.mse_loss(in_float32(outputs), wanted, reduction="none").mean(1)
        return None

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the scores of all classes or labels, [B, C], or the predicted values in their unit, [B, T]."""
        if self.one_output:
            return torch.cat((torch.zeros_like(outputs), outputs), 1)
        return outputs * self.std + self.mean if self.task.mean else outputs

    def correction(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the constant, [O], that fits outputs to targets if it is added: of values, or of two classes.

        It is the mean residual, or changes the logit of class 1 as `firth_intercept` says.
        """
        if self.task.name == "regression":
            return ((targets - self.mean) / self.std - outputs if self.task.mean else targets - outputs).mean(0)
        logits = self.scores(outputs).double().cpu().diff().squeeze(1).numpy()
        shift = firth_intercept(logits, targets.cpu().numpy())
        return outputs.new_tensor([shift] if self.one_output else [0.0, shift])

    def weigh(self, targets: Tensor) -> None:
        """Balance the classes of a client's training targets, with `task.class_weights=balanced_client`."""
        if self.task.choice.class_weights == "balanced_client":
            weight: Any = next(getattr(self.loss, name) for name in WEIGHTS if hasattr(self.loss, name))
            weight.copy_(torch.tensor(self.task.balanced(counts_of(self.task, targets.cpu().numpy()))))


def firth_intercept(logits: np.ndarray, targets: np.ndarray) -> float:
    """Return the intercept that is added to given logits [n], with Firth's penalty: it exists for one class, too.

    It is NaN if a logit is not finite.

    Firth (1993): the root of Σ (y − p + h (½ − p)), where h = p (1 − p) / Σ p (1 − p).
    """
    from scipy.optimize import brentq
    from scipy.special import expit

    if not np.isfinite(logits).all():
        return np.nan
    given = logits.clip(-30, 30)  # the products below are not 0

    def score(intercept: float) -> float:
        p, q = expit(given + intercept), expit(-given - intercept)
        return float((targets - p + p * q / (p * q).sum() * (0.5 - p)).sum())

    return float(np.asarray(brentq(score, -100.0, 100.0)))


def counts_of(task: Task, targets: np.ndarray) -> np.ndarray:
    """Return the number of examples with each class or label, and of all examples, [targets + 1]."""
    positive = targets.sum(0) if targets.ndim > 1 else np.bincount(targets, minlength=task.targets)
    return np.append(positive, len(targets))


def _made(task: Task) -> Any:
    """Return the loss with its arguments; None: `cross_entropy`."""
    found, choice = task.loss, task.choice
    if found is None:
        return None
    name, known = choice.loss or LOSSES[task.name], inspect.signature(found).parameters
    if task.name == "regression" and found in (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss):
        raise SettingsError(f"task.loss={name} is a loss of classes, and the run has task=regression")
    given: dict[str, Any] = dict(choice.options)
    if choice.label_smoothing:
        given["label_smoothing"] = choice.label_smoothing
    if choice.class_weights != "none":
        key = next((each for each in WEIGHTS if each in known), None)
        if key is None or not inspect.isclass(found) or task.name == "regression":
            raise SettingsError(f"task.class_weights={choice.class_weights}: {name} of task={task.name} has none")
        size = task.outputs if key == "pos_weight" else task.targets
        given[key] = torch.tensor(task.weights or (1.0,) * size)
    if unknown := [key for key in given if key not in known]:
        raise SettingsError(f"task.options: {name} has no argument {unknown[0]}; {nearest(unknown[0], known)}")
    try:
        if inspect.isclass(found):
            return found(**given)
        return partial(found, **given) if given else found
    except Exception as error:
        raise SettingsError(f"task.loss={name} with {dict(choice.options)}: {in_one_line(error)}") from error


def task_of(settings: Settings, dataset: Dataset, partition: Partition) -> Task:
    """Return the task of a run, with class weights and shares, and the mean and deviation of targets to standardise.

    Raises:
        SettingsError: there is no such loss, or the number of class weights is wrong.
    """
    task, common = Task(dataset.task, dataset.num_classes, settings.task), partition.common
    given = task.choice.class_weights
    if task.choice.weights_by == "tokens" and task.name != "language_model":
        raise SettingsError(f"task.weights_by=tokens: the run has task={task.name}; leave it out")
    numbers = task.name == "regression" and dataset.kind == "tables" and task.choice.loss is None
    if numbers if (asked := task.choice.standardize_target) is None else asked:
        if task.name != "regression":
            raise SettingsError(f"task.standardize_target=true: the run has task={task.name}; leave it out")
        y = dataset.y[np.concatenate(common)].astype(np.float64)
        std = np.where((found := y.std(0)) > 0, found, 1.0)
        task = replace(task, mean=tuple(y.mean(0).tolist()), std=tuple(std.tolist()))
    if task.name == "classification" or given == "balanced":
        targets = [partition.shift.of(client).labels(dataset, rows) for client, rows in enumerate(common)]
        counts = np.sum([counts_of(task, each) for each in targets], 0)
        shares = tuple((counts[:-1] / counts[-1]).tolist()) if task.name == "classification" else ()
        task = replace(task, shares=shares, weights=task.balanced(counts) if given == "balanced" else ())
    if not isinstance(given, list):
        return task
    if len(given) != task.targets:
        raise SettingsError(f"task.class_weights={given}: expected {task.targets} weights, one for each class or label")
    if task.one_output:
        if not given[0]:
            raise SettingsError(f"task.class_weights={given}: BCEWithLogitsLoss needs a weight above 0 for class 0")
        given = [given[1] / given[0]]
    return replace(task, weights=tuple(given))
