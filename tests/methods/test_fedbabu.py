"""FedBABU: the body under the initial head; the reported model is fine-tuned on a copy."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from by_hand import SIZES, Arrays, batches, close, evaluates, examples, gradient, mean, plus, scores, started, values
from support import World, after, normed, rounds, states, world

from lightning_modules.methods.fedbabu import FedBABU
from lightning_modules.training import Training
from pflsim.seeding import seeded_global
from pflsim.servers.fedavg import FedAvg as Server

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
    with started(fedbabu(finetune)) as executor:
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
        close([executor.server.state.weights[f"net.body.fc1.{k}"].numpy() for k in ("weight", "bias")], common[:2])

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
