"""A client or a server rule that keeps values outside its state is refused, with the attribute's name."""

from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support import World, rounds, world
from torch import nn

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from pflsim.data.federated import Shard
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.errors import ClientError, ServerError
from pflsim.messages import Message
from pflsim.servers.fedavg import FedAvg


class Memory(nn.Module):
    """A submodule with plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []


class Leaky(ClientModule):
    """Keeps a value between clients in every way that Python has."""

    lockstep = True
    shared_by_all: ClassVar[dict[int, int]] = {}
    number: ClassVar[int] = 0
    mask: torch.Tensor

    def __init__(self, *given: Any, leak: str):
        super().__init__(*given)
        self.leak, self.count, self.by_client, self.memory = leak, 0, {-1: [0]}, Memory()
        self.rng, self.weights, self.plain = np.random.default_rng(0), np.zeros(3), torch.zeros(2)
        self.register_buffer("mask", torch.zeros(2), persistent=False)
        self.register_buffer("kept", torch.zeros(()))
        self.anchor, self.given, self.layers = Anchor(), None, [*self.net.parameters()]
        self.twice = lambda value: 2 * value

    def receive(self, downlink: Message) -> None:
        super().receive(downlink)
        if self.leak == "by_client":
            self.by_client[-1].append(1)
        if self.leak == "made":
            self.made = True
        if self.leak == "deleted":
            del self.count
        if self.leak == "none":
            self.given = downlink
            self.anchor.store({"net.head.bias": downlink.weights["net.head.bias"]})

    def before_training(self, shard: Shard) -> None:
        match self.leak:
            case "shared_by_all":
                self.shared_by_all[len(self.shared_by_all)] = 1
            case "memory.seen":
                self.memory.seen.append(shard.client)
            case "rng":
                self.rng.random()
            case "weights":
                self.weights[0] += 1
            case "plain":
                self.plain += 1
            case "net.note":
                self.net.note = shard.client
            case "net.body.fc1.note":
                self.net.body.fc1.note = shard.client
            case "number":
                type(self).number += 1
            case "mask":
                self.mask.add_(1)
            case "none":
                self.given = None
                self.get_buffer("kept").add_(1)

    def objective(self, batch: Batch) -> Terms:
        terms = super().objective(batch)
        if self.leak == "count":
            self.count += 1
        return terms

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.leak == "predict":
            self.count += 1
        return super().predict(inputs)


def made(leak: str, **factory: Any) -> World:
    return world(lambda *given: Leaky(*given, leak=leak), FedAvg(), **factory)


KINDS = (
    "count by_client made deleted shared_by_all memory.seen rng weights plain mask number net.note net.body.fc1.note"
)
STACK = ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("leak", "stacks"), [*((leak, ()) for leak in KINDS.split()), *((leak, STACK) for leak in ("count", "mask", "rng"))]
)
def test_refused_with_its_name(leak: str, stacks: tuple[tuple[int, ...], ...]) -> None:
    executor = made(leak, stacks=stacks).inline()
    name = "count" if leak == "deleted" else leak
    with pytest.raises(ClientError, match=rf"self\.{name} changed") as caught:
        executor.run(TrainTask(1), executor.send(range(4)))
    assert caught.value.client == 0 and caught.value.round_number == 1


def test_refused_in_evaluation() -> None:
    """Although a host that has trained does not check that again."""
    executor = made("predict").inline()
    rounds(executor, 1, 4)
    with pytest.raises(ClientError, match=r"self\.count changed"):
        executor.evaluate(EvalRequest("personal", "trained", (0,), ("test",)))


@pytest.mark.parametrize("stacks", [(), STACK])
def test_states_anchors_and_values_that_are_reset_are_allowed(stacks: tuple[tuple[int, ...], ...]) -> None:
    rounds(made("none", stacks=stacks).inline(), 2, 4)


@pytest.mark.parametrize(("client", "number", "stacks"), [(0, 2, ()), (0, 2, STACK), (1, 1, ())])
def test_later_groups_and_rounds_are_checked_on_request(client: int, number: int, stacks: Any) -> None:
    class Late(ClientModule):
        lockstep, count = True, 0

        def before_training(self, shard: Shard) -> None:
            self.count += (shard.client, self.round_number) == (client, number)

    for always in (False, True):
        executor = world(Late, FedAvg(), stacks=stacks).inline()
        executor.host.always_check = always
        with pytest.raises(ClientError, match=r"self\.count changed") if always else nullcontext():
            rounds(executor, 2, 4)


class Counting(FedAvg):
    """Counts its rounds outside the state."""

    def __init__(self) -> None:
        self.fused = 0

    def fuse(self, state: Any, uplinks: Any) -> Any:
        self.fused += 1
        return super().fuse(state, uplinks)


def test_a_server_rule_is_refused_too() -> None:
    with pytest.raises(ServerError, match=r"self\.fused changed"):
        rounds(world(ClientModule, Counting()).inline(), 1, 4)


def test_a_leak_ends_the_run_without_a_retry(caplog: pytest.LogCaptureFixture) -> None:
    """A retry would find the changed value and succeed, as in lockstep, whose traced step is not traced again."""
    own = made("count", stacks=STACK)
    executor = own.inline()
    with pytest.raises(ClientError, match=r"self\.count changed"):
        executor.run(TrainTask(1), executor.send(range(4)))
    assert "retry" not in caplog.text
