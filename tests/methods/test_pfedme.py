"""pFedMe: its equations against NumPy in float64, and what must hold of it."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from by_hand import Arrays, close, evaluates, gradient, losses, plus, scores, started, values
from support import normed, rounds, states, trained_states, world

from lightning_modules.methods.pfedme import PFedMe
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink
from pflsim.servers.pfedme import PFedMe as Server

LR, LAM, K, PERSONAL = 0.05, 6.0, 4, 0.07
KEYS = ["net.body.fc1.weight", "net.body.fc1.bias", "net.head.weight", "net.head.bias"]


def theta_of(module: PFedMe) -> Arrays:
    return [value.detach().numpy().copy() for value in module.personal().values()]


def message(rng: np.random.Generator, like: PFedMe) -> tuple[Arrays, Message]:
    values = [rng.normal(0, 0.5, size=like.get_parameter(k).shape) for k in KEYS]
    return values, Message(weights={k: torch.from_numpy(v) for k, v in zip(KEYS, values, strict=True)})


def test_client_steps() -> None:
    """θ goes on from its last value within a round and starts from the received w in the next; w ← w − ηλ(w − θ).

    The run's decay of the rate, momentum and weight decay act on w alone.
    """
    client = partial(PFedMe, lam=LAM, inner_steps=K, personal_lr=PERSONAL)
    w = world(client, Server(), training=Training(lr=LR, lr_decay=0.5, batch_size=5, momentum=0.6, weight_decay=0.2))
    module, rng = w.factory.build().double(), np.random.default_rng(7)
    for module.round_number in (1, 2):
        common, down = message(rng, module)
        module.receive(down)
        theta, speed = [v.copy() for v in common], [np.zeros_like(v) for v in common]
        steps = [module.make_step(phase) for phase in module.stages()[0].phases]
        for _ in range(3):  # mini-batches
            x, y = rng.uniform(size=(5, 16)), rng.integers(0, 3, size=5)
            batch, terms = (torch.from_numpy(x).reshape(5, 1, 4, 4), torch.from_numpy(y)), {}
            for step in steps:
                terms |= module.optimise(batch, step)
            loss, pull = 0.0, 0.0
            for _ in range(K):
                apart = plus(theta, -1, common)
                loss, pull = losses(scores(theta, x), y).mean(), LAM / 2 * sum((d**2).sum() for d in apart)
                theta = plus(theta, -PERSONAL, plus(gradient(theta, x, y), LAM, apart))
            pulls = plus(plus([0.2 * c for c in common], LAM, common), -LAM, theta)
            speed = plus(pulls, 0.6, speed)
            common = plus(common, -LR * 0.5 ** (module.round_number - 1), speed)
            assert math.isclose(float(terms["personal/ce"]), loss, rel_tol=1e-10)
            assert math.isclose(float(terms["personal/prox"]), pull, rel_tol=1e-10)
            close(theta_of(module), theta)
            close(values(module.state_dict()), common)


@pytest.mark.parametrize("beta", [1.0, 0.3, 2.0])
def test_server_step(beta: float) -> None:
    """w ← (1 − β)·w + β·mean, the clients counting equally however many examples they have."""
    w = world(PFedMe, Server(beta=beta))
    state, rng = w.rule.init(w.federation), np.random.default_rng(1)
    sent = [{k: torch.from_numpy(rng.normal(size=v.shape)).float() for k, v in state.weights.items()} for _ in range(3)]
    ups = [
        Uplink(weights, client=i, num_examples=n) for i, (weights, n) in enumerate(zip(sent, (5, 1, 90), strict=True))
    ]
    fused = w.rule.fuse(state, ups).weights
    for key, old in state.weights.items():
        mean = sum(s[key].double().numpy() for s in sent) / 3
        expected = (1 - beta) * old.double().numpy() + beta * mean
        np.testing.assert_allclose(fused[key].numpy(), expected, rtol=1e-6, atol=1e-6)
    assert w.rule.fuse(state, []) is state


def test_running_variances_stay_positive_beyond_the_mean() -> None:
    """With β=2 parameters go beyond the mean, running statistics do not."""
    w = world(PFedMe, Server(beta=2.0), model=normed)
    executor = w.inline()
    rounds(executor, 3, 4)
    weights = executor.server.state.weights
    (variance,) = [k for k in weights if k.endswith("running_var")]
    ups = [Uplink({**weights, variance: torch.full_like(weights[variance], 0.1 * (i + 1))}, client=i) for i in range(2)]
    fused = w.rule.fuse(executor.server.state, ups).weights
    torch.testing.assert_close(fused[variance], torch.full_like(fused[variance], 0.15))


def test_personal_and_global_figures_are_those_of_theta_and_w() -> None:
    """A public error is to report the initial or the common model for θ: here the losses tell the two apart."""
    with started(world(PFedMe, Server(), training=Training(lr=0.01, batch_size=4))) as executor:
        rounds(executor, 2, 4)
        found = {
            client: {k.replace("/", "."): v for k, v in state.items()} for client, state in states(executor).items()
        }
        common = values(executor.server.state.weights)
        evaluates(executor, 2, lambda client, x: scores(values(found[client], "theta"), x))
        evaluates(executor, 2, lambda client, x: scores(common, x), "global received")
        assert not np.allclose(values(found[0], "theta")[2], values(found[0])[2])


def test_running_statistics_belong_to_theta_and_w_alike() -> None:
    """A model with batch normalisation: one set of running statistics, which moves with θ's K passes and travels."""
    executor = world(partial(PFedMe, inner_steps=3), Server(), model=normed).inline()
    trained = executor.run(TrainTask(1), executor.send([0]))
    state = trained_states(executor, trained)[0]
    (counted,) = [int(value) for key, value in state.items() if key.endswith("num_batches_tracked")]
    assert counted == 3 * trained.reports[0].steps
    assert not any("running" in key and key.startswith("theta") for key in state)
    (up,) = executor.uplinks(trained.uplinks[0])
    assert any("running_mean" in key for key in up.weights)


def test_a_step_of_the_global_model_does_not_go_beyond_the_personal_one() -> None:
    """w − θ shrinks by 1 − lr·λ a step; by default λ is 15, or 1/lr if that is less."""
    with pytest.raises(SettingsError, match=r"method\.lam=15:.*lr\*lam = 3 .*at most 1/lr = 5$"):
        world(partial(PFedMe, lam=15.0), Server(), training=Training(lr=0.2))
    for training, lam in ((Training(lr=0.01), 15.0), (Training(lr=0.1), 10.0)):
        module = world(PFedMe, Server(), training=training).factory.build()
        assert isinstance(module, PFedMe) and module.lam == pytest.approx(lam)
