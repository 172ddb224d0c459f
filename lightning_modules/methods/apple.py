"""APPLE: each client learns with which weights it adds up the models of all clients."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.settings import Probability
from pflsim.config.validate import NonNegative, stable_penalty
from pflsim.data.federated import Shard
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink, unpacked
from pflsim.params import NET, Selector, load
from pflsim.servers.apple import CORE, START


class APPLE(ClientModule):
    """Minimises CE(Σ_j p_ij·w_j) + c_t·‖p_i − p_0‖² over the own core model w_i and p_i (Luo and Wu, IJCAI 2022).

    The core models w_j of the other clients are constant, p_0j = n_j/n, and with t = 0 for round 1 of R rounds,
    c_t = μ·10^(−3t/T), or μ·(1 + cos(πt/T))/2, for t < T = ⌊L·R⌋, then 0. The client sends w_i and keeps p_i. Reported
    model: Σ_j p_ij·w_j with the new w_i, after local training.

    Args:
        net: holds the sum; its initial values are those of all core models.
        training: the run's local training settings.
        p_lr: learning rate of p_i in round 1; it follows `lr_schedule`. 0: p_i stays p_0.
        mu: μ ≥ 0, with p_lr·2μ ≤ 2.
        pull_rounds: L in [0, 1].
        decay: of c_t.

    Raises:
        SettingsError: the run's optimiser is not SGD, or has weight decay, which would draw p_i to 0.

    Notes:
        - p_i may become negative and need not sum to 1. It starts as p_0 in the client's first round.
        - Running statistics start each round as the mean of those of the core models, weighted by p_0; weights below 0
          could make a variance negative. The client sends those that it has after training.
        - A newcomer has no core model and trains p_i alone.
    """

    shared = Selector(("core",))
    equal_start = NET
    known: Tensor

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        p_lr: NonNegative = 0.001,
        mu: NonNegative = 0.1,
        pull_rounds: Probability = 0.1,
        decay: Literal["exponential", "cosine"] = "exponential",
    ):
        super().__init__(net, training)
        training.require_sgd("apple")
        if training.weight_decay:
            raise SettingsError(f"weight_decay={training.weight_decay:g}: it would draw p of apple to 0; leave it out")
        stable_penalty("2*method.mu", 2 * mu, p_lr, training.momentum, "method.p_lr")
        self.p_lr, self.mu, self.decay = p_lr, mu, decay
        self.pull_end = math.floor(pull_rounds * training.rounds + 1e-9)  # 0.29·100 is 28.999999999999996
        self.core = deepcopy(net)
        self.p = nn.Parameter(torch.zeros(training.clients))
        self.register_buffer("known", torch.zeros((), dtype=torch.bool))
        self.received, self._message = Anchor(), Message()

    def decided_by_rounds(self) -> object:
        """Return the last round, from 0, before which there is a pull; None without one."""
        return self.pull_end if self.mu else None

    def schedule(self) -> Schedule:
        """Return one phase that trains w_i and p_i."""
        return (Phase(trainable=Selector(("core", "p"))),)

    def rate_factors(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Return the factor of p's learning rate; `parts` is empty."""
        return {"p": self.p_lr / self.training_settings.lr}

    def receive(self, downlink: Message) -> None:
        """Store the message for `before_training`, which always follows and knows which core model is the own one."""
        self._message = downlink

    def before_training(self, shard: Shard) -> None:
        """Store the others' core models as stacks [N, *shape] and p_0, and load the sum."""
        message, self._message = self._message, Message()
        cores, own = unpacked(message, CORE), torch.zeros_like(self.p)
        start = nn.functional.pad(message.extra[START], (0, len(own) - len(cores)))  # 0 for newcomers
        stacks = {key: torch.stack([core[key] for core in cores.values()]) for key in cores[0]}
        statistics = {_in_net(key): _weighted(start, stacks.pop(key)) for key in self.shared_buffers()}
        if shard.client in cores:
            own[shard.client] = 1
            for stack in stacks.values():
                stack[shard.client] = 0
        self.received.store({"p_0": start, "own": own, **stacks})
        load(self, {"p": torch.where(self.known, self.p, start)})
        self.known.fill_(True)
        self.load_model({**statistics, **self.mixture()}, shard)

    def mixture(self) -> dict[str, Tensor]:
        """Return Σ_j p_ij·w_j by the names of the net's parameters."""
        stored = self.received.tensors
        own, mixed = (self.p * stored["own"]).sum(), dict[str, Tensor]()
        for key in self.shared_parameters():
            mixed[_in_net(key)] = _weighted(self.p, stored[key]) + own * self.get_parameter(key)
        return mixed

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of the sum, and the pull of p_i towards p_0."""
        inputs, labels = batch
        values = {key.removeprefix("net."): value for key, value in self.mixture().items()}
        terms = {self.loss_name: self.task_loss(functional_call(self.net, values, (inputs,)), labels)}
        if pull := self.pull():
            terms["pull"] = pull * (self.p - self.received.tensors["p_0"]).square().sum()
        return terms

    def pull(self) -> float:
        """Return c_t."""
        done = (self.round_number - 1) / self.pull_end if self.pull_end else 1
        if done >= 1:
            return 0.0
        return self.mu * (1e-3**done if self.decay == "exponential" else (1 + math.cos(math.pi * done)) / 2)

    def reply(self, shard: Shard) -> Uplink:
        """Load the sum, and return w_i with the net's running statistics."""
        state = self.state_dict()
        load(self, {key: state[_in_net(key)] for key in self.shared.buffers(self)} | self.mixture())
        return super().reply(shard)


def _in_net(key: str) -> str:
    """Return the net's name of a tensor of `core`."""
    return "net." + key.removeprefix("core.")


def _weighted(weights: Tensor, stack: Tensor) -> Tensor:
    """Return Σ_j weights_j·stack_j; not as a matrix product, which `precision` would shorten."""
    return (weights[: len(stack)].view(-1, *[1] * (stack.dim() - 1)) * stack).sum(0)
