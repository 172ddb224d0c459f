"""FedCAC: what is sensitive to a client's data is averaged over similar clients only."""

from dataclasses import replace

import torch

from lightning_modules.anchor import Anchor, Memory
from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.config.settings import Probability
from pflsim.data.federated import Shard
from pflsim.fusion.masks import sensitive, to_bits
from pflsim.messages import Message, Uplink
from pflsim.servers.fedcac import CUSTOMISED


class FedCAC(ClientModule):
    """Trains θ_i from M_i⊙u_i + (1 − M_i)⊙g, and marks in M_i what is sensitive (Wu et al., ICCV 2023).

    After training from θ to θ', the marks of each tensor are the ⌊τ·size⌋ entries with the largest |(θ' − θ)⊙θ'|. g is
    the mean of all clients, u_i that of clients whose marks overlap. Reported model: θ_i as received.

    Args:
        net: body and head.
        training: the run's local training settings.
        tau: τ, the share of marked entries of each tensor, in [0, 1]; with 0 the method is FedAvg.

    Notes:
        The sensitivity is taken at the point after training, as in the authors' program. A tensor that has not changed
        has no marks. A client that was not in the last round has no u_i and keeps its own marked entries. Running
        statistics stay on the clients.
    """

    lockstep = True
    reported_phase = "received"
    shares_statistics = False

    def __init__(self, net: Net, training: Training, *, tau: Probability = 0.5):
        super().__init__(net, training)
        self.tau = tau
        self.marks, self.received = Memory(self, self.shared_parameters()), Anchor(self.shared_parameters())

    def receive(self, downlink: Message) -> None:
        """Load the merged model; of g, if the client was not in the last round, what it has not marked."""
        weights = dict(downlink.weights)
        if CUSTOMISED not in downlink.numbers:
            for name, marks in self.marks.tensors.items():
                weights[name] = torch.where(marks != 0, self.get_parameter(name).detach(), weights[name])
        super().receive(replace(downlink, weights=weights))

    def reply(self, shard: Shard) -> Uplink:
        """Return θ_i and the new marks."""
        starts = self.received.tensors.items()
        marks = {name: sensitive(start, self.get_parameter(name).detach(), self.tau) for name, start in starts}
        self.marks.update(marks)
        return replace(super().reply(shard), extra={name: to_bits(mask) for name, mask in marks.items()})
