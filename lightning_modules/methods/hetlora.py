"""HetLoRA and FlexLoRA: low-rank adapters whose rank depends on the client."""

from dataclasses import replace

import torch

from lightning_modules.anchor import Anchor
from lightning_modules.base import ClientModule
from lightning_modules.nets.adjust import adapter_matrices
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.fusion.adapters import rank_axis
from pflsim.messages import Message, Uplink
from pflsim.params import padded


class HetLoRA(ClientModule):
    """Trains A and B of y = W₀x + α/r·B(Ax) and the head, with the client's rank r_i ≤ r (Cho et al., EMNLP 2024).

    All modules have matrices of the rank r of the model. A client has the first r_i rows of A and columns of B, which
    it receives, trains and sends; the others are 0 and stay so. α/r is the same for all. Reported model: as received.

    Args:
        net: body and head; the body has adapters.
        training: the run's local training settings.

    Raises:
        SettingsError: the model has no adapters.
    """

    lockstep = True
    token_targets = True
    private_steps = True
    reported_phase = "received"

    def __init__(self, net: Net, training: Training):
        super().__init__(net, training)
        adapter_matrices(self, "A")  # or refuses the model
        self.active = Anchor()

    def schedule(self) -> Schedule:
        """Return one phase, which trains the client's rows and columns."""
        return (Phase(mask="active"),)

    def receive(self, downlink: Message) -> None:
        """Load the model, with zeros beyond the client's rank, which is that of the received matrices."""
        weights, masks = dict(downlink.weights), {}
        for name, value in downlink.weights.items():
            if rank_axis(name) is not None:
                own = self.get_parameter(name)
                weights[name], masks[name] = padded(value, own), padded(torch.ones_like(value), own)
        super().receive(replace(downlink, weights=weights))
        self.active.store(masks)

    def reply(self, shard: Shard) -> Uplink:
        """Return the model, with the client's rows and columns."""
        sent = super().reply(shard)
        weights = dict(sent.weights)
        for name, mask in self.active.tensors.items():
            axis = rank_axis(name) or 0
            rank = int(mask.transpose(0, axis).flatten(1)[:, 0].sum())
            weights[name] = weights[name].narrow(axis, 0, rank).clone()
        return replace(sent, weights=weights)
