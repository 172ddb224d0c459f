"""What a model predicts for a client's examples: correct predictions, loss, and scores."""

from collections.abc import Callable

import torch
from torch import Tensor

from pflsim.data.federated import Examples
from pflsim.tasks.language import token_sums
from pflsim.tasks.metrics import predicted_classes
from pflsim.tasks.task import Criterion, Task, in_float32

Predict = Callable[[Tensor], Tensor]


def totals(
    predict: Predict,
    examples: Examples,
    criterion: Criterion | None = None,
    batch_size: int | None = None,
    outcomes: list[Tensor] | None = None,
) -> Tensor:
    """Count correct predictions without waiting for the device.

    Args:
        predict: inputs [B, ...] → outputs [B, O]; its module is in evaluation mode.
        examples: the examples to predict.
        criterion: the loss of the task; None: that of classification.
        batch_size: examples per forward pass; None: the default of the device.
        outcomes: if given, the scores of every forward pass are appended, [B, C] or [B, T].

    Returns:
        [2] float64 on the examples' device: the number of correct predictions (0 unless classes are predicted) and the
        summed loss; of cross-entropy in nats. With task=language_model [3], see `token_sums`; scores are not kept.
    """
    criterion = criterion or Criterion(Task())
    language = criterion.task.name == "language_model"
    found = torch.zeros(2 + language, dtype=torch.float64, device=examples.y.device)
    with torch.inference_mode():
        for inputs, targets in examples.in_turn(batch_size):
            outputs = predict(inputs)
            if language:
                found += token_sums(in_float32(outputs), targets).sum(0)
                continue
            scores = criterion.scores(outputs)
            if outcomes is not None:
                outcomes.append(scores)
            if criterion.task.name == "classification":
                found[0] += (predicted_classes(scores) == targets).sum()
            found[1] += criterion.total(outputs, targets)
    return found


def recalibrated(predict: Predict, examples: Examples, criterion: Criterion) -> Predict:
    """Return predictions with the constant that fits them best to some examples, see `Criterion.correction`."""
    with torch.inference_mode():
        outputs, targets = zip(*((predict(inputs), targets) for inputs, targets in examples.in_turn()), strict=True)
        constant = criterion.correction(torch.cat(outputs), torch.cat(targets))
    return lambda inputs: predict(inputs) + constant


def confusion(scores: Tensor, targets: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Return (class, predicted class, number of examples) for each pair that occurs, in ascending order."""
    pairs = torch.stack((targets, predicted_classes(scores)), 1)
    found, counts = pairs.unique(dim=0, return_counts=True)
    return tuple((*pair, n) for pair, n in zip(found.tolist(), counts.tolist(), strict=True))
