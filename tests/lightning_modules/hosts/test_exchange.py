"""Clients of a stack that receive and reply at once end as those that do it one by one, to the bit."""

from typing import Any

import pytest
import torch
from support import inline, prepared, same, states
from torch import Tensor, nn

from lightning_modules.anchor import Anchor
from lightning_modules.hosts import client_host, exchange
from lightning_modules.methods.ditto import Ditto
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedprox import FedProx
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from pflsim.data.federated import Shard
from pflsim.engine.execution import TrainTask
from pflsim.messages import Uplink
from pflsim.types import Tensors


class Counting(FedAvg):
    """Counts its rounds in a private buffer, which decides the length of the next one; trains in even rounds only."""

    lockstep = True

    def __init__(self, net: Net, training: Any):
        super().__init__(net, training)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def schedule(self) -> Schedule:
        return () if self.round_number % 2 else (Phase(steps=1 + int(self.count)),)

    def reply(self, shard: Shard) -> Uplink:
        self.count.add_(1)
        with torch.no_grad():
            self.net.head.bias.mul_(0.9)
        return super().reply(shard)


class Halved(Anchor):
    def store_received(self, weights: Tensors) -> None:
        super().store_received({name: value / 2 for name, value in weights.items()})


class OwnAnchor(FedProx):
    def __init__(self, net: Net, training: Any):
        super().__init__(net, training, mu=1.0)
        self.received = Halved(self.shared_parameters())


class OnlyHead(FedAvg):
    def shared_parameters(self) -> tuple[str, ...]:
        return tuple(name for name in super().shared_parameters() if "head" in name)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 10)
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x.flatten(1)).relu()).relu()).relu())


@pytest.mark.parametrize(
    "chosen",
    [
        {"method": Counting},
        {"method": OwnAnchor},
        {"method": OnlyHead},
        {"method": "fedavg", "model": Tied},
        {"method": "local", "model": Tied},
        {"method": "fedrep"},
        {"method": Ditto, "init": "per_client"},
        {"method": "fedper", "fraction": 0.7},
    ],
    ids=str,
)
def test_equal_to_one_by_one(chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared("data=digits", "clients=6", "lockstep_clients=3", "local_steps=2", **chosen)
    found = []
    for alone in (False, True):
        if alone:
            for module in (exchange, client_host):
                monkeypatch.setattr(module, "unchanged", lambda *_: False)
        executor, uplinks = inline(made), list[dict[str, Tensor]]()
        for t, cohort in enumerate([range(6), range(6), [0, 2, 3, 5], range(6)], start=1):
            sent = executor.send(list(cohort))
            before = {client: _copied(sent.downlinks[client]) for client in cohort}
            trained = executor.run(TrainTask(t), sent)
            assert same(before, {client: _copied(sent.downlinks[client]) for client in cohort})
            executor.fuse(trained)
            uplinks += [dict(up.weights) for up in trained.uplinks[0]]
        found.append((states(executor), dict(enumerate(uplinks))))
    assert same(found[0][0], found[1][0]) and same(found[0][1], found[1][1])


def _copied(message: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in message.weights.items()}


def test_only_the_first_client_of_a_stack_receives_by_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = inline(prepared("data=digits", "clients=6", "lockstep_clients=3", "local_steps=1", method="ditto"))
    calls, receive = list[int](), client_host.ClientHost._receive
    monkeypatch.setattr(client_host.ClientHost, "_receive", lambda *given: calls.append(1) or receive(*given))
    executor.run(TrainTask(1), executor.send(range(6)))
    assert len(calls) == 2
