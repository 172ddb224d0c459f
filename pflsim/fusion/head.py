"""Training a classifier on class prototypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from pflsim.messages import Prototypes
from pflsim.types import Tensors


def labelled(sent: Sequence[Prototypes]) -> tuple[Float[Tensor, "P D"], Int[Tensor, " P"]]:
    """All prototypes that were sent as examples: P means [P, D] with their classes [P], client by client.

    Args:
        sent: K prototypes, in the order of the client ids; classes with count 0 are left out.
    """
    labels = [p.counts.nonzero().flatten() for p in sent]
    return torch.cat([p.means[j] for p, j in zip(sent, labels, strict=True)]), torch.cat(labels)


def passes(count: int, epochs: int, generator: torch.Generator) -> Int[Tensor, "E P"]:
    """The order of P examples in each of E passes over them, drawn from a generator."""
    return torch.stack([torch.randperm(count, generator=generator) for _ in range(epochs)])


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
    """Mini-batch SGD on the mean cross-entropy of a head: φ ← φ − η·∇ℓ(φ; C, y) (FedFCD eq. 4).

    Args:
        head: the classifier's architecture; its own values are neither used nor changed.
        weights: its values by its own names; buffers among them stay as they are.
        features: P examples.
        labels: their classes.
        lr: η.
        orders: E passes over the examples, each with its order (see `passes`).
        batch_size: the last batch of a pass may be smaller.

    Returns:
        The new values, under the same names; nothing that was given is changed.
    """
    names = [name for name, _ in head.named_parameters()]
    fixed = {name: value for name, value in weights.items() if name not in names}
    trained = [weights[name].detach() for name in names]
    for order in orders:
        for index in order.split(batch_size):
            trained = [w.requires_grad_() for w in (t.detach().clone() for t in trained)]
            values = {**fixed, **dict(zip(names, trained, strict=True))}
            loss = cross_entropy(functional_call(head, values, (features[index],)), labels[index])
            steps = torch.autograd.grad(loss, trained)
            trained = [w.detach() - lr * g for w, g in zip(trained, steps, strict=True)]
    return {**fixed, **dict(zip(names, trained, strict=True))}
