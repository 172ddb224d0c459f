"""A host of clients as a plain object: nothing passes from one client to another, and evaluation changes nothing."""

import pickle
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import ALL, World, same, world
from torch import Tensor, nn

from lightning_modules.base import Batch, Terms
from lightning_modules.hosts import devices
from lightning_modules.hosts.client_host import ClientHost, Reply
from lightning_modules.hosts.server_host import ServerHost
from lightning_modules.methods.fedavg import FedAvg as FedAvgClient
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.data.federated import Shard, shard
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.errors import ClientError
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.params import BODY, HEAD, snapshot
from pflsim.servers.fedavg import FedAvg
from pflsim.types import Tensors

PERSONAL = EvalRequest("personal", "trained", ALL, ("test", "val"))
GLOBAL = EvalRequest("global", "received", ALL, ("test",))


class Split(FedAvgClient):
    """Shares its body only."""

    shared = BODY


def normed(input_shape: tuple[int, ...], classes: int) -> Net:
    """Batch normalisation right on the pixels, and after dropout."""
    body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 4), nn.Dropout(0.2), nn.BatchNorm1d(4))
    return Net(body, nn.Linear(4, classes), (4,), classes)


MEAN, VAR, COUNTER = (f"net.body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked"))


def make(client: Any = FedAvgClient, **settings: Any) -> World:
    training = Training(lr=0.1, batch_size=5)  # no last batch of one, which batch normalisation refuses
    return world(client, FedAvg(), **{"model": normed, "seed": 3, "training": training, **settings})


def host(made: World, clients: Sequence[int] = ALL) -> ClientHost:
    return ClientHost(made.factory, made.dataset, made.partition, clients)


def run(on: ClientHost, round_number: int, clients: Sequence[int], down: Message) -> list[Reply]:
    """Train with one message for all, and keep the new states."""
    replies = on.run(TrainTask(round_number), dict.fromkeys(clients, down))
    on.states.update({client: reply.state for client, reply in replies.items()})
    return list(replies.values())


def evaluate(on: ClientHost, request: EvalRequest, clients: Sequence[int] = ALL, down: Message | None = None) -> Any:
    return [row for rows in on.run(request, dict.fromkeys(clients, down)).values() for row in rows]


def private_states(on: ClientHost) -> dict[int, Tensors]:
    return {client: on.states[client] for client in on.clients}


def train(on: ClientHost, made: World, clients: Sequence[int], rounds: int = 2, **weights: Tensor) -> list[Uplink]:
    """Rounds in which all clients are sent the initial values; the last round's uplinks."""
    down = Message(weights={**made.federation.initial, **weights})
    ups: list[Uplink] = []
    for t in range(1, rounds + 1):
        ups = [reply.uplink for reply in run(on, t, clients, down) if reply.uplink is not None]
    return ups


def copy(states: dict[int, Tensors]) -> dict[int, dict[str, Tensor]]:
    return {client: snapshot(state) for client, state in states.items()}


class Attentive(FedAvgClient):
    """Puts its class counts into the head's bias when it receives; doubles all before it is evaluated."""

    def before_training(self, shard: Shard) -> None:
        self.net.head.bias.data.copy_(torch.bincount(shard.train.y, minlength=3))

    def before_evaluation(self, shard: Shard) -> None:
        assert len(shard.train) and self.net.head.bias.requires_grad
        for parameter in self.parameters():
            parameter.data.mul_(2)


def test_what_was_received_meets_the_data_and_a_copy_is_adapted() -> None:
    made = make(Attentive, training=Training(lr=0.0, batch_size=5))
    home = host(made)
    train(home, made, ALL, rounds=1)
    before = copy(private_states(home))
    for client in ALL:
        counts = torch.bincount(torch.from_numpy(made.dataset.y[made.partition.train[client]]), minlength=3)
        assert torch.equal(before[client]["net.head.bias"], counts.float())
    plain, doubled = host(make(training=Training(lr=0.0, batch_size=5))), [snapshot(s) for s in before.values()]
    for client, state in enumerate(doubled):
        plain.states[client] = {k: v * 2 if k in dict(home.module.named_parameters()) else v for k, v in state.items()}
    for one, other in zip(evaluate(home, PERSONAL), evaluate(plain, PERSONAL), strict=True):
        assert one == replace(other, loss=pytest.approx(other.loss))  # alone, and together with others
    assert same(before, copy(private_states(home)))


class Twofold(FedAvgClient):
    """Evaluated by another model than the one that the server has."""

    def __init__(self, net: Net, training: Training):
        super().__init__(net, training)
        self.other = deepcopy(net)

    def predict(self, inputs: Tensor) -> Tensor:
        return self.other(inputs)

    def predict_global(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


def test_the_global_model_may_be_another_than_the_evaluated_one() -> None:
    """And only the net, which is what was received, is recalibrated."""
    made = make(Twofold, training=Training(lr=0.1, batch_size=5, buffers="recalibrate"))
    plain = make(training=Training(lr=0.1, batch_size=5, buffers="recalibrate"))
    down = Message(weights={k: v + 0.1 for k, v in made.federation.initial.items()})
    home, other = host(made), host(plain)
    assert evaluate(home, GLOBAL, (1,), down) == evaluate(other, GLOBAL, (1,), down)
    state = home.module.state_dict()
    assert state["other." + MEAN.removeprefix("net.")].abs().max() == 0 < state[MEAN].abs().max()
    request = EvalRequest("personal", "trained", ALL, ("test",))
    assert evaluate(home, request, (1,)) == evaluate(other, request, (1,))


class Dated(FedAvgClient):
    """Evaluated by a model that depends on the round."""

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(inputs) * self.round_number


def test_the_round_of_an_evaluation_is_not_the_last_one_trained() -> None:
    """A host whose clients sat a round out evaluates as one whose clients did not."""
    made = make(Dated)
    request = EvalRequest("personal", "trained", (0,), ("test",), 7)
    idle, busy = host(made), host(made)
    run(busy, 7, [1], Message(weights=made.federation.initial))
    assert evaluate(idle, request, (0,)) == evaluate(busy, request, (0,))
    assert evaluate(idle, request, (0,))[0].loss != evaluate(idle, PERSONAL, (0,))[0].loss


# Running statistics


def buffers_after(setting: Any) -> tuple[World, Uplink, Tensors]:
    """One round of a client that is sent strange statistics."""
    made = make(training=Training(lr=0.1, batch_size=6, buffers=setting))
    home = host(made)
    sent = {MEAN: torch.full((16,), 10.0)} if setting == "aggregate" else {}
    (up,) = train(home, made, [2], 1, **sent)
    return made, up, private_states(home)[2]


def test_statistics_that_are_aggregated_travel_both_ways() -> None:
    made, up, state = buffers_after("aggregate")
    assert {MEAN, VAR} <= set(up.weights) and COUNTER not in up.weights
    assert up.weights[MEAN].min() > 10 * 0.9**4 - 1e-4  # four batches of momentum 0.1 away from what was sent
    assert torch.equal(up.weights[MEAN], state[MEAN]) and state[COUNTER] == 4


@pytest.mark.parametrize("setting", ["local", "recalibrate"])
def test_statistics_that_are_not_aggregated_do_not_travel(setting: Any) -> None:
    made, up, state = buffers_after(setting)
    assert not {MEAN, VAR, COUNTER} & (set(up.weights) | set(made.federation.initial))
    x, _ = shard(made.dataset, made.partition, 2).train.batch(slice(None))
    distance = float((state[MEAN] - x.flatten(1).mean(0)).norm() / x.flatten(1).mean(0).norm())
    # local: the data's mean is approached from 0 by momentum; recalibrated: it starts from there
    assert distance < 0.05 if setting == "recalibrate" else 0.9**4 * 0.8 < distance < 0.9**4 * 1.2


# Initial values


@pytest.mark.parametrize("client", [Split, FedAvgClient])
def test_what_is_shared_starts_equal_and_the_rest_per_client(client: Any) -> None:
    made = make(client, init="per_client")
    states, common = private_states(host(made)), made.federation.initial
    own = [key for key in HEAD.parameters(made.factory.build()) if key not in common]
    assert len(own) == (2 if client is Split else 0)
    for c in ALL:
        assert all(torch.equal(states[c][key], common[key]) for key in common)
        assert all(not torch.equal(states[c][key], states[d][key]) for d in ALL if d != c for key in own)
    moved = private_states(host(made, [3]))
    assert same({3: dict(moved[3])}, {3: dict(states[3])})  # whoever else lives there


# Failures


class Failing(FedAvgClient):
    """Fails in round 2."""

    def objective(self, batch: Batch) -> Terms:
        if self.round_number == 2:
            raise ZeroDivisionError("no luck")
        return super().objective(batch)

    def predict(self, inputs: Tensor) -> Tensor:
        if not self.training and self.round_number == 9:
            raise KeyError("nor here")
        return super().predict(inputs)


def test_an_error_says_whose_it_was() -> None:
    made = make(Failing)
    home = host(made)
    train(home, made, ALL, 1)
    before, threads = copy(private_states(home)), torch.get_num_threads()
    with pytest.raises(ClientError) as caught:
        run(home, 2, [3], Message(weights=made.federation.initial))
    error = caught.value
    assert str(error) == "client 3 failed in round 2 (local training): ZeroDivisionError: no luck"
    assert isinstance(error.__cause__, ZeroDivisionError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ClientError and str(again) == str(error)
    assert (again.client, again.round_number, again.phase) == (3, 2, "local training")
    failed = home.run_groups(EvalRequest("personal", "trained", ALL, ("test",), 9), [(1,)], {1: None})[1]
    assert str(failed.error).startswith("client 1 failed in round 9 (evaluation): KeyError")
    assert same(before, copy(private_states(home)))  # and the host goes on
    assert threads == torch.get_num_threads()
    run(home, 3, [3], Message(weights=made.federation.initial))


def test_messages_arrive_where_the_module_is() -> None:
    """Shown with the meta device: what a method holds of a message must be on its module's device."""
    message = Uplink(
        {"w": torch.ones(2)}, Prototypes(torch.ones(1, 2), torch.ones(1)), {"e": torch.ones(1)}, {"n": 1.0}, 4
    )
    moved = message.to(torch.device("meta"))
    assert isinstance(moved, Uplink) and moved.client == 4 and moved.numbers == {"n": 1.0} and moved.prototypes
    tensors = [moved.weights["w"], moved.prototypes.means, moved.prototypes.counts, moved.extra["e"]]
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert message.to(torch.device("cpu")) is message
    assert message.to(torch.device("meta"), extra=False).extra["e"] is message.extra["e"]


# The server's home


def test_the_order_of_arrival_does_not_matter() -> None:
    made = make()
    ups = train(host(made), made, ALL)
    results = []
    for parts in ([ups], [ups[::-1]], [ups[2:], ups[:2]], [[up] for up in (ups[3], ups[0], ups[2], ups[1])]):
        home = ServerHost(made.rule, made.federation)
        assert list(home.fuse(*parts).drift) == list(ALL)
        results.append(dict(home.state.weights))
    assert all(same({0: results[0]}, {0: result}) for result in results[1:])


def test_a_fusion_that_cannot_be_looked_at_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fusion changes the state wholly or not at all."""

    def diagnostics(state: Any) -> Any:
        raise MemoryError

    made = make()
    ups, home = train(host(made), made, ALL), ServerHost(made.rule, made.federation)
    before = home.state
    monkeypatch.setattr(home.rule, "diagnostics", diagnostics)
    with pytest.raises(MemoryError):
        home.fuse(ups, matrices=True)
    assert home.state is before


def test_a_model_that_has_diverged_is_credited_with_nothing() -> None:
    made = make()
    one = host(made)
    one.states = {c: {k: torch.full_like(v, float("nan")) if v.is_floating_point() else v for k, v in s.items()}
                  for c, s in private_states(one).items()}  # fmt: skip
    assert all(row.correct == 0 and row.total > 0 for row in evaluate(one, PERSONAL))


def test_functions_are_called_by_one_thread_before_several(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(torch, "sqrt", lambda x: called.append(torch.get_num_threads()))
    devices._call_once.cache_clear()
    with devices.torch_threads(1):
        assert called == []
        for _ in range(2):
            with devices.torch_threads(2):
                pass
    assert called == [1, 1], "once for each precision"


def test_a_shared_message_is_copied_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Message] = []
    monkeypatch.setattr(Message, "to", lambda self, device, extra: (copied.append(self), self)[1])
    on = host(make())
    run(on, 1, ALL, Message(snapshot(on.module.state_dict())))
    evaluate(on, GLOBAL, down=Message(snapshot(on.module.state_dict())))
    assert len(copied) == 2
