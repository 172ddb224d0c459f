"""FedCP: a policy splits each example's features between a private and a global head."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SIZES, differences, evaluates, losses, started
from support import BATCH_NORM, World, dataset, play, states, world

from lightning_modules.methods.fedcp import FedCP
from lightning_modules.nets.cnn import MapCnn
from lightning_modules.training import Training
from pflsim.messages import Message
from pflsim.servers.gpfl import GPFL as Server

LR, LAM = 0.2, 0.7
Named = dict[str, np.ndarray]


def fedcp(training: Training | None = None, model: Any = None, data: Any = None, **settings: Any) -> World:
    training = training or Training(lr=LR, batch_size=4)
    return world(partial(FedCP, **settings), Server(), training=training, model=model, data=data)


def rectified(w: Named, x: np.ndarray) -> np.ndarray:
    return np.maximum(x @ w["net.body.fc1.weight"].T + w["net.body.fc1.bias"], 0)


def ensemble(w: Named, context: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Scores of both heads, [B, C]; the policy's layer normalisation has a biased variance."""
    z = rectified(w, x)
    gate = z * (context / np.sqrt((context**2).sum()))
    hidden = gate @ w["policy.0.weight"].T + w["policy.0.bias"]
    hidden = (hidden - hidden.mean(1, keepdims=True)) / np.sqrt(hidden.var(1, keepdims=True) + 1e-5)
    first, second = np.split(np.maximum(hidden * w["policy.1.weight"] + w["policy.1.bias"], 0), 2, axis=1)
    r = 1 / (1 + np.exp(second - first))
    heads = (r, w["net.head.weight"], w["net.head.bias"]), (1 - r, w["global_head.weight"], w["global_head.bias"])
    return sum(share * z @ weight.T + bias for share, weight, bias in heads)


def discrepancy(a: np.ndarray, b: np.ndarray) -> float:
    """Pair by pair, the diagonal included."""
    total = 0.0
    for sign, left, right in ((1, a, a), (1, b, b), (-2, a, b)):
        for u in left:
            total += sign * sum(np.exp(-((u - v) ** 2).sum() / (2 * s)) for v in right for s in (10, 15, 20, 50))
    return total / len(a) ** 2


def client(w: World) -> tuple[Any, Named]:
    """A client that has received random values, and the values by name."""
    module, rng = w.factory.build().double(), np.random.default_rng(5)
    values = {k: rng.normal(0, 0.8, size=tuple(v.shape)) for k, v in module.named_parameters()}
    private = {k: torch.from_numpy(v) for k, v in values.items() if k.startswith("net.head.")}
    module.load_state_dict({**module.state_dict(), **private})
    module.receive(Message(weights={k: torch.from_numpy(v) for k, v in values.items() if k not in private}))
    return module, values


def test_objective_and_steps_by_hand() -> None:
    """Both terms, and three steps along the gradient of their sum, by central differences of the NumPy terms."""
    module, w = client(fedcp(lam=LAM))
    context, received = w["net.head.weight"].sum(0), {k: v.copy() for k, v in w.items()}
    trained = [k for k in w if not k.startswith("global_head.")]
    step, rng = module.make_step(*module.schedule()), np.random.default_rng(1)

    def terms(values: Named, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        apart = discrepancy(rectified(values, x), rectified(received, x))
        return losses(ensemble(values, context, x), y).mean(), LAM * apart

    for _ in range(3):
        x, y = rng.random((6, 16)), rng.integers(3, size=6)
        batch = torch.from_numpy(x.reshape(6, 1, 4, 4)), torch.from_numpy(y)
        np.testing.assert_allclose(module.predict(batch[0]).detach(), ensemble(w, context, x), rtol=1e-9)
        found = {name: float(value) for name, value in module.optimise(batch, step).items()}
        assert found == pytest.approx(dict(zip(("ce", "mmd"), terms(w, x, y), strict=True)), rel=1e-9, abs=1e-12)
        slopes = {key: differences(lambda x=x, y=y: sum(terms(w, x, y)), w[key]) for key in trained}
        for key in trained:
            got = module.get_parameter(key).detach().numpy().copy()
            np.testing.assert_allclose(got, w[key] - LR * slopes[key], rtol=1e-6, atol=2e-8, err_msg=key)
            w[key] = got  # no error of the differences is carried on


def test_what_is_sent_fused_and_judged() -> None:
    """Means of body, policy and (h_i + h)/2; an absent client is judged with all three, and its own context."""
    with started(fedcp(lam=LAM)) as executor:
        play(executor, 1)
        before = states(executor)[1]["net.head.weight"].clone()
        _, sent = play(executor, 2, (0, 2))
        now = {c: {k: v.numpy() for k, v in s.items()} for c, s in states(executor).items()}
        common = {k: v.numpy() for k, v in executor.server.state.weights.items()}
        for key, value in common.items():
            own = [now[c][key] for c in (0, 2)]
            if key.startswith("global_head."):
                own = [(now[c][key] + now[c][key.replace("global_head", "net.head")]) / 2 for c in (0, 2)]
            np.testing.assert_allclose(value, np.average(own, 0, [SIZES[0], SIZES[2]]), rtol=1e-12)
            np.testing.assert_array_equal(sent[0].weights[key].numpy(), own[0])
        assert not any(key.startswith("net.head.") for key in common)
        np.testing.assert_array_equal(now[1]["net.head.weight"], before)

        def judged(c: int, x: np.ndarray) -> np.ndarray:
            return ensemble({**now[c], **common}, now[c]["net.head.weight"].sum(0), x)

        evaluates(executor, 2, judged, "personal received")


@pytest.mark.parametrize("model", [None, BATCH_NORM])
def test_the_first_step_of_a_round_does_not_depend_on_the_penalty(model: Any) -> None:
    """The features are those of the received body, in training mode too; later steps do."""
    data = dataset(shape=(1, 8, 8)) if model else None

    def moved(lam: float, steps: int) -> dict[str, torch.Tensor]:
        w = fedcp(Training(lr=LR, batch_size=4, local_steps=steps), model, data, lam=lam)
        with started(w) as executor:
            (report, *_) = play(executor, 1)[0].reports
            assert abs(report.losses.get("mmd", 0.0)) < 1e-14 or steps > 1
            return states(executor)[2]

    one, other = moved(0.0, 1), moved(9.0, 1)
    assert all(torch.allclose(value.double(), other[key].double(), rtol=1e-12) for key, value in one.items())
    one, other = moved(0.0, 3), moved(9.0, 3)
    assert not all(torch.allclose(value.double(), other[key].double(), rtol=1e-9) for key, value in one.items())


def test_noise_in_training_only() -> None:
    torch.manual_seed(0)
    w = fedcp(gumbel=True)
    module, _ = client(w)
    x, y = torch.rand(4, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    assert len({module.objective((x, y))["ce"].item() for _ in range(20)}) > 1  # two draws may choose the same features
    assert torch.equal(module.predict(x), module.predict(x))


def test_context_of_a_head_of_several_layers_on_feature_maps() -> None:
    """The sum of the rows of the product of the weights; no context where they are 0."""
    w = fedcp(model=partial(MapCnn, hidden_channels=2, channels=3, kernel=3, padding=1, hidden=4))
    w = replace(w, dataset=dataset(shape=(1, 8, 8)), factory=replace(w.factory, input_shape=(1, 8, 8)))
    module = w.factory.build()
    first, last = (part.weight.detach() for part in module.net.head.modules() if isinstance(part, torch.nn.Linear))
    module.receive(Message())
    expected = (last.double() @ first.double()).sum(0)
    torch.testing.assert_close(module.context.double(), expected / expected.norm(), rtol=1e-5, atol=1e-6)
    torch.nn.init.zeros_(first)
    module.receive(Message())
    assert module.context.abs().max() == 0 and module.predict(torch.rand(2, 1, 8, 8)).isfinite().all()
