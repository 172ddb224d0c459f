"""Loss terms, named as the papers name them: scalars that can be differentiated. And a net's loss on some examples."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from lightning_modules.modes import evaluating
from pflsim.data.federated import Examples


def cross_entropy(logits: Float[Tensor, "B C"], labels: Int[Tensor, " B"]) -> Float[Tensor, ""]:
    """Mean cross-entropy of a batch in nats.

    The same as torch's function of this name, but that has labels to be ignored, and with `vmap` each of them costs.
    """
    return -logits.log_softmax(1).gather(1, labels[:, None]).mean()


def proximal(pairs: Iterable[tuple[Tensor, Tensor]], coefficient: float) -> Float[Tensor, ""]:
    """coefficient/2 · Σ ‖w − a‖², the pull of parameters towards anchors (FedProx eq. 2, pFedCFR eqs. 11 and 13).

    Args:
        pairs: parameter and anchor of the same shape; the gradient flows into the parameter only.
        coefficient: μ, or λ/α.

    Raises:
        ValueError: no pair is given: the term would silently be nothing.
    """
    squares = [(w - a.detach()).square().sum() for w, a in pairs]
    if not squares:
        raise ValueError("a proximal term needs at least one parameter with an anchor")
    return torch.stack(squares).sum() * (coefficient / 2)


def alignment(
    features: Float[Tensor, "B D"],
    labels: Int[Tensor, " B"],
    means: Float[Tensor, "C D"],
    held: Bool[Tensor, " C"],
) -> Float[Tensor, ""]:
    """1/B · Σ_b 1/D · ‖z_b − C̄_{y_b}‖², the distance of features to the prototypes of their classes (FedFCD eq. 6).

    Args:
        features: z, into which the gradient flows.
        labels: y.
        means: C̄, one prototype per class.
        held: which classes have a prototype; an example of another one adds nothing (B still counts it).
    """
    targets = torch.where(held[labels][:, None], means[labels], features.detach())
    return (features - targets).square().mean()


def mean_loss(net: nn.Module, examples: Examples) -> float:
    """Mean cross-entropy in nats over all examples, in evaluation mode and without gradients.

    Raises:
        ValueError: there are no examples.
    """
    if not len(examples):
        raise ValueError("a mean loss needs at least one example")
    total = 0.0
    with evaluating(net), torch.no_grad():
        for inputs, labels in examples.in_turn():
            total += float(functional.cross_entropy(net(inputs), labels, reduction="sum").double())
    return total / len(examples)
