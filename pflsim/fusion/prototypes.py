"""Fuses class prototypes, and trains a classifier on them."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from pflsim.messages import Prototypes
from pflsim.types import Tensors

Weighting = Literal["samples", "uniform", "printed"]


def fuse_prototypes(sent: Sequence[Prototypes], weighting: Weighting = "samples") -> Prototypes:
    """Average the clients' prototypes of each class over the clients that hold the class.

    C̄_j = Σ_i D_ij·C_ij / Σ_i D_ij ("samples": FedFCD eq. 5, pFedPM eq. 7), or the unweighted mean ("uniform"). Both
    papers also divide by the number of these clients, which shrinks the prototypes: "printed".

    Args:
        sent: K prototypes, means [C, D] and counts [C], ordered by client id.
        weighting: samples, uniform or printed.

    Returns:
        Means [C, D] in the input dtype, accumulated in float64, and the total counts [C].
    """
    means = torch.stack([p.means for p in sent]).double()  # [K, C, D]
    counts = torch.stack([p.counts for p in sent]).double()  # [K, C]
    held = (counts > 0).double()
    weights = held if weighting == "uniform" else counts
    # Rows of missing classes may contain NaN, and 0 · NaN is NaN.
    kept = torch.where((counts > 0)[..., None], means, torch.zeros((), dtype=torch.float64))
    fused = torch.einsum("kc,kcd->cd", weights, kept) / weights.sum(0).clamp(min=1)[:, None]
    if weighting == "printed":
        fused /= held.sum(0).clamp(min=1)[:, None]
    return Prototypes(fused.to(sent[0].means.dtype), counts.sum(0).long())


def keep_missing(new: Prototypes, old: Prototypes | None) -> Prototypes:
    """Return the new prototypes, with the old ones for classes without new ones.

    Args:
        new: means [C, D] and counts [C] of this round.
        old: the previous ones, or None.

    Returns:
        Means [C, D] and counts [C], each row from one of the two.
    """
    if old is None:
        return new
    held = new.counts > 0
    means = torch.where(held[:, None], new.means, old.means)
    return Prototypes(means, torch.where(held, new.counts, old.counts))


def labelled(sent: Sequence[Prototypes]) -> tuple[Float[Tensor, "P D"], Int[Tensor, " P"]]:
    """Return all received prototypes as training examples: P means [P, D] and their classes [P].

    Args:
        sent: K prototypes, ordered by client id; classes with count 0 are skipped.
    """
    labels = [p.counts.nonzero().flatten() for p in sent]
    return torch.cat([p.means[j] for p, j in zip(sent, labels, strict=True)]), torch.cat(labels)


def passes(count: int, epochs: int, generator: torch.Generator) -> Int[Tensor, "E P"]:
    """Draw the order of P examples for each of E epochs."""
    return torch.stack([torch.randperm(count, generator=generator) for _ in range(epochs)])


def descend(
    values: Tensors, loss: Callable[[Tensors, Tensor], Tensor], *, lr: float, orders: Tensor, batch_size: int
) -> Tensors:
    """Take steps of mini-batch SGD: v ← v − η·∇ℓ(v).

    Args:
        values: named tensors, which are not modified.
        loss: maps values and the numbers of a batch's examples to ℓ.
        lr: η.
        orders: [E, P], the order of the examples in each of E epochs (see `passes`).
        batch_size: examples per batch; the last batch of an epoch may be smaller.

    Returns:
        The new values under the same names.
    """
    for index in (index for order in orders for index in order.split(batch_size)):
        values = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
        gradients = torch.autograd.grad(loss(values, index), list(values.values()))
        pairs = zip(values.items(), gradients, strict=True)
        values = {name: value.detach() - lr * gradient for (name, value), gradient in pairs}
    return values


def train_head(
    head: nn.Module,
    weights: Tensors,
    features: Float[Tensor, "P D"],
    labels: Int[Tensor, " P"],
    *,
    lr: float,
    orders: Int[Tensor, "E P"],
    batch_size: int,
) -> dict[str, Tensor]:
    """Train a head by mini-batch SGD on the mean cross-entropy: φ ← φ − η·∇ℓ(φ; C, y) (FedFCD eq. 4).

    Args:
        head: the classifier's architecture; its own values are not used.
        weights: its parameters and buffers by name; buffers stay unchanged.
        features: P examples.
        labels: their classes.
        lr: η.
        orders: the order of the examples in each of E epochs (see `passes`).
        batch_size: examples per batch; the last batch of an epoch may be smaller.

    Returns:
        The new values under the same names. The arguments are not modified.
    """
    trained = {name: weights[name].detach() for name, _ in head.named_parameters()}
    buffers = {name: value for name, value in weights.items() if name not in trained}

    def loss(values: Tensors, index: Tensor) -> Tensor:
        return cross_entropy(functional_call(head, {**buffers, **values}, (features[index],)), labels[index])

    return {**buffers, **descend(trained, loss, lr=lr, orders=orders, batch_size=batch_size)}
