"""Class means of features, and prediction by the nearest of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pflsim.data.federated import Examples, Shard
from pflsim.messages import Message, Prototypes, Uplink

FAR = 100.0
"""How much farther than the farthest prototype a class without one is taken to be."""


def class_means(features: Callable[[Tensor], Tensor], examples: Examples, num_classes: int) -> Prototypes:
    """Mean feature of every class over all examples, in one clean pass without gradients (FedFCD eq. 3).

    Args:
        features: inputs [B, ...] → features [B, ...], flattened to [B, D] here; of a module in evaluation mode.
        examples: the client's training shard.
        num_classes: C.

    Returns:
        Means [C, D] in the features' dtype, summed in float64, and counts [C]; a class without examples has count 0.

    Raises:
        ValueError: there are no examples, so that D is not known.
    """
    if not len(examples):
        raise ValueError("class means need at least one example")
    counts = torch.bincount(examples.y, minlength=num_classes)
    found: list[Tensor] = []
    with torch.no_grad():
        found += [features(inputs).flatten(1) for inputs, _ in examples.in_turn()]
    stack = torch.cat(found)
    sums = torch.zeros(num_classes, stack.shape[1], dtype=torch.float64, device=stack.device)
    sums.index_add_(0, examples.y, stack.double())
    means = sums / counts.clamp(min=1)[:, None]
    return Prototypes(means.to(stack.dtype).cpu(), counts.cpu())


def reply_means(body: Callable[[Tensor], Tensor], shard: Shard) -> Uplink:
    """The uplink of a client that sends the class means of its training examples, and nothing else."""
    means = class_means(body, shard.train, shard.num_classes)
    return Uplink(prototypes=means, client=shard.client, num_examples=shard.num_examples)


def received_means(downlink: Message, method: str) -> Prototypes:
    """The global means of a message.

    Raises:
        ValueError: it has none, which this method's server sends with every downlink.
    """
    if downlink.prototypes is None:
        raise ValueError(f"{method}'s server sends class means with every downlink; this one has none")
    return downlink.prototypes


def nearest_scores(features: Float[Tensor, "B D"], means: Float[Tensor, "C D"], held: Bool[Tensor, " C"]) -> Tensor:
    """−‖z − C̄_j‖₂ for every class, so that the nearest prototype scores best (FedProto eq. 4).

    Args:
        features: z.
        means: C̄, one prototype per class.
        held: which classes have a prototype. The others score `FAR` less than the farthest of those: never best, but
            finite, since losses are summed over them. With none at all, every class scores the same.

    Returns:
        Scores [B, C].
    """
    # not by a matrix product, which loses the small distances to rounding
    distances = torch.cdist(features, means, compute_mode="donot_use_mm_for_euclid_dist")
    farthest = (distances * held).amax(1, keepdim=True)
    return -torch.where(held, distances, farthest + FAR)
