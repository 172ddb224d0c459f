"""The transformer for token sequences against NumPy, its padding, and clients in lockstep."""

from functools import partial

import numpy as np
import torch
from support import softmax, trained_states, world

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.nets.text_transformer import TextTransformer
from pflsim.data.dataset import Dataset
from pflsim.engine.execution import TrainTask
from pflsim.servers.fedavg import FedAvg as FedAvgServer

SMALL = partial(TextTransformer, width=4, heads=2, vocabulary=7)


def tokens(examples: int, length: int = 5) -> np.ndarray:
    """Sequences of 1 to 6 with padding at their end, at least one token each."""
    rng = np.random.default_rng(0)
    found = rng.integers(1, 7, (examples, length))
    found[np.arange(length) >= rng.integers(1, length + 1, examples)[:, None]] = 0
    return found


def normalised(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias


def numpy_features(w: dict[str, np.ndarray], sequence: np.ndarray, heads: int, layers: int) -> np.ndarray:
    """Features of one sequence, whose padding is cut off."""
    present = sequence[sequence != 0]
    x = w["tokens.weight"][present] + w["positions.weight"][: len(present)]
    for at in range(layers):
        own = {name.removeprefix(f"layers.{at}."): value for name, value in w.items()}

        def linear(name: str, value: np.ndarray, own: dict[str, np.ndarray] = own) -> np.ndarray:
            return value @ own[f"{name}.weight"].T + own[f"{name}.bias"]

        q, k, v = np.split(linear("qkv", normalised(x, own["norm1.weight"], own["norm1.bias"])), 3, axis=1)
        d = q.shape[1] // heads
        mixed = [
            softmax(q[:, h] @ k[:, h].T / np.sqrt(d)) @ v[:, h] for h in (slice(n * d, n * d + d) for n in range(heads))
        ]
        x = x + linear("out", np.concatenate(mixed, axis=1))
        inner = normalised(x, own["norm2.weight"], own["norm2.bias"])
        x = x + linear("fc2", np.maximum(linear("fc1", inner), 0))
    return normalised(x, w["norm.weight"], w["norm.bias"]).mean(0)


def test_features_and_logits_by_numpy() -> None:
    torch.manual_seed(0)
    net = SMALL((5,), 3).double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)
    x = tokens(6)
    w = {name: value.detach().numpy() for name, value in net.body.named_parameters()}
    expected = np.stack([numpy_features(w, row, heads=2, layers=2) for row in x])
    with torch.no_grad():
        assert np.abs(net.body(torch.from_numpy(x)).numpy() - expected).max() < 1e-12
        head = [value.numpy() for value in (net.head.weight, net.head.bias)]  # type: ignore[union-attr]
        assert np.abs(net(torch.from_numpy(x)).numpy() - (expected @ head[0].T + head[1])).max() < 1e-12
    assert net.feature_shape == (4,)


def test_a_sequence_of_padding_alone_has_finite_scores_and_gradients() -> None:
    net = SMALL((5,), 3)
    scores = net(torch.tensor([[0, 0, 0, 0, 0], [0, 3, 0, 2, 0]]))
    scores.sum().backward()
    assert scores.isfinite().all() and all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_clients_in_lockstep_train_as_in_the_loop() -> None:
    x = tokens(120)
    data = Dataset("made_up", x, np.arange(120) % 3, 3, 90)
    results = []
    for stacks in ((), ((2, 0, 3, 1),)):
        executor = world(FedAvg, FedAvgServer(), model=SMALL, data=data, stacks=stacks).inline()
        results.append(trained_states(executor, executor.run(TrainTask(1), executor.send((0, 1, 2, 3)))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert not torch.equal(results[0][0]["net.head.weight"], results[0][1]["net.head.weight"])
