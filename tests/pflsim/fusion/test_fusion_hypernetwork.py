"""Stacked hypernetworks against NumPy, one client at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import differences

from pflsim.fusion import hypernetwork
from pflsim.fusion.hypernetwork import Hypernetworks, draw, draw_common, outputs, pull_back, rebuilt, tensors

NETS = draw(clients=5, embedding=4, hidden=(6, 3), outputs=(5, 2), seed=3)


def forward(nets: Hypernetworks, client: int) -> list[np.ndarray]:
    """embedding → ReLU layers → heads, for one client."""
    x = nets.embeddings[client].double().numpy()
    for layer in nets.hidden:
        x = np.maximum(layer.weight[client].double().numpy() @ x + layer.bias[client].double().numpy(), 0)
    return [head.weight[client].double().numpy() @ x + head.bias[client].double().numpy() for head in nets.heads]


def test_outputs_are_those_of_every_client_alone() -> None:
    found = outputs(NETS)
    assert [tuple(o.shape) for o in found] == [(5, 5), (5, 2)]
    for client in range(5):
        for out, expected in zip(found, forward(NETS, client), strict=True):
            np.testing.assert_allclose(out[client].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_without_hidden_layers_heads_see_the_embedding() -> None:
    nets = draw(clients=2, embedding=3, hidden=(), outputs=(4,), seed=0)
    np.testing.assert_allclose(outputs(nets)[0][1].numpy(), forward(nets, 1)[0], rtol=1e-5)


def test_draws_are_a_function_of_seed_and_client_alone() -> None:
    before = torch.random.get_rng_state()
    again, other = (draw(clients=5, embedding=4, hidden=(6, 3), outputs=(5, 2), seed=s) for s in (3, 4))
    fewer = draw(clients=2, embedding=4, hidden=(6, 3), outputs=(5, 2), seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    for mine, same, different, few in zip(*map(tensors, (NETS, again, other, fewer)), strict=True):
        assert torch.equal(mine, same) and torch.equal(mine[:2], few)
        assert not torch.equal(mine[0], mine[1]) or mine.unique().tolist() == [1.0]
        assert not torch.equal(mine, different) or mine.unique().tolist() == [1.0]


def test_draws_have_the_spread_of_torch() -> None:
    """Embeddings standard normal; layers uniform within ±1/√in, whose variance is 1/(3·in); head biases 1."""
    nets = draw(clients=40, embedding=50, hidden=(60,), outputs=(40,), seed=0)
    assert float(nets.embeddings.mean()) == pytest.approx(0, abs=0.1)
    assert float(nets.embeddings.std()) == pytest.approx(1, rel=0.05)
    for values, fan_in in ((nets.hidden[0].weight, 50), (nets.hidden[0].bias, 50), (nets.heads[0].weight, 60)):
        assert float(values.abs().max()) <= fan_in**-0.5
        assert float(values.var()) == pytest.approx(1 / (3 * fan_in), rel=0.05)
    assert torch.equal(nets.heads[0].bias, torch.ones(40, 40))


def test_level_gives_equal_outputs_everywhere() -> None:
    assert all(torch.equal(out, torch.ones_like(out)) for out in outputs(hypernetwork.level(NETS)))


def test_a_step_descends_for_some_and_leaves_the_rest() -> None:
    """Against finite differences in float64, for every tensor of one client; nothing given is changed."""
    nets = doubled(NETS)
    copies = [t.clone() for t in tensors(nets)]
    c = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)

    def objective(out: list[torch.Tensor]) -> torch.Tensor:
        return (out[0] * c[0]).sum() + (out[1].square() * c[1]).sum()

    def value() -> float:
        a, b = forward(nets, 1)
        return float((a * c[0][1].numpy()).sum() + (np.square(b) * c[1][1].numpy()).sum())

    with torch.no_grad():  # a server may be called so
        new = hypernetwork.descend(nets, [3, 1], objective, lr=0.5)
    assert all(torch.equal(t, copy) and not t.requires_grad for t, copy in zip(tensors(nets), copies, strict=True))
    for before, after in zip(tensors(nets), tensors(new), strict=True):
        assert torch.equal(before[[0, 2, 4]], after[[0, 2, 4]]) and not after.requires_grad
        row, moved = before[1].view(-1), after[1].reshape(-1)
        expected = row.numpy() - 0.5 * differences(value, row.numpy())
        np.testing.assert_allclose(moved.numpy(), expected, rtol=1e-6, atol=1e-7)


def doubled(nets: Hypernetworks) -> Hypernetworks:
    """The same in float64."""
    hidden, heads = (
        tuple(hypernetwork.Linear(x.weight.double(), x.bias.double()) for x in part)
        for part in (nets.hidden, nets.heads)
    )
    return Hypernetworks(nets.embeddings.double(), hidden, heads)


# One hypernetwork for all ---------------------------------------------------------------------------------------------

COMMON = draw_common(clients=5, embedding=4, hidden=(6, 3), start=(torch.ones(2, 3), torch.zeros(4)), seed=3)


def test_common_outputs_are_those_of_equal_hypernetworks() -> None:
    """As if every client had a copy; also for one client, and for embeddings of nobody."""
    copies = rebuilt(COMMON, [t if len(t) == 5 else t.expand(5, *t.shape[1:]) for t in tensors(COMMON)])
    for found, expected in zip(outputs(COMMON), outputs(copies), strict=True):
        torch.testing.assert_close(found, expected)
    for found, expected in zip(
        outputs(replace(COMMON, embeddings=COMMON.embeddings[2:3])), outputs(copies), strict=True
    ):
        torch.testing.assert_close(found[0], expected[2])


@pytest.mark.parametrize("width", [1, 4, 8])
def test_pull_back_is_the_gradient_that_autograd_finds(width: int) -> None:
    values = [t.double().requires_grad_() for t in tensors(COMMON)]
    nets, clients = rebuilt(COMMON, values), [4, 0, 3]
    back = [torch.randn(3, 6).double(), torch.randn(3, 4).double()]
    total = sum((out[torch.tensor(clients)] * b).sum() for out, b in zip(outputs(nets), back, strict=True))
    expected = torch.autograd.grad(total, values)
    plain = rebuilt(COMMON, [v.detach() for v in values])
    found = tensors(pull_back(plain, clients, lambda number, part: back[number][:, part], width))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
