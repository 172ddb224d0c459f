"""The server of pFedHN: one hypernetwork generates the weights of all clients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pflsim.config.settings import Count
from pflsim.config.validate import Chance, NonNegative, Widths
from pflsim.fusion.hypernetwork import Hypernetworks, draw_common, features, part_of, parts, pull_back, rebuilt, tensors
from pflsim.fusion.means import column, example_means
from pflsim.messages import Message, Uplink
from pflsim.params import UnitKind
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        names, shapes: of the generated tensors, in the order of the heads.
        nets: the embeddings v of all clients and the shared hypernetwork φ, with one head per tensor.
        velocity: the momentum of each tensor of `nets`.
        statistics: running statistics of normalisation layers, if they are shared.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    nets: Hypernetworks
    velocity: Hypernetworks
    statistics: Tensors


class PFedHN(ServerRule[State]):
    """θ_i = h(v_i; φ) with one hypernetwork h for all clients (Shamsian et al. 2021, Algorithm 1).

    After local training, with Δ_i = θ_i(after) − θ_i, φ and v_i take a gradient descent step with (∇θ_i)ᵀ(−Δ_i), which
    moves θ_i towards the trained model.

    Args:
        embedding: E, the width of an embedding; None: ⌊1 + N/4⌋, as in the paper.
        hidden: widths of the hidden layers (ReLU); the paper: 3 of 100.
        hn_lr: learning rate of φ and v, ≥ 0; None: 0.01 for each client of the round, at most 0.1. The authors: 0.01,
            with one client per round.
        hn_momentum: momentum in [0, 1); the authors: 0.9.
        hn_weight_decay: weight decay, ≥ 0; the authors: 0.001.

    Notes:
        Algorithm 1 prints the step as φ − α·∇φ θ_iᵀ Δ_i, which moves away from the trained model. Eq. 4, the authors'
        code and this implementation use the opposite sign. The paper has one client per round. With K clients, all
        products are taken at the same φ. φ takes their mean, and each embedding its own product. K = 1 is Algorithm 1.
        Momentum and decay also apply to embeddings of absent clients, as in the authors' optimiser. A client that does
        not report does not count in the mean. A round without uplinks changes nothing. The bias of each head starts as
        the initial model, so that clients start near it; weights are initialised as in torch. The authors' code has
        another linear layer before the heads, which adds no expressiveness, and clips gradients at a norm of 50.
        Running statistics of normalisation layers have no gradient. The server sends their mean over the clients of the
        round, weighted by examples (buffers=aggregate), or they stay on the clients.
    """

    unit: UnitKind = "tensor"

    def __init__(
        self,
        *,
        embedding: Count | None = None,
        hidden: Widths = (100, 100, 100),
        hn_lr: NonNegative | None = None,
        hn_momentum: Chance = 0.9,
        hn_weight_decay: NonNegative = 0.001,
    ):
        self.embedding = embedding
        self.hidden = tuple(hidden)
        self.momentum, self.lr, self.decay = hn_momentum, hn_lr, hn_weight_decay

    def init(self, federation: Federation) -> State:
        """Return the state with a new hypernetwork that generates about the initial model."""
        clients, initial = len(federation.clients), federation.initial
        names = tuple(key for unit in federation.layouts["tensor"] for key in unit.parameters)
        width = self.embedding or int(1 + clients / 4)
        nets = draw_common(clients, width, self.hidden, [initial[name] for name in names], federation.seed)
        velocity = rebuilt(nets, [torch.zeros_like(t) for t in tensors(nets)])
        statistics = {key: value for key, value in initial.items() if key not in names}
        return State(names, tuple(tuple(initial[name].shape) for name in names), nets, velocity, statistics)

    def downlink(self, state: State, client: int) -> Message:
        """Send the client's generated weights."""
        return self.downlinks(state, [client])[client]

    def downlinks(self, state: State, clients: Sequence[int]) -> dict[int, Message]:
        """Send the generated weights of several clients."""
        made = generated(state, state.nets.embeddings[torch.tensor(clients, dtype=torch.int64)])
        return {c: Message(weights={**w, **state.statistics}) for c, w in zip(clients, made, strict=True)}

    def join(self, state: State, client: int) -> Message:
        """Send the weights generated from the mean embedding."""
        (weights,) = generated(state, state.nets.embeddings.mean(0, keepdim=True))
        return Message(weights={**weights, **state.statistics})

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Take one step of φ and the embeddings, and average the running statistics."""
        if not uplinks:
            return state
        clients, nets, after = [u.client for u in uplinks], state.nets, [u.weights for u in uplinks]
        x = features(replace(nets, embeddings=nets.embeddings[torch.tensor(clients)]))

        def negative_update(number: int, part: slice) -> Tensor:  # −Δ of a part of one tensor, [K, part]
            trained = [tensor.reshape(-1)[part] for tensor in column(after, state.names[number])]
            return part_of(nets.heads[number], part)(x) - torch.stack(trained)

        # Heads are large, so the gradients become the velocity in place.
        lr = min(0.01 * len(clients), 0.1) if self.lr is None else self.lr
        velocity, moved = tensors(pull_back(nets, clients, negative_update)), []
        for gradient in velocity[1:]:
            gradient.div_(len(clients))
        for value, speed, before in zip(tensors(nets), velocity, tensors(state.velocity), strict=True):
            speed.add_(before, alpha=self.momentum).add_(value, alpha=self.decay)
            moved.append(value.sub(speed, alpha=lr))
        statistics = example_means(uplinks, state.statistics)
        nets, speed = rebuilt(nets, moved), rebuilt(nets, velocity)
        return replace(state, nets=nets, velocity=speed, statistics=statistics)

    def numbers(self, state: State) -> Tensors:
        """Return `embeddings` [N, E]."""
        return {"embeddings": state.nets.embeddings}


def generated(state: State, embeddings: Tensor) -> list[dict[str, Tensor]]:
    """Return h(v; φ) for embeddings [K, E] by tensor name. No two tensors share memory."""
    x = features(replace(state.nets, embeddings=embeddings))
    made: list[dict[str, Tensor]] = [{} for _ in embeddings]
    for name, shape, head in zip(state.names, state.shapes, state.nets.heads, strict=True):
        for weights in made:
            weights[name] = head.bias.new_empty(shape)
        for part in parts(head):
            for weights, row in zip(made, part_of(head, part)(x), strict=True):
                weights[name].view(-1)[part] = row
    return made
