"""Differentiable loss terms, named as in the papers, and the mean loss of a net."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_modules.evaluation import totals
from lightning_modules.nets.net import evaluating
from pflsim.data.federated import Examples
from pflsim.tasks.task import Criterion, cross_entropy

__all__ = ["alignment", "cross_entropy", "inner_product", "mean_loss", "proximal"]


def proximal(pairs: Iterable[tuple[Tensor, Tensor]], coefficient: float) -> Float[Tensor, ""]:
    """Return coefficient/2 · Σ ‖w − a‖², a penalty towards anchors (FedProx eq. 2, pFedCFR eqs. 11 and 13).

    Args:
        pairs: parameter w and anchor a, of the same shape; only w gets a gradient.
        coefficient: μ, or λ/α.

    Raises:
        ValueError: there is no pair.
    """
    squares = [(w - a.detach()).square().sum() for w, a in pairs]
    if not squares:
        raise ValueError("a proximal term needs at least one parameter: give Anchor the names of the parameters")
    return torch.stack(squares).sum() * (coefficient / 2)


def inner_product(pairs: Iterable[tuple[Tensor, Tensor]]) -> Float[Tensor, ""]:
    """Return Σ ⟨w, d⟩, whose gradient is d: a correction of each step (SCAFFOLD, FedDyn).

    Args:
        pairs: parameter w and direction d, of the same shape; only w gets a gradient.
    """
    return torch.stack([(w * d.detach()).sum() for w, d in pairs]).sum()


def alignment(
    features: Float[Tensor, "B D"],
    labels: Int[Tensor, " B"],
    means: Float[Tensor, "C D"],
    held: Bool[Tensor, " C"],
) -> Float[Tensor, ""]:
    """Return 1/B · Σ_b 1/D · ‖z_b − C̄_{y_b}‖², the distance of features to their class prototypes (FedFCD eq. 6).

    Args:
        features: z; they get a gradient.
        labels: y.
        means: C̄, one prototype per class.
        held: which classes have a prototype. Examples of other classes add 0 and count in B.
    """
    targets = torch.where(held[labels][:, None], means[labels], features.detach())
    return (features - targets).square().mean()


def mean_loss(net: nn.Module, examples: Examples, criterion: Criterion | None = None) -> float:
    """Return the mean loss over all examples, in evaluation mode and without gradients; by default cross-entropy."""
    with evaluating(net):
        return float(totals(net, examples, criterion)[1]) / len(examples)
