"""FedFomo: clients mix other clients' models by their gain on the own validation examples."""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
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
    """Sets θ_i ← θ_prev + Σ_n w_n·(θ_n − θ_prev) and trains it by plain SGD (Zhang et al. 2021, section 3).

    w_n = max(0, u_n)/Σ max(0, u) with u_n = (L_i(θ_prev) − L_i(θ_n))/‖θ_n − θ_prev‖₂. L_i is the mean cross-entropy on
    the client's validation examples. If no u_n is positive, the client keeps θ_prev. It sends the trained model and the
    u_n of all candidates. Reported model: personal, after local training.

    Args:
        net: body and head.
        training: the run's local training settings.
        baseline: θ_prev: the client's model before its last local training, with the trained model as a candidate
            ("previous", as in the authors' code), or the trained model ("own").

    Notes:
        - Without candidates (in round 1) the client keeps its model. A candidate whose u_n is not finite has weight 0.
        - Distances are over the parameters. With buffers=aggregate, running statistics are mixed with the same weights.
          With buffers=local, candidates are evaluated with the client's own statistics; with buffers=recalibrate, with
          statistics measured on its training examples.
        - Candidates move to the device one at a time, so memory there does not grow with their number.
    """

    lockstep = True
    needs_validation = True
    extra_on_cpu = True
    started: Tensor

    def __init__(self, net: Net, training: Training, *, baseline: Literal["previous", "own"] = "previous"):
        super().__init__(net, training)
        self.baseline = baseline
        # a ModuleDict, so that its keys are the shared keys
        self.previous = nn.ModuleDict({"net": deepcopy(net).requires_grad_(False)})
        self.register_buffer("started", torch.zeros((), dtype=torch.bool))
        self.usefulness = Anchor()
        self._candidates: Mapping[int, Tensors] = {}

    def receive(self, downlink: Message) -> None:
        """Store the candidates for `before_training`, which always follows."""
        self._candidates = candidates(downlink)

    def before_training(self, shard: Shard) -> None:
        """Mix the candidates into the model and store the result as the next θ_prev."""
        sent, self._candidates = self._candidates, {}
        if sent:
            self._mix(sent, shard)
        load(self.previous, self._shared_values())
        self.started.fill_(True)

    def reply(self, shard: Shard) -> Uplink:
        """Return the trained model, and u_n of each candidate n as the number `usefulness/<n>`."""
        stored = self.usefulness.tensors
        clients, values = (stored[name].tolist() if stored else [] for name in ("clients", "values"))
        numbers = {f"{USEFULNESS}{n}": u for n, u in zip(clients, values, strict=True)}
        return replace(super().reply(shard), numbers=numbers)

    def _mix(self, sent: Mapping[int, Tensors], shard: Shard) -> None:
        """Load θ_prev + Σ_n w_n·(θ_n − θ_prev)."""
        trained = {key: value.clone() for key, value in self._shared_values().items()}
        start = trained
        if self.baseline == "previous" and bool(self.started):
            previous = self.previous.state_dict()
            start = {key: previous[key].clone() for key in trained}
        loss = self._loss(start, shard)
        models = {-1: trained, **sent}  # -1: the client's own model
        found = {n: self._usefulness(start, loss, model, shard) for n, model in models.items()}
        values = torch.tensor([found[n] for n in sent], dtype=torch.float64)
        self.usefulness.store({"clients": torch.tensor([*sent]), "values": values})
        total = math.fsum(max(u, 0.0) for u in found.values())
        mixed = {key: value.double() for key, value in start.items()}
        for n, model in models.items():
            if found[n] > 0:
                for key, value in start.items():
                    other = model[key].to(value.device, torch.float64)
                    mixed[key].add_(other - value.double(), alpha=found[n] / total)
        self.load_model(mixed, shard)

    def _usefulness(self, start: Tensors, loss: float, model: Tensors, shard: Shard) -> float:
        """Return u_n of one candidate; 0 if it is not finite."""
        pairs = [(model[key].to(start[key].device), start[key]) for key in self.shared_parameters()]
        distance = math.sqrt(math.fsum(float((a.double() - b.double()).square().sum()) for a, b in pairs))
        gain = loss - self._loss(model, shard)
        return gain / distance if distance > 0 and math.isfinite(gain / distance) else 0.0

    def _loss(self, model: Tensors, shard: Shard) -> float:
        """Load a model and return its L_i."""
        self.load_model(model, shard)
        return mean_loss(self.net, shard.val, self.criterion)

    def _shared_values(self) -> Tensors:
        """Return the shared tensors without copying."""
        state = self.state_dict()
        return {key: state[key] for key in self.shared_parameters() + self.shared_buffers()}
