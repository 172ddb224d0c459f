"""L2GD."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.validate import chance, non_negative
from pflsim.data.federated import Shard
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink
from pflsim.params import load
from pflsim.seeding import coin


class L2GD(ClientModule):
    """Loopless local gradient descent on 1/n Σ f_i(x_i) + λ/(2n) Σ ‖x_i − x̄‖² (Hanzely & Richtárik 2020, Algorithm 1).

    A round is one throw of a coin that is common to all. With probability 1 − p it is a local round,
    x_i ← x_i − η/(1 − p)·∇f_i(x_i); with probability p an aggregation round, x_i ← x_i − ηλ/p·(x_i − x̄). η = α/n is the
    run's learning rate, α the paper's. Judged by x_i.

    x̄ is the mean of the models after the last local round before an aggregation; further aggregation rounds leave it as
    it is. So models go up only after a local round that an aggregation follows, and x̄ down only in the round after.

    Args:
        net: body and head.
        training: the run's local training settings; with local_steps=1 a local round is the paper's local step.
        p: probability of an aggregation round, in [0, 1), the same that the server has; 0 is Local.
        lam: λ ≥ 0, with lr·λ/p ≤ 1 in all rounds.

    Raises:
        SettingsError: an aggregation step would overshoot the mean.

    Notes:
        Weight decay belongs to f_i. With S steps in a local round, λ counts as λ/S.
        All models start equal, so that aggregation rounds before the first local one change nothing.
        Running statistics that are aggregated move towards their mean as the parameters do.
    """

    lockstep = True
    met: Tensor

    def __init__(self, net: Net, training: Training, *, p: float, lam: float = 1.0):
        super().__init__(net, training)
        self.p, self.lam = chance("method.p", p), non_negative("method.lam", lam)
        self.mean = deepcopy(net).requires_grad_(False)
        self.register_buffer("met", torch.tensor(False))  # whether a mean has been received
        self.joins = False
        self._check_aggregation_step()

    def aggregates(self, round_number: int) -> bool:
        """Whether the coin makes it an aggregation round; a newcomer trains whatever the coin says."""
        return not self.joins and coin(self.training_settings.seed, round_number, self.p)

    def aggregation_step(self) -> float:
        """ηλ/p in this round."""
        settings = self.training_settings
        lr = settings.lr * settings.lr_decay ** (self.round_number - 1)
        return lr * self.lam / self.p if self.p else 0.0

    def _check_aggregation_step(self) -> None:
        """Refuse settings under which ηλ/p exceeds 1 in any round."""
        settings = self.training_settings
        lr = settings.highest_lr
        if self.p and lr * self.lam / self.p > 1:
            decay = f", which lr_decay={settings.lr_decay} makes of it by round {settings.last_round},"
            raise SettingsError(
                f"method.lam={self.lam} with method.p={self.p}: an aggregation step goes lr*lam/p = "
                f"{lr * self.lam / self.p:.4g} of the way to the mean and overshoots it; at lr={lr:.4g}"
                f"{decay if lr > settings.lr else ''} lam may be at most p/lr = {self.p / lr:.4g}"
            )

    def schedule(self) -> Schedule:
        """A local round trains, at the rate η/(1 − p); an aggregation round does not."""
        if self.aggregates(self.round_number):
            return ()
        return (Phase(lr=self.training_settings.lr / (1 - self.p)),)

    def receive(self, downlink: Message) -> None:
        """Keep x̄ for this and further aggregation rounds; most rounds bring nothing."""
        self.joins = False
        load(self.mean, {key.removeprefix("net."): value for key, value in downlink.weights.items()})
        self.met.logical_or_(torch.tensor(bool(downlink.weights)))

    def replaces_body(self, downlink: Message) -> bool:
        """Only a newcomer's net is replaced; the others keep x̄ beside it."""
        return self.joins and super().replaces_body(downlink)

    def join(self, downlink: Message) -> None:
        """A newcomer starts from x̄."""
        self.receive(downlink)
        load(self, downlink.weights)
        self.joins = True

    def reply(self, shard: Shard) -> Uplink:
        """The step towards x̄ in an aggregation round; the model, after a local round that an aggregation follows."""
        now, then = self.aggregates(self.round_number), self.aggregates(self.round_number + 1)
        if now and self.met:
            self._aggregate(shard)
        sent = self.shared_tensors() if then and not now else {}
        return Uplink(weights=sent, client=shard.client, num_examples=shard.num_examples)

    @torch.no_grad()
    def _aggregate(self, shard: Shard) -> None:
        """x_i ← x_i − ηλ/p·(x_i − x̄)."""
        own, mean = self.net.state_dict(keep_vars=True), self.mean.state_dict(keep_vars=True)
        for key in self.shared_parameters() + self.shared_buffers():
            name = key.removeprefix("net.")
            own[name].lerp_(mean[name], self.aggregation_step())
        if self.training_settings.buffers == "recalibrate":
            self.recalibrate(shard.train)
