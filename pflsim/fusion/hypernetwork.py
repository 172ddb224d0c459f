"""Hypernetworks as stacked tensors: embeddings, hidden layers with ReLU, linear heads.

Each client has its own hypernetwork (pFedLA), or all clients share one and have their own embeddings (pFedHN).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import psutil
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from pflsim.errors import SettingsError
from pflsim.fusion.blocks import COLUMNS
from pflsim.seeding import torch_generator


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of all hypernetworks.

    Args:
        weight: [N, out, in], or [1, out, in] if shared.
        bias: [N, out], or [1, out] if shared.
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, inputs: Float[Tensor, "N in_"]) -> Float[Tensor, "N out"]:
        """Apply each row's own layer, or the shared layer."""
        if len(self.weight) < len(inputs):
            return functional.linear(inputs, self.weight[0], self.bias[0])
        return torch.einsum("noi,ni->no", self.weight, inputs) + self.bias


@dataclass(frozen=True, slots=True)
class Hypernetworks:
    """N hypernetworks of equal shape.

    Args:
        embeddings: v, [N, E].
        hidden: the hidden layers of ψ.
        heads: the heads of ψ, one per output.
    """

    embeddings: Tensor
    hidden: tuple[Linear, ...]
    heads: tuple[Linear, ...]


def draw(
    clients: int, embedding: int, hidden: Sequence[int], outputs: Sequence[int], seed: int, common: bool = False
) -> Hypernetworks:
    """Initialise N hypernetworks; each is a function of (seed, client).

    Args:
        clients: N.
        embedding: E, the width of an embedding.
        hidden: widths of the hidden layers.
        outputs: the number of outputs of each head.
        seed: the run's seed.
        common: whether all clients share their layers, which then have one row, [1, ...].

    Returns:
        float32. Embeddings are standard normal as in `torch.nn.Embedding`. Weights and biases are uniform within ±1/√in
        as in `torch.nn.Linear`. Biases of heads are 1, so that relu scores start positive; softmax ignores the offset.
    """
    widths = [embedding, *hidden]
    sizes, last = [*pairwise(widths)], widths[-1]
    entries = sum((width + 1) * out for width, out in (*sizes, (last, sum(outputs))))
    count = clients * embedding + (1 if common else clients) * entries
    needed, free = 2 * 4 * count, psutil.virtual_memory().available
    if needed > free:  # the kernel kills a process that takes more without a message
        sizes_of = f"need {needed / 2**30:.4g} GiB of memory, and {free / 2**30:.4g} GiB are free"
        raise SettingsError(f"method.embedding and method.hidden: the hypernetworks {sizes_of}: use smaller widths")
    generators = [torch_generator(seed, "hypernetwork", client) for client in range(clients)]
    v = torch.stack([torch.randn(embedding, generator=g) for g in generators])
    generators = [torch_generator(seed, "hypernetwork")] if common else generators
    layers = [Linear(_uniform(generators, (out, w), w), _uniform(generators, (out,), w)) for w, out in sizes]
    heads = [Linear(_uniform(generators, (out, last), last), torch.ones(len(generators), out)) for out in outputs]
    return Hypernetworks(v, tuple(layers), tuple(heads))


def draw_common(
    clients: int, embedding: int, hidden: Sequence[int], start: Sequence[Tensor], seed: int
) -> Hypernetworks:
    """Initialise one hypernetwork shared by N clients, and an embedding per client.

    Args:
        clients: N.
        embedding: E, the width of an embedding.
        hidden: widths of the hidden layers.
        start: the initial bias of each head, one tensor of any shape per head.
        seed: the run's seed.

    Returns:
        As `draw`, but layers have one row, [1, ...], and the biases of heads are `start`, flattened.
    """
    drawn = draw(clients, embedding, hidden, [bias.numel() for bias in start], seed, common=True)
    drawn = as_type(drawn, start[0].dtype)
    heads = zip(drawn.heads, start, strict=True)
    return replace(drawn, heads=tuple(Linear(head.weight, bias.reshape(1, -1).clone()) for head, bias in heads))


def as_type(nets: Hypernetworks, dtype: torch.dtype) -> Hypernetworks:
    """Return the hypernetworks in a type of floating point."""
    return rebuilt(nets, [tensor.to(dtype) for tensor in tensors(nets)])


def level(nets: Hypernetworks) -> Hypernetworks:
    """Return the hypernetworks with zero weights in their heads, so that each output equals its bias."""
    return replace(nets, heads=tuple(replace(head, weight=torch.zeros_like(head.weight)) for head in nets.heads))


def features(nets: Hypernetworks) -> Tensor:
    """Return the inputs of the heads, [N, width]: the embeddings after the hidden layers."""
    x = nets.embeddings
    for layer in nets.hidden:
        x = functional.relu(layer(x))
    return x


def outputs(nets: Hypernetworks) -> list[Tensor]:
    """Return the outputs [N, out] of each head (pFedLA eq. 4, before normalisation)."""
    x = features(nets)
    return [head(x) for head in nets.heads]


def select(nets: Hypernetworks, clients: Sequence[int]) -> Hypernetworks:
    """Return a copy of the hypernetworks of some clients."""
    index = torch.tensor(clients, dtype=torch.int64)
    return rebuilt(nets, [tensor[index] for tensor in tensors(nets)])


def parts(head: Linear, width: int = COLUMNS) -> Iterator[slice]:
    """Return slices of a head's outputs, `width` at a time."""
    out = head.weight.shape[1]
    return (slice(start, min(start + width, out)) for start in range(0, out, width))


def part_of(head: Linear, part: slice) -> Linear:
    """Return a view of some outputs of a head."""
    return Linear(head.weight[:, part], head.bias[:, part])


def pull_back(
    nets: Hypernetworks, clients: Sequence[int], back: Callable[[int, slice], Tensor], width: int = COLUMNS
) -> Hypernetworks:
    """Return the gradients of Σ_i ⟨h(v_i; φ), b_i⟩ for a shared hypernetwork h: vector-Jacobian products with b_i.

    The gradients of the linear heads are computed explicitly for a few outputs at a time, those of the hidden layers by
    backpropagation from the features. Only a few outputs of b are in memory at once.

    Args:
        nets: the shared hypernetwork with all N embeddings.
        clients: the K clients.
        back: returns b [K, outputs] for the number of a head and a slice of its outputs.
        width: outputs per slice.

    Returns:
        Gradients as `Hypernetworks`: those of the embeddings [N, E] are 0 for other clients; those of φ are sums over
        the K clients.
    """
    index = torch.tensor(clients, dtype=torch.int64)
    with torch.enable_grad():
        leaves = [nets.embeddings[index].requires_grad_()]
        leaves += [t.detach().requires_grad_() for layer in nets.hidden for t in (layer.weight, layer.bias)]
        x = features(rebuilt(nets, [*leaves, *(t for head in nets.heads for t in (head.weight, head.bias))]))
    inputs, grad_features, heads = x.detach(), torch.zeros_like(x), []
    for number, head in enumerate(nets.heads):
        weight, bias = torch.empty_like(head.weight), torch.empty_like(head.bias)
        for part in parts(head, width):
            b = back(number, part)
            grad_features += b @ head.weight[0, part]
            weight[0, part] = b.T @ inputs
            bias[0, part] = b.sum(0)
        heads += [weight, bias]
    grad_v, *grad_hidden = torch.autograd.grad(x, leaves, grad_features)
    return rebuilt(nets, [torch.zeros_like(nets.embeddings).index_copy(0, index, grad_v), *grad_hidden, *heads])


def descend(
    nets: Hypernetworks, clients: Sequence[int], objective: Callable[[list[Tensor]], Tensor], lr: float
) -> Hypernetworks:
    """Take one gradient step of some clients' hypernetworks and embeddings.

    Args:
        nets: all N hypernetworks.
        clients: the K clients that take the step.
        objective: maps their outputs, [K, out] per head, to a scalar.
        lr: learning rate.

    Returns:
        All N hypernetworks, in new tensors.
    """
    index = torch.tensor(clients, dtype=torch.int64)
    with torch.enable_grad():
        before = [tensor[index].requires_grad_() for tensor in tensors(nets)]
        gradients = torch.autograd.grad(objective(outputs(rebuilt(nets, before))), before)
    after = [b.detach() - lr * g for b, g in zip(before, gradients, strict=True)]
    return rebuilt(nets, [t.index_copy(0, index, a) for t, a in zip(tensors(nets), after, strict=True)])


def tensors(nets: Hypernetworks) -> list[Tensor]:
    """Return all tensors: the embeddings, then weight and bias of each layer."""
    return [nets.embeddings, *(t for layer in (*nets.hidden, *nets.heads) for t in (layer.weight, layer.bias))]


def rebuilt(like: Hypernetworks, values: Sequence[Tensor]) -> Hypernetworks:
    """Return hypernetworks with the given tensors, ordered as in `tensors`."""
    layers = [Linear(weight, bias) for weight, bias in zip(values[1::2], values[2::2], strict=True)]
    depth = len(like.hidden)
    return Hypernetworks(values[0], tuple(layers[:depth]), tuple(layers[depth:]))


def _uniform(generators: Sequence[torch.Generator], shape: tuple[int, ...], fan_in: int) -> Tensor:
    """Return [N, *shape], uniform within ±1/√fan_in; row i is drawn from generator i."""
    drawn_values = torch.empty(len(generators), *shape)
    bound = fan_in**-0.5
    for row, generator in zip(drawn_values, generators, strict=True):
        row.uniform_(-bound, bound, generator=generator)
    return drawn_values
