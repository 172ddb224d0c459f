"""The server's state of every method, saved and read back, goes on to the bit."""

import io
from copy import deepcopy
from typing import Any

import pytest
import torch
from support import METHOD_PARAMS, agree
from test_contract import inline, job

from lightning_modules.contract.checks import tensors_of
from pflsim.engine.execution import ReplyTask, Sent, TrainTask
from pflsim.messages import Message
from pflsim.records.checkpoint_read import from_containers
from pflsim.records.checkpoint_write import to_containers


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(to_containers(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def everything(message: Message) -> dict[str, Any]:
    return {**tensors_of(message), **{f"number {name}": value for name, value in message.numbers.items()}}


@pytest.mark.parametrize("method", METHOD_PARAMS)
def test_a_state_that_was_read_back_goes_on_to_the_bit(method: str) -> None:
    """After every round, also before the first: the same state, the same messages, the same fusion.

    A fusion changes nothing that it is given.
    """
    made = job(method, "rounds=4", "fraction=0.5", "local_epochs=1")
    rule, executor = made.rule, inline(made)
    example = rule.init(made.federation)
    if rule.initial_round:
        executor.fuse(executor.run(ReplyTask(), Sent.nothing(range(4))))
    for number, cohort in enumerate(made.plan.cohorts, start=1):
        state = executor.server.state
        back = from_containers(type(example), through_a_file(state))
        agree(state, back)
        for one, other in (
            (rule.downlinks(state, cohort), rule.downlinks(back, cohort)),
            ({c: rule.join(state, c) for c in (0, 4)}, {c: rule.join(back, c) for c in (0, 4)}),
        ):
            agree(*({c: everything(m) for c, m in side.items()} for side in (one, other)))
        agree(dict(rule.numbers(state)), dict(rule.numbers(back)))
        trained = executor.run(TrainTask(number), executor.send(cohort))
        ups = sorted((up for each in trained.uplinks for up in executor.uplinks(each)), key=lambda up: up.client)
        before = deepcopy(([everything(up) for up in ups], to_containers(state)))
        agree(rule.fuse(state, ups), rule.fuse(back, ups))
        agree(before, ([everything(up) for up in ups], to_containers(state)))
        executor.fuse(trained)
