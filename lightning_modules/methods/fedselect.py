"""FedSelect: the entries of the parameters that move most become private, a few more at a time."""

from dataclasses import replace
from typing import Literal

import torch

from lightning_modules.anchor import Anchor, Memory
from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.phases import Alternate, Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.settings import Count, Probability
from pflsim.data.federated import Shard
from pflsim.fusion.masks import grown, to_bits
from pflsim.messages import Message, Uplink
from pflsim.params import Selector


class FedSelect(ClientModule):
    """Trains private and shared entries of θ in turn, and makes more of them private (Tamirisa et al., CVPR 2024).

    The mask m_i of private entries starts at 0. In every local epoch the entries with m_i = 1 train, then the others on
    the next pass; the first pass is left out while there are none. After the round, the entries of each weight whose
    |θ_i − reference| is largest become private. Reported model: θ_i as received, g where m_i = 0.

    Args:
        net: body and head.
        training: the run's local training settings; local_epochs is L.
        p: share of a weight's shared entries that become private at a time, in [0, 1].
        alpha: α, the largest share of private entries of a weight, in [0, 1]; with 0 the method is FedAvg with uniform
            weights.
        every: K, the mask grows after every K-th round.
        reference: "round", θ_i as received in the round; or "last_update", θ_i when the mask last grew, as in the
            authors' program.

    Notes:
        Weights are parameters with "weight" in their name, those of normalisation layers among them; biases are always
        shared. Running statistics stay on the clients. A client that does not train does not grow its mask.
    """

    lockstep = True
    reported_phase = "received"
    shares_statistics = False
    equal_start = Selector(("reference",))

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        p: Probability = 0.25,
        alpha: Probability = 0.8,
        every: Count = 1,
        reference: Literal["round", "last_update"] = "round",
    ):
        super().__init__(net, training)
        self.p, self.alpha, self.every = p, alpha, every
        self.weights = tuple(name for name in self.shared_parameters() if "weight" in name.rpartition(".")[2])
        self.private, self.common = Memory(self, self.weights), Anchor()
        self.reference = Anchor(self.weights) if reference == "round" else Memory(self, self.weights)
        if isinstance(self.reference, Memory):
            self.reference.update({name: self.get_parameter(name) for name in self.weights})

    def schedule(self) -> Schedule:
        """Return the phases `personal`, if there are private entries, and `shared`, which alternate by epoch."""
        private = any(bool(mask.any()) for mask in self.private.tensors.values())
        return (Alternate(tuple(self.kept_phases()[not private :]), every="epoch"),)

    def kept_phases(self) -> list[Phase]:
        """Return both phases."""
        return [Phase("personal", trainable=Selector(self.weights), mask="private"), Phase("shared", mask="common")]

    def receive(self, downlink: Message) -> None:
        """Load g where the entries are shared."""
        private, merged = self.private.tensors, dict(downlink.weights)
        for name, mask in private.items():
            merged[name] = torch.where(mask != 0, self.get_parameter(name).detach(), merged[name])
        super().receive(replace(downlink, weights=merged))
        self.common.store({name: 1 - mask for name, mask in private.items()})

    def reply(self, shard: Shard) -> Uplink:
        """Return the shared entries and the mask, and then let the mask grow."""
        sent, private = super().reply(shard), {name: mask.bool() for name, mask in self.private.tensors.items()}
        shared = {name: sent.weights[name][~mask.cpu()] for name, mask in private.items()}
        if self.round_number % self.every == 0:
            for name, before in self.reference.tensors.items():
                change = (self.get_parameter(name).detach() - before).abs()
                self.private.update({name: grown(private[name], change, self.p, self.alpha)})
            if isinstance(self.reference, Memory):
                self.reference.update({name: self.get_parameter(name) for name in self.weights})
        bits = {name: to_bits(mask) for name, mask in private.items()}
        return replace(sent, weights={**sent.weights, **shared}, extra=bits)
