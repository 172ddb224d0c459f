"""Class means of features (prototypes), and prediction by the nearest one."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from pflsim.data.federated import Examples, Shard
from pflsim.messages import Message, Prototypes, Uplink

MISSING_PROTOTYPE_MARGIN = 100.0
"""Distance beyond the farthest prototype that a class without a prototype gets."""


def class_means(features: Callable[[Tensor], Tensor], examples: Examples, num_classes: int) -> Prototypes:
    """Compute the mean feature of each class in one pass without gradients (FedFCD eq. 3).

    Args:
        features: inputs [B, ...] → features [B, ...], flattened to [B, D]; its module is in evaluation mode.
        examples: the client's training shard.
        num_classes: C.

    Returns:
        Means [C, D] in the features' dtype, summed in float64, and counts [C]. A class without examples has count 0.
    """
    counts = torch.bincount(examples.y, minlength=num_classes)
    stack = all_features(features, examples)
    means = class_sums(stack.double(), examples.y, num_classes) / counts.clamp(min=1)[:, None]
    return Prototypes(means.to(stack.dtype).cpu(), counts.cpu())


def all_features(features: Callable[[Tensor], Tensor], examples: Examples) -> Float[Tensor, "n D"]:
    """Compute the features of all examples in one pass without gradients.

    Args:
        features: see `class_means`.
        examples: in their stored order.
    """
    with torch.no_grad():
        return torch.cat([features(inputs).flatten(1) for inputs, _ in examples.in_turn()])


def class_sums(features: Float[Tensor, "n D"], labels: Int[Tensor, " n"], num_classes: int) -> Float[Tensor, "C D"]:
    """Return the sum of the features of each class."""
    if features.is_cuda:  # additions into one row are in random order there, and rounded differently each time
        return functional.one_hot(labels, num_classes).to(features.dtype).T @ features
    return features.new_zeros(num_classes, features.shape[1]).index_add_(0, labels, features)


def reply_means(body: Callable[[Tensor], Tensor], shard: Shard) -> Uplink:
    """Return an uplink with the class means of the client's training examples and no weights."""
    means = class_means(body, shard.train, shard.num_classes)
    return Uplink(prototypes=means, client=shard.client, num_examples=shard.num_examples)


def received_means(downlink: Message, method: str) -> Prototypes:
    """Return the global class means of a message, with zeros for missing classes, whose rows are undefined.

    Raises:
        ValueError: the message has none.
    """
    if downlink.prototypes is None:
        raise ValueError(f"{method} needs class means in every downlink, and this one has none: use {method}'s server")
    means, counts = downlink.prototypes.means, downlink.prototypes.counts
    return Prototypes(torch.where(counts[:, None] > 0, means, torch.zeros_like(means)), counts)


def nearest_scores(features: Float[Tensor, "B D"], means: Float[Tensor, "C D"], held: Bool[Tensor, " C"]) -> Tensor:
    """Return −‖z − C̄_j‖₂ for each class j; the nearest prototype has the highest score (FedProto eq. 4).

    Args:
        features: z.
        means: C̄, one prototype per class.
        held: which classes have a prototype. The others score `MISSING_PROTOTYPE_MARGIN` below the farthest prototype:
            they are never predicted, but their score is finite, since losses sum over all classes. Without any
            prototype all classes score the same.

    Returns:
        Scores [B, C].
    """
    # matrix multiplication loses small distances to rounding
    distances = torch.cdist(features, means, compute_mode="donot_use_mm_for_euclid_dist")
    farthest = (distances * held).amax(1, keepdim=True)
    return -torch.where(held, distances, farthest + MISSING_PROTOTYPE_MARGIN)
