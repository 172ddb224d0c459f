"""Hypernetworks, one per client, as stacked tensors: an embedding, hidden layers with ReLU, linear heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from pflsim.seeding import torch_generator


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of every hypernetwork.

    Args:
        weight: [N, out, in].
        bias: [N, out].
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, inputs: Float[Tensor, "N in_"]) -> Float[Tensor, "N out"]:
        """Each row through its own layer."""
        return torch.einsum("noi,ni->no", self.weight, inputs) + self.bias


@dataclass(frozen=True, slots=True)
class Hypernetworks:
    """N hypernetworks of one shape, as plain data.

    Args:
        embeddings: v, [N, E].
        hidden: the hidden layers of ψ.
        heads: the heads of ψ, one for every output.
    """

    embeddings: Tensor
    hidden: tuple[Linear, ...]
    heads: tuple[Linear, ...]


def draw(clients: int, embedding: int, hidden: Sequence[int], outputs: Sequence[int], seed: int) -> Hypernetworks:
    """Draw N hypernetworks; each client's is a function of (seed, client).

    Args:
        clients: N.
        embedding: E, the width of an embedding, which is standard normal as in `torch.nn.Embedding`.
        hidden: widths of the hidden layers.
        outputs: the number of outputs of each head.
        seed: the run's seed.

    Returns:
        float32; weights and biases uniform within ±1/√in as in `torch.nn.Linear`, but for the biases of the heads: they
        are 1, so that outputs start near 1. A softmax does not see it, and where negative outputs are cut off none is.
    """
    generators = [torch_generator(seed, "hypernetwork", client) for client in range(clients)]
    v = torch.stack([torch.randn(embedding, generator=g) for g in generators])
    layers: list[Linear] = []
    width = embedding
    for out in hidden:
        layers.append(Linear(_uniform(generators, (out, width), width), _uniform(generators, (out,), width)))
        width = out
    heads = [Linear(_uniform(generators, (out, width), width), torch.ones(clients, out)) for out in outputs]
    return Hypernetworks(v, tuple(layers), tuple(heads))


def level(nets: Hypernetworks) -> Hypernetworks:
    """The same hypernetworks with the weights of their heads at zero: every output is its head's bias."""
    heads = tuple(Linear(torch.zeros_like(head.weight), head.bias) for head in nets.heads)
    return Hypernetworks(nets.embeddings, nets.hidden, heads)


def outputs(nets: Hypernetworks) -> list[Tensor]:
    """The outputs [N, out] of every head (pFedLA eq. 4, before the scores are made weights)."""
    x = nets.embeddings
    for layer in nets.hidden:
        x = functional.relu(layer(x))
    return [head(x) for head in nets.heads]


def select(nets: Hypernetworks, clients: Sequence[int]) -> Hypernetworks:
    """The hypernetworks of these clients; copies."""
    index = torch.tensor(clients, dtype=torch.int64)
    return _rebuilt(nets, [tensor[index] for tensor in tensors(nets)])


def descend(
    nets: Hypernetworks, clients: Sequence[int], objective: Callable[[list[Tensor]], Tensor], lr: float
) -> Hypernetworks:
    """One gradient step of some clients' hypernetworks, embeddings included; the others stay as they are.

    Args:
        nets: all N.
        clients: the K clients whose hypernetworks take the step.
        objective: their outputs, [K, out] for every head, → a scalar.
        lr: the length of the step.

    Returns:
        All N, in new tensors.
    """
    index = torch.tensor(clients, dtype=torch.int64)
    with torch.enable_grad():
        before = [tensor[index].requires_grad_() for tensor in tensors(nets)]
        gradients = torch.autograd.grad(objective(outputs(_rebuilt(nets, before))), before)
    after = [b.detach() - lr * g for b, g in zip(before, gradients, strict=True)]
    return _rebuilt(nets, [t.index_copy(0, index, a) for t, a in zip(tensors(nets), after, strict=True)])


def tensors(nets: Hypernetworks) -> list[Tensor]:
    """All tensors: the embeddings, then weight and bias of every layer."""
    return [nets.embeddings, *(t for layer in (*nets.hidden, *nets.heads) for t in (layer.weight, layer.bias))]


def _rebuilt(like: Hypernetworks, values: list[Tensor]) -> Hypernetworks:
    """Hypernetworks of the tensors that `tensors` lists."""
    layers = [Linear(weight, bias) for weight, bias in zip(values[1::2], values[2::2], strict=True)]
    depth = len(like.hidden)
    return Hypernetworks(values[0], tuple(layers[:depth]), tuple(layers[depth:]))


def _uniform(generators: Sequence[torch.Generator], shape: tuple[int, ...], fan_in: int) -> Tensor:
    """[N, *shape], row i from the i-th generator, within ±1/√fan_in."""
    made = torch.empty(len(generators), *shape)
    bound = fan_in**-0.5
    for row, generator in zip(made, generators, strict=True):
        row.uniform_(-bound, bound, generator=generator)
    return made
