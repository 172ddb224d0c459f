"""L2GD: a random mixture of local steps and steps towards the mean."""

from copy import deepcopy

import torch
from torch import Tensor

from lightning_modules.anchor import Anchor
from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative
from pflsim.data.federated import Shard
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink
from pflsim.params import load
from pflsim.seeding import coin


class L2GD(ClientModule):
    """Minimises 1/n Σ f_i(x_i) + λ/(2n) Σ ‖x_i − x̄‖² by loopless local descent (Hanzely & Richtárik 2020, Algorithm 1).

    One coin, common to all clients, decides each round. With probability 1 − p it is a local round,
    x_i ← x_i − η/(1 − p)·∇f_i(x_i). With probability p it is an aggregation round, x_i ← x_i − ηλ/p·(x_i − x̄). η = α/n
    is the run's learning rate, where α is the paper's. Reported model: x_i.

    x̄ is the mean of the models after the last local round; consecutive aggregation rounds do not change it. Clients
    therefore send models only after a local round that an aggregation round follows, and receive x̄ in the next round.

    Args:
        net: body and head.
        training: the run's local training settings; with local_steps=1 a local round is the paper's local step.
        p: probability of an aggregation round, in [0, 1), also used by the server; 0 is Local.
        lam: λ ≥ 0, with lr·λ/p ≤ 1 in all rounds.

    Raises:
        SettingsError: an aggregation step would overshoot the mean.

    Notes:
        - Weight decay is part of f_i. With S steps per local round, λ acts as λ/S.
        - All models start equal, so aggregation rounds before the first local round change nothing.
        - Aggregated running statistics move towards their mean like parameters.
    """

    lockstep = True
    met: Tensor

    def __init__(self, net: Net, training: Training, *, p: float, lam: NonNegative = 1.0):
        super().__init__(net, training)
        training.require_sgd("l2gd")
        self.p, self.lam = p, lam
        self.mean = deepcopy(net).requires_grad_(False)
        self.register_buffer("met", torch.tensor(False))  # whether a mean has been received
        self.newcomer = Anchor()  # not empty while a newcomer joins
        self.local = Phase(lr=training.lr / (1 - self.p))
        lr = training.lr
        if self.p and lr * self.lam / self.p > 1:
            step = f"an aggregation step covers lr*lam/p = {lr * self.lam / self.p:.4g} of the distance to the mean"
            advice = f"with lr={lr:.4g} set method.lam to at most p/lr = {self.p / lr:.4g}"
            raise SettingsError(f"method.lam={self.lam} with method.p={self.p}: {step} and overshoots it; {advice}")

    def aggregates(self, round_number: int) -> bool:
        """Return whether a round is an aggregation round; never for a newcomer, which always trains."""
        return not self.newcomer.tensors and coin(self.training_settings.seed, round_number, self.p)

    def aggregation_step(self) -> float:
        """Return ηλ/p of this round."""
        return self.learning_rate(Phase()) * self.lam / self.p if self.p else 0.0

    def schedule(self) -> Schedule:
        """Return one phase at the rate η/(1 − p) in a local round, no phase in an aggregation round."""
        return () if self.aggregates(self.round_number) else (self.local,)

    def kept_phases(self) -> list[Phase]:
        """Return the phase of local rounds, in aggregation rounds too."""
        return [self.local]

    def receive(self, downlink: Message) -> None:
        """Store x̄ if the message has it."""
        load(self.mean, {key.removeprefix("net."): value for key, value in downlink.weights.items()})
        self.met.logical_or_(torch.tensor(bool(downlink.weights)))

    def replaces_body(self, downlink: Message) -> bool:
        """Return True for newcomers only; others store x̄ beside the net."""
        return bool(self.newcomer.tensors) and super().replaces_body(downlink)

    def join(self, downlink: Message) -> None:
        """Initialise a newcomer with x̄."""
        self.receive(downlink)
        load(self, downlink.weights)
        self.newcomer.store({"met": self.met})

    def reply(self, shard: Shard) -> Uplink:
        """Take the step of an aggregation round; return the model if an aggregation round follows a local one."""
        now, next_round = self.aggregates(self.round_number), self.aggregates(self.round_number + 1)
        if now and self.met:
            self._aggregate(shard)
        sent = self.shared_tensors() if next_round and not now else {}
        return Uplink(weights=sent, client=shard.client, num_examples=shard.num_examples)

    @torch.no_grad()
    def _aggregate(self, shard: Shard) -> None:
        """Set x_i ← x_i − ηλ/p·(x_i − x̄)."""
        state, mean = self.net.state_dict(keep_vars=True), self.mean.state_dict(keep_vars=True)
        for key in self.shared_parameters() + self.shared_buffers():
            name = key.removeprefix("net.")
            state[name].lerp_(mean[name], self.aggregation_step())
        self.recalibrate(shard.train)
