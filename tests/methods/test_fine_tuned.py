"""FedBABU and Per-FedAvg: models that are fine-tuned before they are evaluated."""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from by_hand import SIZES, Arrays, batches, close, evaluates, examples, gradient, losses, mean, plus, scores, values
from support import World, after, dropout_mlp, normed, rounds, same, states, world
from torch import Tensor

from lightning_modules.base import Batch, ClientModule, Evaluate, Evaluation, Terms
from lightning_modules.losses import cross_entropy
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedbabu import FedBABU
from lightning_modules.methods.per_fedavg import PerFedAvg
from lightning_modules.model_checks import check_batches
from lightning_modules.phases import Phase
from lightning_modules.training import Training
from pflsim.data.federated import Examples, Shard
from pflsim.engine.execution import EvalRequest
from pflsim.errors import SettingsError
from pflsim.messages import Message
from pflsim.seeding import seeded_global
from pflsim.servers.fedavg import FedAvg as Server

# FedBABU

HEAD = ["net.head.weight", "net.head.bias"]
LR = 0.3


def fedbabu(finetune: str = "both", epochs: int = 2, **settings: Any) -> World:
    client = partial(FedBABU, finetune=finetune, finetune_epochs=epochs)
    return world(client, Server(), training=Training(lr=LR, batch_size=4), **settings)


def stepped(w: Arrays, x: Any, y: Any, trained: str) -> Arrays:
    """A step of SGD of a part of the net."""
    new = plus(w, -LR, gradient(w, x, y))
    return {"body": new[:2] + w[2:], "head": w[:2] + new[2:], "both": new}[trained]


@pytest.mark.parametrize("finetune", ["head", "body", "both"])
def test_two_rounds_and_an_evaluation_by_hand(finetune: str) -> None:
    """Bodies under the initial head, their mean, and the copy that is fine-tuned for two epochs."""
    with by_hand.started(fedbabu(finetune)) as executor:
        common = values(states(executor)[0])
        for t in (1, 2):
            ends = []
            for client in range(4):
                w = common
                for x, y in batches(executor, client, t):
                    w = stepped(w, x, y, "body")
                ends.append(w)
            common = mean(ends, SIZES)
        rounds(executor, 2, 4)
        for client, state in states(executor).items():
            close(values(state), ends[client])
        close(values(executor.server.state.weights), common[:2])

        def tuned(client: int, x: Any) -> Any:
            w, own = common, examples(executor, client)
            with seeded_global(0, "evaluate", client, 2):
                orders = [torch.randperm(SIZES[client]) for _ in range(2)]
            for rows in (rows.numpy() for order in orders for rows in order.split(4)):
                w = stepped(w, own[0][rows], own[1][rows], finetune)
            return scores(w, x)

        evaluates(executor, 2, tuned, "personal received")
        evaluates(executor, 2, lambda client, x: scores(common, x), "global received")


def test_clients_that_start_differently_have_one_head() -> None:
    found = after(fedbabu(init="per_client"), 1)
    assert all(torch.equal(found[0][key], found[1][key]) for key in HEAD)


@pytest.mark.parametrize(("finetune", "moves"), [("head", False), ("both", True)])
def test_running_statistics_move_only_with_the_body(finetune: str, moves: bool) -> None:
    w = fedbabu(finetune, model=normed)
    module, own = w.factory.build(), w.inline().host.shards[2]
    before = {k: v.clone() for k, v in module.state_dict().items()}
    module.before_evaluation(own)
    changed = {k for k, v in module.state_dict().items() if not torch.equal(v, before[k])}
    assert ("net.body.2.running_mean" in changed) == moves and set(HEAD) <= changed


# Per-FedAvg

ALPHA, BETA, DELTA = 0.4, 0.3, 1e-2


def numbers(client: Any = PerFedAvg, **settings: Any) -> tuple[ClientModule, Arrays, np.random.Generator]:
    """A client in float64 with received weights that are not those it was built with."""
    w = world(partial(client, alpha=ALPHA, **settings), Server(), training=Training(lr=BETA))
    module, rng = w.factory.build().double(), np.random.default_rng(5)
    start = [rng.normal(size=v.shape) for v in values(module.state_dict())]
    module.receive(
        Message(weights={f"net.{k}": torch.from_numpy(v) for k, v in zip(by_hand.NAMES, start, strict=True)})
    )
    return module, start, rng


def drawn(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray, Batch]:
    x, y = rng.uniform(size=(size, 16)), rng.integers(0, 3, size=size)
    return x, y, (torch.from_numpy(x).reshape(size, 1, 4, 4), torch.from_numpy(y))


def step(module: ClientModule, batch: Batch) -> Terms:
    return module.optimise(batch, module.make_step(module.schedule()[0]))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [6, 7, 2])
def test_first_order_step(size: int) -> None:
    """w ← w − β·∇f(w − α·∇f(w, D), D'), D the first ⌊B/2⌋ examples and D' the others; the loss is that of w̃ on D'."""
    module, w, rng = numbers()
    x, y, batch = drawn(rng, size)
    terms, m = step(module, batch), size // 2
    inner = plus(w, -ALPHA, gradient(w, x[:m], y[:m]))
    close(values(module.state_dict()), plus(w, -BETA, gradient(inner, x[m:], y[m:])))
    assert math.isclose(float(terms["ce"]), losses(scores(inner, x[m:]), y[m:]).mean(), rel_tol=1e-10)


def test_the_runs_optimiser_settings_act_on_the_outer_step_alone() -> None:
    """In round 3 with momentum, weight decay and a decaying rate: w̃ is w − α·∇f(w, D) all the same."""
    settings = Training(lr=BETA, lr_decay=0.5, momentum=0.6, weight_decay=0.2)
    w0 = world(partial(PerFedAvg, alpha=ALPHA), Server(), training=settings)
    module, rng = w0.factory.build().double(), np.random.default_rng(6)
    module.round_number = 3
    w = values(module.state_dict())
    speed, ready = [np.zeros_like(v) for v in w], module.make_step(module.schedule()[0])  # type: ignore[arg-type]
    for _ in range(3):
        x, y, batch = drawn(rng, 6)
        module.optimise(batch, ready)
        found = gradient(plus(w, -ALPHA, gradient(w, x[:3], y[:3])), x[3:], y[3:])
        speed = [0.6 * s + g + 0.2 * v for s, g, v in zip(speed, found, w, strict=True)]
        w = plus(w, -BETA * 0.25, speed)
        close(values(module.state_dict()), w)


def test_the_step_before_evaluation_is_in_training_mode() -> None:
    """Batch normalisation takes the statistics of the shard, whatever mode the model was in."""
    module = world(partial(PerFedAvg, alpha=ALPHA), Server(), model=normed).factory.build().double()
    _, _, (inputs, labels) = drawn(np.random.default_rng(8), 12)
    mine, found = Examples(inputs, labels), {}
    for mode in (True, False):
        net = copy.deepcopy(module.net).train(mode)
        cross_entropy(net(inputs), labels).backward()
        torch.optim.SGD(net.parameters(), lr=ALPHA).step()
        found[mode] = [p.detach() for p in net.parameters()]
    module.eval()
    module.before_evaluation(Shard(0, 3, mine, mine, mine))
    for value, expected, other in zip(module.net.parameters(), found[True], found[False], strict=True):
        torch.testing.assert_close(value.detach(), expected, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(expected, other, rtol=1e-4)


def test_hessian_free_step() -> None:
    """w ← w − β·(g − α·d), d = [∇f(w + δg, D) − ∇f(w − δg, D)] / 2δ."""
    module, w, rng = numbers(variant="hf", delta=DELTA)
    x, y, batch = drawn(rng, 6)
    step(module, batch)
    g = gradient(plus(w, -ALPHA, gradient(w, x[:3], y[:3])), x[3:], y[3:])
    ends = [gradient(plus(w, s * DELTA, g), x[:3], y[:3]) for s in (1, -1)]
    d = [(a - b) / (2 * DELTA) for a, b in zip(*ends, strict=True)]
    close(values(module.state_dict()), plus(w, -BETA, plus(g, -ALPHA, d)))


class SecondHalves(FedAvg):
    """FedAvg on the second half of every mini-batch."""

    def gradients(self, evaluate: Evaluate, values: Sequence[Tensor], size: int) -> Evaluation:
        return evaluate(values, slice(size // 2, size))


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_without_the_inner_step_it_is_fedavg_on_the_second_halves(variant: str) -> None:
    """α=0 to the bit; with α it is not. Sizes give batches of 4, 3, 1 and others."""
    sizes, training = (12, 7, 21, 9), Training(lr=0.1, batch_size=4)

    def trained(client: Any) -> dict[int, dict[str, Tensor]]:
        executor = world(client, Server(), sizes=sizes, training=training).inline()
        rounds(executor, 3, 4)
        return states(executor)

    average = trained(SecondHalves)
    assert same(trained(partial(PerFedAvg, alpha=0.0, variant=variant)), average)
    assert not same(trained(partial(PerFedAvg, alpha=0.1, variant=variant)), average)


def test_one_example_takes_both_steps() -> None:
    """D = D': a batch of one example is neither skipped nor trained without its inner step."""
    module, w, rng = numbers()
    x, y, batch = drawn(rng, 1)
    step(module, batch)
    close(values(module.state_dict()), plus(w, -BETA, gradient(plus(w, -ALPHA, gradient(w, x, y)), x, y)))
    executor = world(PerFedAvg, Server(), sizes=(1, 7)).inline()
    assert all(math.isfinite(v) for report in rounds(executor, 2, 2) for v in report.losses.values())


def test_both_ends_of_the_difference_see_the_same_dropout() -> None:
    """Otherwise they differ by the noise of the masks over 2δ, hundreds of times the gradient."""
    w = world(partial(PerFedAvg, alpha=0.1, variant="hf", delta=1e-4), Server(), model=dropout_mlp)
    module = w.factory.build().double().train()
    parameters = list(module.net.parameters())
    _, _, batch = drawn(np.random.default_rng(0), 12)
    torch.manual_seed(3)
    terms = module.compute_gradients(batch, Phase(), parameters)
    size = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))
    assert math.isfinite(float(terms["ce"])) and size < 10


def test_adaptation_is_one_step_on_the_whole_shard() -> None:
    """w − α·∇f(w) with f the mean over all training examples, however many passes the gradient takes."""
    module, w, rng = numbers()
    x, y, (inputs, labels) = drawn(rng, 2500)
    mine = Examples(inputs, labels)
    module.before_evaluation(Shard(0, 3, mine, mine, mine))
    close(values(module.state_dict()), plus(w, -ALPHA, gradient(w, x, y)))
    empty = Examples(inputs[:0], labels[:0])
    module.before_evaluation(Shard(0, 3, empty, empty, empty))
    close(values(module.state_dict()), plus(w, -ALPHA, gradient(w, x, y)))


def test_evaluated_after_one_step_on_a_copy() -> None:
    """The personal figure is the server's model after one step on the client's training data; nothing is kept."""
    with by_hand.started(world(PerFedAvg, Server(), training=Training(lr=0.7, batch_size=4))) as executor:
        rounds(executor, 2, 4)
        before, common = states(executor), values(executor.server.state.weights)

        def adapted(client: int, x: np.ndarray) -> np.ndarray:
            return scores(plus(common, -0.7, gradient(common, *examples(executor, client))), x)

        evaluates(executor, 2, adapted, "personal received")
        evaluates(executor, 2, lambda client, x: scores(common, x), "global received")
        assert same(before, states(executor))


def test_batch_normalisation_needs_two_examples_in_either_half() -> None:
    w = world(PerFedAvg, Server(), sizes=(3, 9), model=normed)
    module = w.factory.build()
    assert module.smallest_batch == 4 and world(PerFedAvg, Server()).factory.build().smallest_batch == 1
    with pytest.raises(SettingsError, match="client 0"):
        check_batches(module, w.partition, 4)
    executor = world(PerFedAvg, Server(), sizes=(5, 9, 11), training=Training(batch_size=4), model=normed).inline()
    rounds(executor, 2, 3)
    executor.evaluate(EvalRequest("personal", "received", (0, 1, 2), ("test",)))
