"""FedALA: each client mixes the received model into its own with weights that it learns."""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_modules.anchor import Anchor
from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative, Portion, Positive, bounded
from pflsim.data.federated import Shard
from pflsim.messages import Message
from pflsim.params import NET, load, units
from pflsim.types import Tensors

WINDOW, MAX_PASSES = 10, 100
"""The losses of this many passes must be alike for the weights to have settled; most passes."""


class FedALA(ClientModule):
    """Starts from own + (received − own)·W, element-wise in the last p layers (Zhang et al. 2023, AAAI, Algorithm 1).

    The other layers start as received. W ← clip(W − η·∇_W F, 0, 1) on a random share of the training examples: in the
    first mixture until the loss settles, then in one pass a round. W starts at 1 and is private. Local training is
    plain SGD. Reported model: personal, the start of a round, with the newest received model.

    Args:
        net: body and head.
        training: the run's local training settings.
        p: layers (modules with parameters) that are mixed, counted from the output; with 0 the start is FedAvg's.
        share: s in (0, 1], share of the training examples on which W is learnt.
        eta: η ≥ 0, learning rate of W; with 0, W stays 1 and the start is FedAvg's.
        threshold: W has settled when the losses of the last 10 passes have a standard deviation below this; > 0.

    Notes:
        - While own and received layers are equal, as in round 1 with `init=same`, there is nothing to learn. A client
          whose first round is later mixes its initial values in.
        - W is learnt in evaluation mode, so running statistics and dropout play no part. After 100 passes it counts as
          settled. The loss of a pass is its mean; the authors take that of the last mini-batch.
        - A newcomer has no model of its own and starts from the received one.
    """

    lockstep = True
    token_targets = True
    reported_phase = "received"
    settled: Tensor

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        p: int = 1,
        share: Portion = 0.8,
        eta: NonNegative = 1.0,
        threshold: Positive = 0.1,
    ):
        super().__init__(net, training)
        layers = units(self, NET.parameters(self), (), "module")
        chosen = layers[len(layers) - bounded("method.p", p, 0, len(layers)) :]
        self.share, self.eta, self.threshold = share, eta, threshold
        ones = {key: torch.ones_like(self.get_parameter(key)) for unit in chosen for key in unit.parameters}
        self.weights = nn.ParameterDict({_dotless(k): nn.Parameter(v, requires_grad=False) for k, v in ones.items()})
        self.register_buffer("settled", torch.zeros((), dtype=torch.bool))
        self.mixed, self.received = tuple(ones), Anchor()

    def receive(self, downlink: Message) -> None:
        """Store the message for `before_training`, which always follows."""
        self.received.store(downlink.weights)

    def join(self, downlink: Message) -> None:
        """Load the received model: a newcomer has no other."""
        super().receive(downlink)

    def before_training(self, shard: Shard) -> None:
        """Load the received model, learn W, and mix the client's own last layers in."""
        received = self.received.tensors
        if not received:
            return
        self.received.clear()
        own = {key: self.get_parameter(key).detach().clone() for key in self.mixed}
        self.load_model(received, shard)
        if any(not torch.equal(own[key], received[key]) for key in self.mixed):
            self._learn(own, received, shard)
            load(self, self._mixture(own, received))

    def _mixture(self, own: Tensors, received: Tensors) -> dict[str, Tensor]:
        """Return own + (received − own)·W of the mixed layers; exact where W is 0 or 1."""
        return {key: torch.lerp(own[key], received[key], self.weights[_dotless(key)]) for key in self.mixed}

    def _learn(self, own: Tensors, received: Tensors, shard: Shard) -> None:
        """Take gradient steps on W."""
        count, losses = math.ceil(self.share * shard.num_examples), list[float]()
        batches = torch.randperm(shard.num_examples)[:count].split(self.training_settings.batch_size)
        settled = bool(self.settled)
        while not settled or not losses:
            loss = math.fsum(self._step(own, received, shard, rows) * len(rows) for rows in batches) / count
            losses.append(loss)
            spread = float(torch.tensor(losses[-WINDOW:]).std(correction=0))
            alike = len(losses) > WINDOW and spread < self.threshold
            settled = settled or alike or len(losses) == MAX_PASSES
        self.settled.fill_(True)

    def _step(self, own: Tensors, received: Tensors, shard: Shard, rows: Tensor) -> float:
        """Take one step on W and return the loss before it. ∇_W F = ∇_θ F · (received − own) at the mixture θ."""
        inputs, labels = shard.train.batch(rows)
        start = {key: value.requires_grad_() for key, value in self._mixture(own, received).items()}
        with evaluating(self.net), self.autocast():
            values = {key.removeprefix("net."): value for key, value in start.items()}
            loss = self.task_loss(functional_call(self.net, values, (inputs,)), labels)
        for key, slope in zip(start, torch.autograd.grad(loss, list(start.values())), strict=True):
            self.weights[_dotless(key)].sub_(self.eta * slope * (received[key] - own[key])).clamp_(0, 1)
        return float(loss.detach())


def _dotless(key: str) -> str:
    """Return a key without dots, as ParameterDict requires."""
    return key.replace(".", "/")
