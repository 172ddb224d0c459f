"""A traced step of a stack does what autograd and an optimiser do for each client."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_modules.base import Batch, Terms
from lightning_modules.lockstep.program import Program
from lightning_modules.lockstep.tracing import TracedStep

N, B = 3, 5


class Toy(nn.Module):
    """Products, a used and an unused parameter, a counter, a running mean, a term in the weights and a linear one."""

    count: Tensor
    mean: Tensor
    target: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.idle, self.frozen = nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(6))
        self.linear = nn.Parameter(torch.rand(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("target", torch.rand(6, 4))

    def objective(self, batch: Batch) -> Terms:
        inputs, labels = batch
        hidden = self.first(inputs).relu() * self.frozen
        with torch.no_grad():
            self.count.add_(1)
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        ce = nn.functional.cross_entropy(self.second(hidden), labels)
        return {"ce": ce, "pull": 0.3 * (self.first.weight - self.target).square().sum() - 2 * self.linear.sum()}


@pytest.fixture
def toys() -> list[Toy]:
    torch.manual_seed(0)
    return [Toy().double() for _ in range(N)]


def stacked(toys: list[Toy]) -> dict[str, Tensor]:
    named = [{**dict(t.named_parameters()), **dict(t.named_buffers())} for t in toys]
    return {name: torch.stack([one[name].detach().clone() for one in named]) for name in named[0]}


TRAINABLE = ("first.weight", "first.bias", "second.weight", "second.bias", "linear", "idle")


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("n", [1, N])
def test_equal_to_autograd(toys: list[Toy], n: int, plain: bool) -> None:
    toys = toys[:n]
    values, rate = stacked(toys), 0.1
    batches = [(torch.rand(n, B, 4).double(), torch.randint(3, (n, B))) for _ in range(3)]
    step = TracedStep(toys[0], "objective", TRAINABLE, values, batches[0], plain)
    bound = step.bind(values)
    assert step.moved == TRAINABLE[:-1]  # nobody decays, or gives momentum to, what the objective does not touch
    for inputs, labels in batches:
        gradients, found = bound((inputs, labels), rate)
        if n == 1:  # traced without the clients' axis
            gradients, found = [g[None] for g in gradients], [term[None] for term in found]
        terms = dict(zip(step.terms, found, strict=True))
        for row, toy in enumerate(toys):
            toy.zero_grad()
            expected = toy.objective((inputs[row], labels[row]))
            (expected["ce"] + expected["pull"]).backward()
            assert terms["ce"][row] == pytest.approx(float(expected["ce"].detach()), rel=1e-12)
            assert terms["pull"][row] == pytest.approx(float(expected["pull"].detach()), rel=1e-12)
            for at, name in enumerate(step.moved):
                parameter = toy.get_parameter(name)
                if not plain:
                    torch.testing.assert_close(gradients[at][row], parameter.grad, rtol=1e-12, atol=1e-14)
                    values[name][row] -= rate * parameter.grad
                parameter.data -= rate * parameter.grad
        assert len(gradients) == (0 if plain else len(step.moved))
        for name, value in stacked(toys).items():
            torch.testing.assert_close(values[name], value, rtol=1e-12, atol=1e-14, msg=name)
    assert values["count"].tolist() == [3] * n


def test_products_are_added_without_storing_a_gradient(toys: list[Toy]) -> None:
    values = stacked(toys)
    step = TracedStep(
        toys[0], "objective", TRAINABLE, values, (torch.rand(N, B, 4).double(), torch.zeros(N, B).long()), True
    )
    assert isinstance(step.program, Program)
    assert list(step.program.constants.values()).count(torch.ops.aten.baddbmm_.default._op) == 2


def test_what_is_written_to_is_made_anew_every_time() -> None:
    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def objective(self, batch: Batch) -> Terms:
            total = torch.zeros_like(batch[0])
            total += batch[0]
            return {"sum": (self.weight * total).sum()}

    batch, values = (torch.ones(2, B, 3), torch.zeros(2, B).long()), {"weight": torch.ones(2, 3)}
    step = TracedStep(Scratch(), "objective", ("weight",), values, batch, False).bind(values)
    for _ in range(2):
        assert step(batch, 0.1)[1][0].tolist() == [3.0 * B, 3.0 * B]


@pytest.mark.parametrize("n", [1, 3])
def test_gradients_made_of_other_parameters_are_of_those_before_the_step(n: int) -> None:
    """Each is the product, or simply the value, of parameters that move in the same step."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.rand(3, 3)), nn.Parameter(torch.rand(3, 3))
            self.c, self.d = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))

        def objective(self, batch: Batch) -> Terms:
            return {"sum": (self.a @ self.b).sum() * batch[0].sum() + (self.c * self.d).sum() + (self.a @ self.a).sum()}

    torch.manual_seed(1)
    ones = [Crossed().double() for _ in range(n)]
    values = {k: torch.stack([o.get_parameter(k).detach().clone() for o in ones]) for k in "abcd"}
    batch = torch.rand(n, B, 1).double(), torch.zeros(n, B).long()
    step = TracedStep(ones[0], "objective", tuple("abcd"), values, batch, True).bind(values)
    for _ in range(2):
        step(batch, 0.1)
        for row, one in enumerate(ones):
            one.zero_grad()
            one.objective((batch[0][row], batch[1][row]))["sum"].backward()
            for name in "abcd":
                parameter = one.get_parameter(name)
                parameter.data -= 0.1 * parameter.grad
                torch.testing.assert_close(values[name][row], parameter.data, rtol=1e-12, atol=1e-14, msg=name)


def test_scratch_memory_that_is_written_to_through_strides_is_made_anew() -> None:
    """The gradient of a mean over an image of one pixel goes through `as_strided`."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = module

        def objective(self, batch: Batch) -> Terms:
            return {"sum": self.net(batch[0]).square().sum()}

    one, batch = Pooled(), (torch.rand(1, B, 2, 4, 4).double(), torch.zeros(1, B).long())
    values = {name: p.detach().clone()[None] for name, p in one.named_parameters()}
    step = TracedStep(one, "objective", tuple(values), values, batch, False)
    gradients, _ = step.bind(values)(batch, 0.1)
    one.objective((batch[0][0], batch[1][0]))["sum"].backward()
    for found, (name, parameter) in zip(gradients, one.named_parameters(), strict=True):
        assert parameter.grad is not None and parameter.grad.any()
        torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-14, msg=name)
