"""Floco: heads on a simplex of weights, whose corners all clients train together."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.loop import train_phase
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative, Width
from pflsim.data.federated import Shard
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink
from pflsim.params import snapshot
from pflsim.servers.floco import ALPHA, UPDATE


class Floco(ClientModule):
    """Trains a body and M weights of the head, whose mixtures W(α) = Σ_m α_m·W_m classify (Grinwald et al. 2024).

    α is a point of the simplex, and each mini-batch draws another one: in the first τ rounds anywhere, later near the
    client's own α_i, which the server sends. All parameters are shared. Reported model: W(α_i) on the received body,
    with α_i = 1/M before the server sends one. The α of the global model is 1/M.

    Args:
        net: body and head; the head is a linear layer.
        training: the run's local training settings.
        endpoints: M.
        rho: ρ ≥ 0, largest L1 distance of a drawn α from α_i.
        sampling: draw a random point of the simplex and move from α_i towards it, by at most ρ·u with u uniform in
            [0, 1) ("simplex"), or move by ρ·u in a random direction, out of the simplex too, as the authors' program
            does ("raw_l1").

    Raises:
        SettingsError: the head is no linear layer, or its weight is frozen or a parameter of the body too.

    Notes:
        Points of "simplex" are not uniform in the region. The paper draws from the part of the L1 ball that is in the
        simplex. The head's initial weight is not used; all W_m are drawn by Xavier's normal rule. The bias is common.
    """

    reported_phase = "received"
    alpha: Tensor

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        endpoints: Width = 10,
        rho: NonNegative = 0.1,
        sampling: Literal["simplex", "raw_l1"] = "simplex",
    ):
        if {*net.head.parameters()} & {*net.body.parameters()}:
            raise SettingsError("method=floco needs a head of its own, and this one shares a parameter with the body")
        net.head = SimplexHead(net.head, endpoints)
        super().__init__(net, training)
        self.rho, self.sampling = rho, sampling
        self.region = Anchor()
        self.register_buffer("alpha", torch.full((endpoints,), 1 / endpoints))

    def receive(self, downlink: Message) -> None:
        """Load the global model, and α_i if the message has it."""
        super().receive(downlink)
        if ALPHA in downlink.extra:
            self.alpha.copy_(downlink.extra[ALPHA])
            self.region.store({ALPHA: self.alpha})

    def objective(self, batch: Batch) -> Terms:
        """Return the loss at a random α."""
        inputs, targets = batch
        return {self.loss_name: self.task_loss(self.net.head(self.net.body(inputs), self.draw()), targets)}

    def draw(self) -> Tensor:
        """Return a random α [M]; numbers are drawn on the CPU, so that they are the same on a GPU."""
        point = -torch.log1p(-torch.rand(len(self.alpha))).to(self.alpha)  # exponentially distributed
        point = point / point.sum()
        if not self.region.tensors:
            return point
        centre, step = self.region.tensors[ALPHA], self.rho * torch.rand(()).to(self.alpha)
        if self.sampling == "raw_l1":
            direction = 2 * torch.rand(len(self.alpha)).to(self.alpha) - 1
            return centre + step * direction / direction.abs().sum()
        return centre + (step / (point - centre).abs().sum()).clamp(max=1) * (point - centre)

    def survey(self, shard: Shard) -> Uplink:
        """Return the endpoints before minus after local training."""
        endpoints = self.get_parameter("net.head.endpoints")
        start = endpoints.detach().clone()
        train_phase(self, Phase(), shard.train)
        sent = snapshot({UPDATE: start - endpoints})
        return Uplink(extra=sent, client=shard.client, num_examples=shard.num_examples)

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the scores of W(α_i)."""
        return self.net.head(self.net.body(inputs), self.alpha)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return the scores of the mean of the endpoints."""
        return self.net(inputs)


class SimplexHead(nn.Module):
    """A linear layer with the weight Σ_m α_m·W_m.

    Args:
        head: gives shapes and bias.
        count: M.
    """

    def __init__(self, head: nn.Module, count: int):
        super().__init__()
        if not (isinstance(head, nn.Linear) and "weight" in head._parameters):  # it may be frozen
            found = type(head).__name__
            raise SettingsError(f"method=floco needs one nn.Linear that is not frozen as head; found: {found}")
        drawn = [nn.init.xavier_normal_(torch.empty_like(head.weight)) for _ in range(count)]
        self.endpoints = nn.Parameter(torch.stack(drawn))  # [M, C, D]
        self.bias = head.bias

    def forward(self, features: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Map features [B, D] to scores [B, C] at α [M]; by default 1/M."""
        if alpha is None:
            alpha = self.endpoints.new_full(self.endpoints.shape[:1], 1 / len(self.endpoints))
        return linear(features, (alpha[:, None, None] * self.endpoints).sum(0), self.bias)
