"""Batches, schedules and the training loop."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.loop import epoch_orders, train, train_phase
from lightning_modules.losses import cross_entropy
from lightning_modules.nets.net import Net
from lightning_modules.phases import Alternate, Phase, Schedule, Stage, stages
from lightning_modules.training import Training
from pflsim.data.federated import Examples
from pflsim.params import BODY, HEAD, Selector
from pflsim.seeding import seeded_global


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch_indices(n: int, stage: Stage, size: int, drawn: torch.Generator, **more: Any) -> list[Tensor]:
    return [index for order in epoch_orders(n, stage, size, drawn, **more) for index in order.split(size)]


def draw(n: int, batch_size: int, epochs: int | None = None, steps: int | None = None) -> list[Tensor]:
    return batch_indices(n, Stage((Phase(),), epochs, steps), batch_size, generator())


# Batches


@given(n=st.integers(0, 40), batch_size=st.integers(1, 12), epochs=st.integers(0, 3))
def test_an_epoch_is_every_example_once(n: int, batch_size: int, epochs: int) -> None:
    drawn = draw(n, batch_size, epochs=epochs)
    per_pass = -(-n // batch_size)
    assert len(drawn) == epochs * per_pass
    for first in range(0, len(drawn), per_pass or 1):
        one = drawn[first : first + per_pass]
        assert all(len(index) == batch_size for index in one[:-1])
        assert sorted(torch.cat(one).tolist()) == list(range(n))


@given(n=st.integers(1, 40), batch_size=st.integers(1, 12), steps=st.integers(0, 30))
def test_steps_go_on_beyond_one_pass(n: int, batch_size: int, steps: int) -> None:
    drawn = draw(n, batch_size, steps=steps)
    assert len(drawn) == steps
    passes = draw(n, batch_size, epochs=-(-steps // -(-n // batch_size)))
    assert all(torch.equal(a, b) for a, b in zip(drawn, passes, strict=False))  # the same passes, cut short


def test_a_last_batch_too_small_is_left_out() -> None:
    """Batch normalisation cannot take one example; the next pass leaves another one out."""
    found = batch_indices(7, Stage((Phase(),), None, 6), 3, generator(), smallest=2)
    assert [len(i) for i in found] == [3] * 6
    assert batch_indices(1, Stage((Phase(),), 2, None), 3, generator(), smallest=2) == []
    assert [len(i) for i in batch_indices(5, Stage((Phase(),), 1, None), 3, generator(), smallest=2)] == [3, 2]


# A share of the work


@given(n=st.integers(0, 40), size=st.integers(1, 12), work=st.floats(0.01, 1), epochs=st.integers(0, 3))
def test_a_straggler_takes_the_first_batches(n: int, size: int, work: float, epochs: int) -> None:
    """⌈work · n⌉ of those it would have taken, at least one; and the generator ends where it would have ended."""
    for limits in ({"epochs": epochs, "steps": None}, {"epochs": None, "steps": 3 * epochs}):
        stage, one, other = Stage((Phase(),), **limits), generator(), generator()
        whole = batch_indices(n, stage, size, one)
        found = batch_indices(n, stage, size, other, work=work)
        assert len(found) == (max(1, math.ceil(work * len(whole))) if whole else 0)
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=False))
        assert torch.equal(one.get_state(), other.get_state())


def test_a_share_of_every_stage() -> None:
    """Three epochs of ten batches, then two steps, then none: nine, one and none, of the same examples as ever."""
    schedule = (Phase("a", epochs=3), Phase("b", steps=2), Phase("c", epochs=0))
    whole, slow = Client(schedule), Client(schedule)
    assert train(whole, examples(40), generator())[0] == 32
    steps, losses = train(slow, examples(40), generator(), 0.3)
    assert steps == 10 and set(losses) == {"a/ce", "b/ce"}
    taken = [0, 1, 2, 3, 4, 5, 6, 7, 8, 30]
    assert all(torch.equal(s[1], whole.seen[at][1]) for s, at in zip(slow.seen, taken, strict=True))


def test_phases_that_take_turns_do_the_same_share() -> None:
    for every, steps in (("batch", 2), ("epoch", 4)):
        module = Client((Alternate(TURNS, every),))  # type: ignore[arg-type]
        assert train(module, examples(12), generator(), 0.5)[0] == steps  # two of three batches, of each
        assert [name for name, *_ in module.seen] == (
            ["penalty", "ce"] * 2 if every == "batch" else ["penalty"] * 2 + ["ce"] * 2
        )


# Schedules

A, B = Phase("a"), Phase("b")


@pytest.mark.parametrize(
    ("schedule", "laid"),
    [
        ((A,), [("a", 3, None)]),
        ((Phase("a", epochs=2), B), [("a", 2, None), ("b", 3, None)]),
        ((Phase("a", steps=5), Phase("b", epochs=0)), [("a", None, 5), ("b", 0, None)]),
        ((Alternate((A, B)),), [("ab", 3, None)]),
        ((Alternate((Phase("a", steps=9), B), epochs=2), A), [("ab", 2, None), ("a", 3, None)]),
        ((Alternate((A, B), steps=4),), [("ab", None, 4)]),
        ((Alternate((A, B), "epoch", epochs=2),), [("a", 1, None), ("b", 1, None)] * 2),
        ((Alternate((A, B), "epoch"),), [("a", 1, None), ("b", 1, None)] * 3),
        ((Alternate((A, B), "epoch", steps=4),), [("a", None, 4), ("b", None, 4)]),
        ((), []),
    ],
)
def test_stages(schedule: Schedule, laid: list[tuple[str, int | None, int | None]]) -> None:
    made = stages(schedule, Training(local_epochs=3))
    assert [("".join(p.name for p in s.phases), s.epochs, s.steps) for s in made] == laid


# The loop

PLAIN = (Phase(),)


class Client(ClientModule):
    """Two objectives, any schedule; remembers every batch it was asked about."""

    def __init__(self, schedule: Schedule = PLAIN, **training: Any):
        with seeded_global(0, "test"):
            body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
            super().__init__(Net(body, nn.Linear(4, 2), (4,), 2), Training(**{"lr": 0.5, "batch_size": 4, **training}))
        self._schedule, self.seen = schedule, []

    def schedule(self) -> Schedule:
        return self._schedule

    def objective(self, batch: Batch) -> Terms:
        self.seen.append(("ce", batch[0], self.net.body[0].weight.detach().clone()))  # type: ignore[index]
        return {"ce": cross_entropy(self.net(batch[0]), batch[1])}

    def penalty(self, batch: Batch) -> Terms:
        self.seen.append(("penalty", batch[0], self.net.body[0].weight.detach().clone()))  # type: ignore[index]
        features = self.net.body(batch[0])
        return {"near": features.square().mean() / 2, "far": features.abs().mean()}


def examples(n: int = 10) -> Examples:
    x = torch.randn(n, 3, generator=generator(1))
    return Examples(x, (x[:, 0] > 0).long())


def values(module: ClientModule) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def moved(module: ClientModule, before: dict[str, Tensor]) -> set[str]:
    return {key for key, value in module.state_dict().items() if not torch.equal(value, before[key])}


BODY_KEYS = {"net.body.0.weight", "net.body.0.bias"}
HEAD_KEYS = {"net.head.weight", "net.head.bias"}
TURNS = (Phase("body", "penalty", BODY), Phase("head", "objective", HEAD))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("selector", "keys"), [(BODY, BODY_KEYS), (HEAD, HEAD_KEYS), (Selector(("net.head.bias",)), {"net.head.bias"})]
)
def test_a_phase_moves_its_own_parameters_only(selector: Selector, keys: set[str], decay: float) -> None:
    module = Client((Phase(trainable=selector),), weight_decay=decay, momentum=0.9)
    before = values(module)
    train(module, examples(), generator())
    assert moved(module, before) == keys
    assert all(p.grad is None for p in module.parameters())
    assert all(p.requires_grad for p in module.parameters())


def sgd(parameters: list[Tensor], loss: Tensor, lr: float) -> None:
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= lr * gradient


def by_hand(turns: list[list[str]], data: Examples, lr: float, batch_size: int) -> list[Tensor]:
    """Body and head in plain tensors: for every pass over the data, which of them step on each of its batches."""
    w, b, v, c = (p.detach().clone().requires_grad_() for p in Client().net.parameters())
    order = generator(9)
    for turn in turns:
        for index in torch.randperm(len(data), generator=order).split(batch_size):
            x, y = data.x[index], data.y[index]
            if "body" in turn:
                features = torch.tanh(x @ w.T + b)
                sgd([w, b], features.square().mean() / 2 + features.abs().mean(), lr)
            if "head" in turn:
                logits = torch.tanh(x @ w.T + b) @ v.T + c
                sgd([v, c], -logits.log_softmax(1)[torch.arange(len(y)), y].mean(), lr)
    return [w, b, v, c]


@pytest.mark.parametrize(
    ("schedule", "turns"),
    [
        ((Alternate(TURNS, epochs=2),), [["body", "head"]] * 2),
        ((Alternate(TURNS, "epoch", epochs=2),), [["body"], ["head"]] * 2),
        (tuple(reversed(TURNS)), [["head"], ["body"]]),
    ],
)
def test_alternation_against_plain_tensors(schedule: Schedule, turns: list[list[str]]) -> None:
    module = Client(schedule, lr=0.3)
    train(module, examples(), generator(9))
    for ours, theirs in zip(module.net.parameters(), by_hand(turns, examples(), 0.3, 4), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_loss_terms_of_several_phases_have_names_of_their_own() -> None:
    module = Client((Alternate((Phase("body", trainable=BODY), Phase("head", trainable=HEAD))),))
    steps, losses = train(module, examples(), generator())
    assert steps == 3 and set(losses) == {"body/ce", "head/ce"}
    assert losses["head/ce"] < losses["body/ce"]  # it is taken after the body's step on the same batch


class Normed(ClientModule):
    """With batch normalisation right on the inputs, so that its statistics are the data's own."""

    def __init__(self) -> None:
        with seeded_global(0, "test"):
            super().__init__(Net(nn.BatchNorm1d(3), nn.Linear(3, 2), (3,), 2), Training(buffers="recalibrate"))


@pytest.mark.parametrize(("n", "batch_size"), [(20, 256), (201, 50), (257, 256)])
def test_recalibrate_measures_all_examples_alike(n: int, batch_size: int) -> None:
    """Also where the last batch would be of one example, and where the rows are sorted by class."""
    module = Normed().eval()
    data = examples(n)
    data = Examples(data.x[data.x[:, 0].argsort()] + torch.tensor([5.0, 0, 0]), data.y)
    before = values(module)
    module.recalibrate(data, batch_size=batch_size)
    norm = module.net.body
    assert not module.training and not norm.training and norm.momentum == 0.1
    torch.testing.assert_close(norm.running_mean, data.x.mean(0), rtol=0.02, atol=0.05)
    torch.testing.assert_close(norm.running_var, data.x.var(0), rtol=0.15, atol=0.05)
    assert moved(module, before) == {f"net.body.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}


def test_a_phase_outside_the_schedule_trains_its_parameters() -> None:
    """As a stage of the schedule does with the same order of examples; the mode is kept."""
    module, other = Client(local_epochs=2), Client((Phase(trainable=HEAD, epochs=2),))
    before = values(module)
    module.eval()
    torch.manual_seed(5)
    train_phase(module, Phase(trainable=HEAD), examples())
    assert not module.training and moved(module, before) == HEAD_KEYS
    torch.manual_seed(5)
    train(other, examples(), torch.default_generator)
    assert all(torch.equal(value, values(other)[name]) for name, value in values(module).items())


# Memory formats


def test_gradients_of_another_memory_format() -> None:
    """A term of contiguous tensors gives a channels_last parameter contiguous gradients; the step is the same."""

    class Pulled(ClientModule):
        def objective(self, batch: Batch) -> Terms:
            return {"pull": (self.net.get_parameter("body.0.weight") * pull).sum()}

    torch.manual_seed(0)
    pull = torch.randn(2, 3, 2, 2)
    net = Net(nn.Sequential(nn.Conv2d(3, 2, 2), nn.Flatten()), nn.Linear(8, 2), (8,), 2)
    module = Pulled(net, Training(lr=0.5)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = net.get_parameter("body.0.weight").detach().clone()
    module.optimise((torch.zeros(1, 3, 3, 3), torch.zeros(1, dtype=torch.int64)), module.make_step(Phase()))
    torch.testing.assert_close(net.get_parameter("body.0.weight").detach(), before - 0.5 * pull)
