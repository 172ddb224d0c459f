"""pFedFDA: Gaussian classifiers, interpolated with the global one by cross-validation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import Arrays, backward, batches, close, examples, features, losses, mean, plus, slope, started, values
from sklearn.model_selection import StratifiedKFold
from support import ALL, World, play, prepared, states, world

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.pfedfda import PFedFDA
from lightning_modules.training import Training
from pflsim.data.federated import Examples, Shard
from pflsim.engine.execution import EvalRequest
from pflsim.servers.pfedfda import COVARIANCE, MEANS, lower_triangle, symmetric
from pflsim.servers.pfedfda import PFedFDA as Server

SIZES = (3, 7, 20, 9)
"""Client 0 has one example of each class."""
LR, RIDGE = 0.1, 0.05
Gaussian = tuple[np.ndarray, np.ndarray]


def pfedfda(**settings: Any) -> World:
    client, training = partial(PFedFDA, cov_ridge=RIDGE, **settings), Training(lr=LR, batch_size=4)
    return world(client, Server(), training=training, sizes=SIZES)


# By hand ------------------------------------------------------------------------------------------------------------


def shares(y: np.ndarray) -> np.ndarray:
    return np.array([((y == k).mean() + 1e-4) / (1 + 3e-4) for k in range(3)])


def classifier(gaussian: Gaussian, pi: np.ndarray) -> Gaussian:
    """Weight and bias, by a Cholesky factor."""
    mu, sigma = gaussian
    factor = np.linalg.cholesky((1 - 1e-4) * sigma + 1e-4 * np.trace(sigma) / len(sigma) * np.eye(len(sigma)))
    half = np.linalg.solve(factor, mu.T)
    return np.linalg.solve(factor.T, half).T, np.log(pi) - (half**2).sum(0) / 2


def estimate(z: np.ndarray, y: np.ndarray, common: Gaussian) -> Gaussian:
    """Class means of at least two examples, else the global ones, and the covariance around them."""
    mu = np.array([z[y == k].mean(0) if (y == k).sum() >= 2 else common[0][k] for k in range(3)])
    around = sum(np.outer(a - mu[k], a - mu[k]) for a, k in zip(z, y, strict=True))
    return mu, around / max(len(y) - 1, 1) + RIDGE * np.eye(z.shape[1])


def between(beta: Any, own: Gaussian, common: Gaussian) -> Gaussian:
    mu, sigma = (b * a + (1 - b) * c for b, a, c in zip(np.broadcast_to(beta, 2), own, common, strict=True))
    return mu, sigma


def cross_validation(z: np.ndarray, y: np.ndarray, common: Gaussian) -> Callable[[Any], float]:
    """The sum over two folds of the loss on what is held out, by β."""
    kept = np.array([(y == k).sum() >= 2 for k in y])
    pi, z, y = shares(y), z[kept], y[kept]
    parts = StratifiedKFold(2, shuffle=True, random_state=0).split(z, y)
    folds = [(estimate(z[train], y[train], common), z[held], y[held]) for train, held in parts]

    def loss(beta: Any) -> float:
        found = [(classifier(between(beta, own, common), pi), x, labels) for own, x, labels in folds]
        return sum(losses(x @ weight.T + bias, labels).mean() for (weight, bias), x, labels in found)

    return loss


def check_beta(z: np.ndarray, y: np.ndarray, common: Gaussian, beta: np.ndarray) -> None:
    """No point of a grid is better by more than the search's tolerance, and no end at all."""
    loss = cross_validation(z, y, common)
    found = loss(beta)
    grid = [(a, b) for a in np.linspace(0, 1, 8) for b in np.linspace(0, 1, 8)] if len(beta) == 2 else []
    grid = grid or [(a,) for a in np.linspace(0, 1, 51)]
    assert found <= min(map(loss, grid)) + 2e-3
    assert all(found <= loss((end,) * len(beta)) + 1e-12 for end in (0, 0.5, 1))


def judged(executor: InlineExecutor, client: int, t: int) -> Any:
    """The client's beta and classifier as it is evaluated."""
    request = EvalRequest("personal", "received", (client,), ("test",), t)
    message = executor.downlink(executor.send([client]).downlinks[client])
    with executor.host.module_for(request, client, message) as module:
        return tuple(getattr(module, name).numpy().copy() for name in ("beta", "weight", "bias"))


@pytest.mark.parametrize("single", [False, True])
def test_two_rounds_by_hand(single: bool) -> None:
    """Training under the global Gaussian, the statistics that are sent, their means, and what is judged."""
    with started(pfedfda(single_beta=single)) as executor:
        body = values(states(executor)[0])[:2]
        common = executor.server.state.gaussian[MEANS].numpy().copy(), np.eye(5)
        assert common[0].min() >= 0 and common[0].max() < 1 and len(np.unique(common[0])) == common[0].size
        for t, cohort in ((1, (0, 1, 2)), (2, ALL)):
            trained, sent = play(executor, t, cohort)
            bodies, gaussians = list[Arrays](), list[Gaussian]()
            for client in cohort:
                x, y = examples(executor, client)
                head = list(classifier(common, shares(y)))
                w, state = [*body, *head], states(executor)[client]
                for inputs, labels in batches(executor, client, t):
                    logits = features(w, inputs) @ head[0].T + head[1]
                    w = [*plus(w, -LR, backward(w, inputs, slope(logits, labels)))[:2], *head]
                close(values(state)[:2], w[:2], 1e-9)
                z, beta = features(w, x), state["beta"].numpy()
                if client:
                    check_beta(z, y, common, beta)
                else:
                    assert not beta.any()
                found = between(beta, estimate(z, y, common), common)
                triangle = found[1][np.tril_indices(5)]
                close([sent[client].extra[MEANS].numpy(), sent[client].extra[COVARIANCE].numpy()], [found[0], triangle])
                close([state["weight"].numpy(), state["bias"].numpy()], list(classifier(found, shares(y))), 1e-8)
                bodies.append(w[:2])
                gaussians.append(found)
            weights = [SIZES[client] for client in cohort]
            body, common = mean(bodies, weights), tuple(mean([list(g) for g in gaussians], weights))  # type: ignore
            state = executor.server.state
            close(values(state.weights), body, 1e-9)
            close([state.gaussian[MEANS].numpy(), symmetric(state.gaussian[COVARIANCE], 5).numpy()], list(common), 1e-9)
            for client in ALL:  # client 3 is absent in round 1
                (x, y), (beta, weight, bias) = examples(executor, client), judged(executor, client, t)
                z = features([*body], x)
                if client:
                    check_beta(z, y, common, beta)  # type: ignore[arg-type]
                expected = classifier(between(beta, estimate(z, y, common), common), shares(y))  # type: ignore
                close([weight, bias], list(expected), 1e-8)


# What must hold -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "last"), [("false", 2), ("true", 4)])
def test_all_clients_in_the_last_round(setting: str, last: int) -> None:
    few = ["data=digits", "clients=4", "rounds=3", "fraction=0.5"]
    made = prepared("method=pfedfda", f"method.full_last_round={setting}", *few)
    assert [len(cohort) for cohort in made.plan.cohorts] == [2, 2, last]


def test_beta_stays_where_the_loss_is_not_finite() -> None:
    module = pfedfda().factory.build()
    none = Examples(torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.int64))
    own = Examples(torch.rand(8, 1, 4, 4), torch.tensor([0, 1] * 4))
    module.beta.copy_(torch.tensor([0.25, 0.75]))
    torch.nn.init.constant_(module.get_parameter("net.body.fc1.weight"), torch.nan)
    module.received.store({MEANS: torch.rand(3, 5), COVARIANCE: lower_triangle(torch.eye(5))})
    module.before_evaluation(Shard(0, 3, own, none, none))
    assert module.beta.tolist() == [0.25, 0.75]
