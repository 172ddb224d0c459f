"""FML: a private and a common net learn from each other, and the common one is averaged."""

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SIZES, backward, batches, close, evaluates, mean, plus, scores, slope, started, values
from support import ALL, World, inline, nets, play, rounds, run_cohorts, same, softmax, states, world
from torch import nn

from lightning_modules.contract.command import maker
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fml import FML
from lightning_modules.methods.local import Local
from lightning_modules.nets.mlp import Mlp
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.config.compose import CONFIGS
from pflsim.servers.fedavg import FedAvg as Server
from pflsim.servers.local import Local as LocalServer

COHORTS = (ALL, (0, 2), (1, 2, 3))


def fml(hidden: int = 4, training: Training | None = None, **settings: Any) -> World:
    """Clients with 5 hidden units, and a common net with another number."""
    training = training or Training(lr=0.1, momentum=0.5, batch_size=4)
    return world(partial(FML, **settings), Server(), training=training, common=(partial(Mlp, hidden=[hidden]),))


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.8, 0.3), (0.0, 0.9)])
def test_rounds_by_hand(alpha: float, beta: float) -> None:
    """Both nets step from the same values; g is the mean over the round's clients, and absent ones keep f."""
    eta = 0.4
    with started(fml(alpha=alpha, beta=beta, training=Training(lr=eta, batch_size=4))) as executor:
        common, own = values(executor.server.state.weights, "common"), [values(states(executor)[i]) for i in ALL]
        for t, cohort in enumerate(COHORTS, start=1):
            trained = []
            for i in cohort:
                f, g = own[i], common
                for x, y in batches(executor, i, t):
                    a, b = scores(f, x), scores(g, x)
                    apart = (softmax(a) - softmax(b)) / len(y)
                    by_f, by_g = alpha * slope(a, y) + (1 - alpha) * apart, beta * slope(b, y) - (1 - beta) * apart
                    f, g = plus(f, -eta, backward(f, x, by_f)), plus(g, -eta, backward(g, x, by_g))
                own[i] = f
                trained.append(g)
            common = mean(trained, [SIZES[i] for i in cohort])
            play(executor, t, cohort)
        for i in ALL:
            close(values(states(executor)[i]), own[i])
        close(values(executor.server.state.weights, "common"), common)
        evaluates(executor, 3, lambda i, x: scores(own[i], x))
        evaluates(executor, 3, lambda i, x: scores(common, x), "global received")


class Constant(Net):
    """Returns its parameters as scores."""

    def __init__(self, *given: float):
        super().__init__(nn.Identity(), nn.Linear(1, len(given), bias=False), (1,), len(given))
        self.head.weight = nn.Parameter(torch.tensor(given)[:, None])


def test_terms_and_gradients_of_one_example() -> None:
    """f = (1, 0), g = (0, 0.5), y = 0 and both weights ½; six digits of a program of the definition."""
    module = FML(Constant(1.0, 0.0), Training(), common=Constant(0.0, 0.5))
    terms = module.objective((torch.ones(1, 1), torch.tensor([0])))
    assert [*terms] == ["ce", "kl", "common_ce", "common_kl"]
    summands = torch.stack([*terms.values()])
    np.testing.assert_allclose(summands.tolist(), [0.156631, 0.136437, 0.487038, 0.128702], atol=1e-6)
    found = torch.autograd.grad(summands.sum(), [*module.parameters()])
    np.testing.assert_allclose(found[0].flatten(), [0.042288, -0.042288], atol=1e-6)
    np.testing.assert_allclose(found[1].flatten(), [-0.487989, 0.487989], atol=1e-6)


def test_equal_nets_have_nothing_to_learn_from_each_other() -> None:
    module = FML(Constant(1.0, -2.0), Training(), common=Constant(1.0, -2.0), alpha=0.0, beta=0.0)
    terms = module.objective((torch.ones(3, 1), torch.tensor([0, 1, 0])))
    summands = torch.stack([*terms.values()])
    assert [*terms] == ["kl", "common_kl"] and summands.tolist() == [0, 0]
    found = torch.autograd.grad(summands.sum(), [*module.parameters()])
    assert not any(gradient.abs().max() > 1e-7 for gradient in found)


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_without_the_exchange_it_is_local_and_fedavg_to_the_bit(beta: float) -> None:
    """With β < 1 and α = 1, f is still Local's, and g no longer FedAvg's."""
    made = fml(alpha=1.0, beta=beta)
    first, training = made.factory.build().common, made.factory.training
    alone = world(Local, LocalServer(), training=training)
    common = world(FedAvg, Server(), training=training, model=lambda *_: deepcopy(first))
    found, local, mean_of_all = (run_cohorts(each, COHORTS) for each in (made, alone, common))
    assert same(nets(states(found)), nets(states(local)))
    pairs = zip(found.server.state.weights.values(), mean_of_all.server.state.weights.values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs) == (beta == 1)


def test_bytes_are_those_of_the_common_net() -> None:
    """Whatever the architectures of the clients are."""
    make = maker("fml", ("model.common={hidden: [3]}",), [CONFIGS])
    expected = {4 * (3 * 64 + 3 + 10 * 3 + 10)}
    for shapes in ("model.variants=[{hidden: [9, 9]}, {hidden: [5]}]", "model.hidden=[3]"):
        executor = inline(make(shapes))
        assert {*executor.send(ALL).down_bytes.values()} == expected
        assert {report.up_bytes for report in rounds(executor, 1, 4)} == expected
