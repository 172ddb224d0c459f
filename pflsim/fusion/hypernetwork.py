"""Hypernetworks as stacked tensors: embeddings, hidden layers with ReLU, linear heads.

Either every client has one of its own (pFedLA), or all have one in common, that each client sees through its own
embedding (pFedHN).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from pflsim.fusion.blocks import COLUMNS
from pflsim.memory import check_room
from pflsim.seeding import torch_generator


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of every hypernetwork.

    Args:
        weight: [N, out, in], or [1, out, in] where it is common to all.
        bias: [N, out], or [1, out].
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, inputs: Float[Tensor, "N in_"]) -> Float[Tensor, "N out"]:
        """Each row through its own layer, or all through the common one."""
        if len(self.weight) < len(inputs):
            return functional.linear(inputs, self.weight[0], self.bias[0])
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
    _check_size(clients, clients * embedding, embedding, hidden, outputs)
    generators = [torch_generator(seed, "hypernetwork", client) for client in range(clients)]
    v = torch.stack([torch.randn(embedding, generator=g) for g in generators])
    return _drawn(v, generators, hidden, outputs)


def draw_common(
    clients: int, embedding: int, hidden: Sequence[int], start: Sequence[Tensor], seed: int
) -> Hypernetworks:
    """Draw one hypernetwork for N clients, each with an embedding of its own.

    Args:
        clients: N.
        embedding: E, the width of an embedding.
        hidden: widths of the hidden layers.
        start: what each head gives before it has learnt anything, one tensor of any shape for each.
        seed: the run's seed.

    Returns:
        As of `draw`, but layers have one row, [1, ...], and the biases of the heads are `start`, flattened.
    """
    _check_size(1, clients * embedding, embedding, hidden, [s.numel() for s in start])
    v = [torch.randn(embedding, generator=torch_generator(seed, "hypernetwork", client)) for client in range(clients)]
    drawn = _drawn(torch.stack(v), [torch_generator(seed, "hypernetwork")], hidden, [s.numel() for s in start])
    heads = tuple(Linear(h.weight, s.reshape(1, -1).clone()) for h, s in zip(drawn.heads, start, strict=True))
    return Hypernetworks(drawn.embeddings, drawn.hidden, heads)


def _check_size(rows: int, embeddings: int, width: int, hidden: Sequence[int], outputs: Sequence[int]) -> None:
    """Refuse hypernetworks that this machine has no memory for: values, and gradients as large."""
    count = embeddings
    for out in hidden:
        count, width = count + rows * out * (width + 1), out
    count += rows * sum(outputs) * (width + 1)
    check_room("method.embedding and method.hidden: the hypernetworks", 2 * 4 * count, "take smaller widths")


def _drawn(
    v: Tensor, generators: Sequence[torch.Generator], hidden: Sequence[int], outputs: Sequence[int]
) -> Hypernetworks:
    """Layers with a row from every generator."""
    layers: list[Linear] = []
    width = v.shape[1]
    for out in hidden:
        layers.append(Linear(_uniform(generators, (out, width), width), _uniform(generators, (out,), width)))
        width = out
    heads = [Linear(_uniform(generators, (out, width), width), torch.ones(len(generators), out)) for out in outputs]
    return Hypernetworks(v, tuple(layers), tuple(heads))


def level(nets: Hypernetworks) -> Hypernetworks:
    """The same hypernetworks with the weights of their heads at zero: every output is its head's bias."""
    heads = tuple(Linear(torch.zeros_like(head.weight), head.bias) for head in nets.heads)
    return Hypernetworks(nets.embeddings, nets.hidden, heads)


def features(nets: Hypernetworks) -> Tensor:
    """What the heads see: the embeddings after the hidden layers, [N, width]."""
    x = nets.embeddings
    for layer in nets.hidden:
        x = functional.relu(layer(x))
    return x


def outputs(nets: Hypernetworks) -> list[Tensor]:
    """The outputs [N, out] of every head (pFedLA eq. 4, before the scores are made weights)."""
    x = features(nets)
    return [head(x) for head in nets.heads]


def select(nets: Hypernetworks, clients: Sequence[int]) -> Hypernetworks:
    """The hypernetworks of these clients; copies."""
    index = torch.tensor(clients, dtype=torch.int64)
    return rebuilt(nets, [tensor[index] for tensor in tensors(nets)])


def see(nets: Hypernetworks, embeddings: Tensor) -> Hypernetworks:
    """A common hypernetwork with other embeddings, [K, E]; its layers are the same tensors."""
    return Hypernetworks(embeddings, nets.hidden, nets.heads)


def parts(head: Linear, width: int = COLUMNS) -> Iterator[slice]:
    """The outputs of a head, so many at a time."""
    out = head.weight.shape[1]
    return (slice(start, min(start + width, out)) for start in range(0, out, width))


def part_of(head: Linear, part: slice) -> Linear:
    """Some outputs of a head; the same memory."""
    return Linear(head.weight[:, part], head.bias[:, part])


def pull_back(
    nets: Hypernetworks, clients: Sequence[int], back: Callable[[int, slice], Tensor], width: int = COLUMNS
) -> Hypernetworks:
    """The gradients of Σ_i ⟨h(v_i; φ), b_i⟩ for a common hypernetwork h: its Jacobians times vectors b_i.

    Heads are linear, so their part is written out, head by head for a few outputs at a time; the hidden layers' part is
    a backward pass from the features. So only a few outputs of the b exist at once beside the result.

    Args:
        nets: the common hypernetwork with all N embeddings.
        clients: the K clients.
        back: the number of a head and some of its outputs → those of b, [K, outputs].
        width: how many outputs at a time.

    Returns:
        Gradients in the form of hypernetworks: of the embeddings by row, [N, E], 0 for other clients; of φ the sum over
        the K clients.
    """
    index = torch.tensor(clients, dtype=torch.int64)
    with torch.enable_grad():
        inner = [nets.embeddings[index].requires_grad_()]
        inner += [t.detach().requires_grad_() for layer in nets.hidden for t in (layer.weight, layer.bias)]
        x = features(rebuilt(nets, [*inner, *(t for head in nets.heads for t in (head.weight, head.bias))]))
    seen, onward, heads = x.detach(), torch.zeros_like(x), []
    for number, head in enumerate(nets.heads):
        weight, bias = torch.empty_like(head.weight), torch.empty_like(head.bias)
        for part in parts(head, width):
            b = back(number, part)
            onward += b @ head.weight[0, part]
            weight[0, part] = b.T @ seen
            bias[0, part] = b.sum(0)
        heads += [weight, bias]
    of_v, *of_hidden = torch.autograd.grad(x, inner, onward)
    return rebuilt(nets, [torch.zeros_like(nets.embeddings).index_copy(0, index, of_v), *of_hidden, *heads])


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
        gradients = torch.autograd.grad(objective(outputs(rebuilt(nets, before))), before)
    after = [b.detach() - lr * g for b, g in zip(before, gradients, strict=True)]
    return rebuilt(nets, [t.index_copy(0, index, a) for t, a in zip(tensors(nets), after, strict=True)])


def tensors(nets: Hypernetworks) -> list[Tensor]:
    """All tensors: the embeddings, then weight and bias of every layer."""
    return [nets.embeddings, *(t for layer in (*nets.hidden, *nets.heads) for t in (layer.weight, layer.bias))]


def rebuilt(like: Hypernetworks, values: Sequence[Tensor]) -> Hypernetworks:
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
