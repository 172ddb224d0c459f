"""FedFomo: clients weigh other clients' models by what these do for them on their validation examples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_modules.anchor import Anchor
from lightning_modules.base import ClientModule
from lightning_modules.losses import mean_loss
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.params import load
from pflsim.servers.fedfomo import USEFULNESS, candidates
from pflsim.types import Tensors


class FedFomo(ClientModule):
    """θ_i ← θ_prev + Σ_n w_n·(θ_n − θ_prev), then plain SGD (Zhang et al. 2021, section 3).

    w_n = max(0, u_n)/Σ max(0, u), u_n = (L_i(θ_prev) − L_i(θ_n))/‖θ_n − θ_prev‖₂, L_i the mean cross-entropy on the
    client's own validation examples; with no u_n above 0 the client keeps θ_prev. The u_n of the candidates go to the
    server, with the trained model. Judged after local training.

    Args:
        net: body and head.
        training: the run's local training settings.
        baseline: what θ_prev is: the client's model before its last local training, with the trained one among the
            candidates ("previous", as in the authors' code), or the trained one ("own").

    Notes:
        Without candidates (in round 1) the client keeps its model. A candidate whose u_n is not finite has weight 0.
        Distances are over the parameters. Running statistics are mixed with the same weights where they travel
        (buffers=aggregate); with buffers=local candidates are judged with the client's own, with buffers=recalibrate
        with those measured on its training examples.
        Candidates are brought to the device one at a time; what exists there at once is a fixed number of models.
    """

    lockstep = True
    needs_validation = True
    extra_on_cpu = True
    started: Tensor

    def __init__(self, net: Net, training: Training, *, baseline: Literal["previous", "own"] = "previous"):
        super().__init__(net, training)
        self.baseline = baseline
        self.previous = nn.ModuleDict({"net": deepcopy(net).requires_grad_(False)})  # with the names of the shared keys
        self.register_buffer("started", torch.zeros((), dtype=torch.bool))
        self.usefulness = Anchor()
        self._candidates: Mapping[int, Tensors] = {}

    def receive(self, downlink: Message) -> None:
        """Hold the candidates until `adopt`, which always follows."""
        self._candidates = candidates(downlink)

    def before_training(self, shard: Shard) -> None:
        """Weigh the candidates and move towards those that help; then remember where local training begins."""
        sent, self._candidates = self._candidates, {}
        if sent:
            self._federate(sent, shard)
        load(self.previous, self._own())
        self.started.fill_(True)

    def reply(self, shard: Shard) -> Uplink:
        """The trained model, and u_n of every candidate n as `usefulness/<n>`."""
        held = dict(self.usefulness.named_buffers())
        clients, values = (held[name].tolist() if held else [] for name in ("clients", "values"))
        numbers = {f"{USEFULNESS}{n}": u for n, u in zip(clients, values, strict=True)}
        weights = self.shared_tensors()
        return Uplink(weights=weights, numbers=numbers, client=shard.client, num_examples=shard.num_examples)

    def _federate(self, sent: Mapping[int, Tensors], shard: Shard) -> None:
        trained = {key: value.clone() for key, value in self._own().items()}
        start = trained
        if self.baseline == "previous" and bool(self.started):
            held = self.previous.state_dict()
            start = {key: held[key].clone() for key in trained}
        loss = self._loss(start, shard)
        models = {-1: trained, **sent}  # -1: the client's own, which costs nothing to send
        found = {n: self._usefulness(start, loss, model, shard) for n, model in models.items()}
        values = torch.tensor([found[n] for n in sent], dtype=torch.float64)
        self.usefulness.hold({"clients": torch.tensor([*sent]), "values": values})
        total = math.fsum(max(u, 0.0) for u in found.values())
        mixed = {key: value.double() for key, value in start.items()}
        for n, model in models.items():
            if found[n] > 0:
                for key, value in start.items():
                    other = model[key].to(value.device, torch.float64)
                    mixed[key].add_(other - value.double(), alpha=found[n] / total)
        self._wear(mixed, shard)

    def _usefulness(self, start: Tensors, loss: float, model: Tensors, shard: Shard) -> float:
        """u_n of one candidate; 0 where it is not a finite number."""
        pairs = [(model[key].to(start[key].device), start[key]) for key in self.shared_parameters()]
        distance = math.sqrt(math.fsum(float((a.double() - b.double()).square().sum()) for a, b in pairs))
        gain = loss - self._loss(model, shard)
        return gain / distance if distance > 0 and math.isfinite(gain / distance) else 0.0

    def _loss(self, model: Tensors, shard: Shard) -> float:
        """L_i of a model, which the net then holds."""
        self._wear(model, shard)
        return mean_loss(self.net, shard.val)

    def _wear(self, model: Tensors, shard: Shard) -> None:
        """Put values into the net."""
        load(self, model)
        if self.training_settings.buffers == "recalibrate":
            self.recalibrate(shard.train)

    def _own(self) -> Tensors:
        """The net's shared tensors themselves."""
        own = self.state_dict()
        return {key: own[key] for key in self.shared_parameters() + self.shared_buffers()}
