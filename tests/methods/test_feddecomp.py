"""FedDecomp: the sum of a shared weight and a private one of low rank."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SIZES, Arrays, batches, close, evaluates, gradient, mean, plus, scores, started, values
from support import ALL, World, normed, play, rounds, run_cohorts, same, states, steps_of, world

from lightning_modules.methods.feddecomp import FedDecomp
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest
from pflsim.servers.feddecomp import FedDecomp as Server

LR, RANKS = 0.3, (2, 1)
"""⌊0.4·min(5, 16)⌋ and ⌊0.4·min(3, 5)⌋."""


def feddecomp(weighting: Any = "samples", training: Training | None = None, **given: Any) -> World:
    made = {key: given.pop(key) for key in ("model", "data", "sizes", "adjust") if key in given}
    training = training or Training(lr=LR, batch_size=4)
    return world(partial(FedDecomp, **given), Server(weighting=weighting), training=training, **made)


def factors(state: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """A and B of both layers."""
    found = []
    for name in ("net/body/fc1/weight", "net/head/weight"):
        found.append(tuple(state[f"{part}.{name.removeprefix('net/')}"].double().numpy().copy() for part in "ab"))
    return found


def whole(sigma: Arrays, own: list[tuple[np.ndarray, np.ndarray]], scales: tuple[float, float]) -> Arrays:
    """σ + c·BA."""
    found = list(sigma)
    for k, (a, b), c in zip((0, 2), own, scales, strict=True):
        found[k] = sigma[k] + c * b @ a
    return found


@pytest.mark.parametrize(("weighting", "scale"), [("samples", "program"), ("uniform", "one")])
def test_two_rounds_by_hand(weighting: str, scale: Any) -> None:
    """Two epochs of A and B, then one of σ, by the chain rule; the mean of σ; predictions of σ + τ_i and of σ."""
    scales = (1.0, 1.0) if scale == "one" else (1 / RANKS[0], 1 / RANKS[1])
    with started(feddecomp(weighting, scale=scale)) as executor:
        sigma = values(executor.server.state.weights)
        own = [factors(state) for state in states(executor).values()]
        assert [(a.shape, b.shape) for a, b in own[0]] == [((2, 16), (5, 2)), ((1, 5), (3, 1))]
        assert not any(b.any() for _, b in own[0])
        for t in (1, 2):
            ends = []
            for i in range(4):
                steps, w = [*batches(executor, i, t, epochs=3)], sigma
                for number, (x, y) in enumerate(steps):
                    slopes = gradient(whole(w, own[i], scales), x, y)
                    if number >= len(steps) * 2 / 3:
                        w = plus(w, -LR, slopes)
                        continue
                    own[i] = [
                        (a - LR * c * b.T @ slopes[k], b - LR * c * slopes[k] @ a.T)
                        for k, c, (a, b) in zip((0, 2), scales, own[i], strict=True)
                    ]
                ends.append(w)
            sigma = mean(ends, SIZES if weighting == "samples" else [1] * 4)
            play(executor, t)
            for i, state in states(executor).items():
                close(values(state), ends[i])
                for found, expected in zip(factors(state), own[i], strict=True):
                    close([*found], [*expected])
            close(values(executor.server.state.weights), sigma)
            evaluates(executor, t, lambda i, x, w=sigma: scores(whole(w, own[i], scales), x), "personal received")
            evaluates(executor, t, lambda _, x, w=sigma: scores(w, x), "global received")


def test_what_each_phase_moves() -> None:
    """12 examples make 3 batches; running statistics move in both phases, and A not in the first step."""
    seen = steps_of(feddecomp(model=normed).inline())
    assert "".join(name[0] for name, _ in seen) == "p" * 6 + "s" * 3
    moved = {name: set().union(*(m for n, m in seen if n == name)) for name in ("personal", "shared")}
    statistics = {"net.body.2.running_mean", "net.body.2.running_var", "net.body.2.num_batches_tracked"}
    assert moved["personal"] - statistics == {f"{part}.{name}/weight" for part in "ab" for name in ("body/1", "head")}
    assert moved["shared"] - statistics == {
        f"net.{k}.{p}" for k in ("body.1", "body.2", "head") for p in ("weight", "bias")
    }
    assert statistics <= moved["personal"] & moved["shared"]
    assert not any(name.startswith("a.") for name in seen[0][1])
    assert any(name.startswith("a.") for name in seen[1][1])


@pytest.mark.parametrize("model", ["personal", "global"])
def test_statistics_of_the_weights_that_predict(model: Any) -> None:
    """With buffers=recalibrate, batch normalisation sees the inputs that it has in predictions."""
    executor = feddecomp(training=Training(lr=LR, batch_size=5, buffers="recalibrate"), model=normed).inline()
    rounds(executor, 3, 4)
    message = executor.downlink(executor.send([0]).downlinks[0])
    with executor.host.module_for(EvalRequest(model, "received", (0,), ("test",), 3), 0, message) as module:
        weights = module.weights() if model == "personal" else dict(module.net.named_parameters())
        x = executor.host.shards[0].train.batch(slice(None))[0].flatten(1)
        expected = (x @ weights["body.1.weight"].T + weights["body.1.bias"]).mean(0)
        torch.testing.assert_close(module.net.body[2].running_mean, expected, rtol=1e-4, atol=1e-5)


def test_without_shared_epochs_clients_are_independent() -> None:
    made = feddecomp(shared_epochs=0, sizes=(9, 9, 9, 9))
    together, alone = run_cohorts(made, [ALL] * 3), run_cohorts(made, [[2]] * 3)
    assert same({2: states(together)[2]}, {2: states(alone)[2]})
    for key, value in together.server.state.weights.items():
        assert torch.equal(value, made.federation.initial[key])


@pytest.mark.parametrize(
    ("rank_from", "scale", "rank", "c"),
    [("min", "program", 1, 1 / 4), ("min", "one", 1, 1.0), ("out", "program", 4, 1 / 4), ("out", "one", 4, 1.0)],
)
def test_a_kernel_is_the_matrix_of_its_entries_in_order(rank_from: Any, scale: Any, rank: int, c: float) -> None:
    """A convolution 2 → 6 with kernels 3×5, R_c = 0.7: ρ = ⌊0.7·2⌋ or ⌊0.7·6⌋; its output by NumPy."""

    def model(shape: tuple[int, ...], classes: int) -> Net:
        body = torch.nn.Sequential(torch.nn.Unflatten(1, (2, -1)), torch.nn.Conv2d(2, 6, (3, 5)), torch.nn.Flatten())
        return Net(body, torch.nn.Linear(6 * 4 * 4, classes), (96,), classes)

    made = feddecomp(model=model, conv_rank=0.7, rank_from=rank_from, scale=scale)
    module = made.factory.build().double()
    key, rng = "body/1/weight", np.random.default_rng(0)
    assert module.a[key].shape == (rank * 3, 2 * 5) and module.b[key].shape == (6 * 3, rank * 3)
    b = rng.normal(size=(18, rank * 3))
    module.b[key].data = torch.from_numpy(b)
    net, a = module.net, module.a[key].detach().numpy()
    kernel = net.body[1].weight.detach().numpy() + c * (b @ a).reshape(6, 2, 3, 5)
    x = rng.normal(size=(3, 2, 6, 8))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 5), axis=(2, 3))
    maps = np.einsum("bchwij,ocij->bohw", windows, kernel) + net.body[1].bias.detach().numpy()[None, :, None, None]
    expected = maps.reshape(3, -1) @ net.head.weight.detach().numpy().T + net.head.bias.detach().numpy()
    with torch.no_grad():
        net.body[0] = torch.nn.Identity()
        np.testing.assert_allclose(module.predict(torch.from_numpy(x)).numpy(), expected, rtol=1e-9)
        assert not np.allclose(module.predict_global(torch.from_numpy(x)).numpy(), expected)
