"""A traced step of a stack does what autograd and an optimiser do for each client, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


TRAINABLE = ("first.weight", "first.bias", "second.weight", "second.bias", "linear", "idle")


class Given(nn.Module):
    """Parameters by name, and a term that is a function of the module and a batch."""

    def __init__(self, how: Callable[[Given, Batch], Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.how = how
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def objective(self, batch: Batch) -> Terms:
        return {"sum": self.how(self, batch)}


def stacked(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    named = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in modules]
    return {name: torch.stack([one[name].detach().clone() for one in named]) for name in named[0]}


def batches_of(n: int, count: int = 3) -> list[Batch]:
    return [(torch.rand(n, B, 4).double(), torch.randint(3, (n, B))) for _ in range(count)]


def check(modules: Sequence[nn.Module], batches: list[Batch], plain: bool, names: tuple[str, ...] = ()) -> TracedStep:
    """Assert that steps of the stack, with plain SGD or without, equal those of each client by autograd."""
    values, n, rate = stacked(modules), len(modules), 0.01
    trainable = names or tuple(name for name, _ in modules[0].named_parameters())
    step = TracedStep(modules[0], "objective", trainable, values, batches[0], plain)
    bound, noted, expected = step.bind(values), [], []
    for batch in batches:
        gradients, terms = bound(batch, rate)
        noted.append(terms)
        assert len(gradients) == (0 if plain else len(step.moved))
        for row, module in enumerate(modules):
            module.zero_grad()
            made: Terms = module.objective((batch[0][row], batch[1][row]))  # type: ignore[operator]
            torch.stack(list(made.values())).sum().backward()
            assert list(step.terms) == list(made)
            expected.append([float(term.detach()) for term in made.values()])
            for name in step.moved:
                parameter = module.get_parameter(name)
                parameter.data -= rate * parameter.grad
        for name, gradient in zip(step.moved, gradients, strict=False):
            values[name].sub_(gradient, alpha=rate)
    # Terms are read late, as those of several steps are added up together.
    found = [[float(t if n == 1 else t[row]) for t in terms] for terms in noted for row in range(n)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-9)
    for name, value in stacked(modules).items():
        torch.testing.assert_close(values[name], value, rtol=1e-10, atol=1e-12, msg=name)
    return step


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("n", [1, N])
def test_equal_to_autograd(n: int, plain: bool) -> None:
    torch.manual_seed(0)
    step = check([Toy().double() for _ in range(n)], batches_of(n), plain, TRAINABLE)
    assert step.moved == TRAINABLE[:-1]  # nobody decays, or gives momentum to, what the objective does not touch


def test_products_are_added_without_storing_a_gradient() -> None:
    toys = [Toy().double() for _ in range(N)]
    step = TracedStep(toys[0], "objective", TRAINABLE, stacked(toys), batches_of(N)[0], True)
    assert isinstance(step.program, Program)
    assert list(step.program.constants.values()).count(torch.ops.aten.baddbmm_.default._op) == 2


def test_what_is_written_to_is_made_anew_every_time() -> None:
    def added(m: Given, batch: Batch) -> Tensor:
        total = torch.zeros_like(batch[0])
        total += batch[0]
        return (m.weight * total).sum()

    check([Given(added, weight=torch.ones(4).double()) for _ in range(2)], batches_of(2, 2), False)


@pytest.mark.parametrize("n", [1, N])
def test_gradients_made_of_other_parameters_are_of_those_before_the_step(n: int) -> None:
    """Each is the product, or simply the value, of parameters that move in the same step."""

    def crossed(m: Given, batch: Batch) -> Tensor:
        return (m.a @ m.b).sum() * batch[0].sum() + (m.c * m.d).sum() + (m.a @ m.a).sum()

    torch.manual_seed(1)
    shapes = {"a": (3, 3), "b": (3, 3), "c": (3,), "d": (3,)}
    made = [Given(crossed, **{k: torch.rand(s).double() for k, s in shapes.items()}) for _ in range(n)]
    check(made, batches_of(n, 2), True)


def test_scratch_memory_that_is_written_to_through_strides_is_made_anew() -> None:
    """The gradient of a mean over an image of one pixel goes through `as_strided`."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    module = Given(lambda m, batch: m.net(batch[0]).square().sum())
    module.net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check([module], [(torch.rand(1, B, 2, 4, 4).double(), torch.zeros(1, B).long())], False)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in net.parameters())


# What a careless simplification of the trace would get wrong ----------------------------------------------------------


class Model(nn.Module):
    """Parameters and buffers for all objectives; `how` is the one that is traced."""

    fw: Tensor

    def __init__(self, how: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.rand(4, 3)), nn.Parameter(torch.rand(3))
        self.stack = nn.Parameter(torch.rand(2, 3, 3))
        self.register_buffer("fw", torch.rand(4, 3))
        self.bn = nn.BatchNorm1d(4)
        self.how = how

    def objective(self, batch: Batch) -> Terms:
        terms = {"main": self.how(self, batch[0]) + 0.1 * sum(p.square().sum() for p in self.parameters())}
        return terms if self.how is not logged else {**terms, "bias": self.b[0]}


def chunked(m: Model, x: Tensor) -> Tensor:
    scratch = torch.zeros(2, 3)
    _, second = scratch.chunk(2)
    second += 1.0
    return ((x @ m.w) * scratch[1]).square().sum()


def rows(m: Model, x: Tensor) -> Tensor:
    scratch = torch.zeros(3, 3, dtype=x.dtype)
    for row in scratch:
        row.add_(1.5)
    return ((x @ m.w) @ scratch).square().sum()


def unbound(m: Model, x: Tensor) -> Tensor:
    first, second = m.stack.unbind(0)
    return ((x @ m.w) @ first).square().sum() + (second @ m.w.T).sum() + (second * m.b).sum()


def teacher(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = x @ m.fw
        m.fw.mul_(0.9).add_(m.w, alpha=0.1)
        target = m.b + h
    return (x @ m.w + m.b - target).square().sum()


def statistics(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.bn(x)
    return (x @ m.w).square().sum()


def logged(m: Model, x: Tensor) -> Tensor:
    return (x @ m.w + m.b).square().sum()


def raised(m: Model, x: Tensor) -> Tensor:
    z = (x @ m.w).clone()
    first = torch.pow(z, 1)
    z = z + 1
    return (first * z).sum()


def turned(m: Model, x: Tensor) -> Tensor:
    return (x @ m.w).flatten().dot(torch.ones_like(torch.empty(3, B, dtype=x.dtype).T).T.contiguous().view(-1))


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("how", [chunked, rows, unbound, teacher, statistics, logged, raised, turned])
def test_objectives_with_traps(how: Callable[[Model, Tensor], Tensor], n: int, plain: bool) -> None:
    torch.manual_seed(0)
    check([Model(how).double().train() for _ in range(n)], batches_of(n), plain)


@pytest.mark.parametrize("n", [1, N])
def test_tracing_leaves_random_numbers_as_they_were(n: int) -> None:
    """And what is drawn without any input is drawn anew in every step."""

    def noisy(m: Given, batch: Batch) -> Tensor:
        return (nn.functional.dropout(m.weight) * torch.rand(20) * batch[0].sum()).sum()

    batch, values = (torch.ones(n, B, 1), torch.zeros(n, B).long()), {"weight": torch.ones(n, 20)}
    torch.manual_seed(5)
    step = TracedStep(Given(noisy, weight=torch.ones(20)), "objective", ("weight",), values, batch, False)
    first = step.bind(values)(batch, 0.1)[0][0].clone()
    torch.manual_seed(5)
    bound = step.bind(values)
    again, then = bound(batch, 0.1)[0][0].clone(), bound(batch, 0.1)[0][0].clone()
    assert torch.equal(first, again)
    assert n == 1 or not torch.equal(again[0], again[1])
    kept = (again != 0) & (then != 0)
    assert kept.any() and not torch.equal(again[kept], then[kept])


class Assigning(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(()))

    def objective(self, batch: Batch) -> Terms:
        self.mean = 0.9 * self.mean + batch[0].mean()
        return {"sum": self.weight.sum()}


def test_what_is_decided_by_values_is_refused() -> None:
    masked = Given(lambda m, batch: m.weight.sum() * len(torch.unique(batch[1])), weight=torch.ones(3))
    assigns = r"assigns .* buffer (module\.)?mean"
    for module, said in ((masked, "cannot be traced.*lockstep=false"), (Assigning(), assigns)):
        with pytest.raises(ValueError, match=said):
            TracedStep(module, "objective", ("weight",), stacked([module]), batches_of(1)[0], True)
