"""Objectives that a careless simplification of their trace would get wrong: all against autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_modules.base import Batch, Terms
from lightning_modules.lockstep.tracing import TracedStep

B = 5


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
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", [chunked, rows, unbound, teacher, statistics, logged, raised, turned])
def test_equal_to_autograd(how: Callable[[Model, Tensor], Tensor], n: int, plain: bool) -> None:
    torch.manual_seed(0)
    models = [Model(how).double().train() for _ in range(n)]
    named = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in models]
    values = {name: torch.stack([own[name].detach().clone() for own in named]) for name in named[0]}
    trainable = tuple(name for name, _ in models[0].named_parameters())
    batches = [(torch.rand(n, B, 4).double(), torch.zeros(n, B).long()) for _ in range(3)]
    step = TracedStep(models[0], "objective", trainable, values, batches[0], plain)
    bound, noted, expected = step.bind(values), [], []
    for batch in batches:
        gradients, terms = bound(batch, 0.01)
        if not plain:
            for name, gradient in zip(step.moved, gradients, strict=True):
                values[name].sub_(gradient, alpha=0.01)
        noted.append(terms)
        for row, model in enumerate(models):
            model.zero_grad()
            made = model.objective((batch[0][row], batch[1][row]))
            torch.stack(list(made.values())).sum().backward()
            expected.append([float(term.detach()) for term in made.values()])
            for parameter in model.parameters():
                parameter.data -= 0.01 * parameter.grad
    # Terms are read late, as those of several steps are added up together.
    found = [[float(t if n == 1 else t[row]) for t in terms] for terms in noted for row in range(n)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-9)
    for row, own in enumerate(named):
        for name, value in own.items():
            torch.testing.assert_close(values[name][row], value.detach(), rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("n", [1, 3])
def test_tracing_leaves_random_numbers_as_they_were(n: int) -> None:
    """And what is drawn without any input is drawn anew in every step."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(20))

        def objective(self, batch: Batch) -> Terms:
            return {"sum": (nn.functional.dropout(self.weight) * torch.rand(20) * batch[0].sum()).sum()}

    batch, values = (torch.ones(n, B, 1), torch.zeros(n, B).long()), {"weight": torch.ones(n, 20)}
    torch.manual_seed(5)
    step = TracedStep(Noisy(), "objective", ("weight",), values, batch, False)
    first = step.bind(values)(batch, 0.1)[0][0].clone()
    torch.manual_seed(5)
    bound = step.bind(values)
    again, then = bound(batch, 0.1)[0][0].clone(), bound(batch, 0.1)[0][0].clone()
    assert torch.equal(first, again)
    assert n == 1 or not torch.equal(again[0], again[1])
    kept = (again != 0) & (then != 0)
    assert kept.any() and not torch.equal(again[kept], then[kept])


def test_what_is_decided_by_values_is_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def objective(self, batch: Batch) -> Terms:
            return {"sum": self.weight.sum() * len(torch.unique(batch[1]))}

    class Assigning(Masked):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def objective(self, batch: Batch) -> Terms:
            self.mean = 0.9 * self.mean + batch[0].mean()
            return {"sum": self.weight.sum()}

    batch = torch.ones(1, B, 3), torch.zeros(1, B).long()
    with pytest.raises(ValueError, match="objective cannot be traced.*lockstep=false"):
        TracedStep(Masked(), "objective", ("weight",), {"weight": torch.ones(1, 3)}, batch, True)
    values = {"weight": torch.ones(1, 3), "mean": torch.zeros(1)}
    with pytest.raises(ValueError, match="assigns .* buffer (module\\.)?mean"):
        TracedStep(Assigning(), "objective", ("weight",), values, batch, True)
