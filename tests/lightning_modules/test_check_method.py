"""`check-method`: every check fails on a method that breaks it, and the command names what is wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.contract import checks
from lightning_modules.contract.checks import Broken, Make
from lightning_modules.contract.command import maker
from lightning_modules.phases import Schedule
from pflsim import cli
from pflsim.config.compose import CONFIGS
from pflsim.data.federated import Shard
from pflsim.errors import RunError
from pflsim.messages import Message, Uplink
from pflsim.servers.base import ServerRule
from pflsim.servers.fedavg import FedAvg

SEEN: list[int] = []
"""What a client remembers in its module, where the simulator does not look."""


class Counts(ClientModule):
    lockstep = True
    count = 0

    def objective(self, batch: Batch) -> Terms:
        self.count += 1
        return super().objective(batch)


class SendsMore(ClientModule):
    def reply(self, shard: Shard) -> Uplink:
        up = super().reply(shard)
        return replace(up, weights={**up.weights, "more": torch.zeros(1)})


class Infinite(ClientModule):
    def objective(self, batch: Batch) -> Terms:
        return {"ce": super().objective(batch)["ce"] * torch.inf}


class Climbs(ClientModule):
    def objective(self, batch: Batch) -> Terms:
        return {"ce": -super().objective(batch)["ce"]}


class Compares(ClientModule):
    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(inputs) - super().predict(inputs).mean(0)


class Remembers(ClientModule):
    lockstep = True

    def before_training(self, shard: Shard) -> None:
        SEEN.append(shard.client)
        with torch.no_grad():
            self.net.get_parameter("head.bias").add_(0.01 * len(SEEN))

    before_evaluation = before_training


class Idle(ClientModule):
    def schedule(self) -> Schedule:
        return ()

    def receive(self, downlink: Message) -> None: ...


class Writes(ClientModule):
    def receive(self, downlink: Message) -> None:
        super().receive(downlink)
        downlink.weights["net.head.bias"].add_(1)


class NeedsWeights(ClientModule):
    def receive(self, downlink: Message) -> None:
        super().receive(downlink)
        _ = downlink.weights["net.head.bias"]


class NothingForNewcomers(FedAvg):
    def join(self, state: Any, client: int) -> Message:
        return Message()


class SendsStatistics(ClientModule):
    def shared_buffers(self) -> tuple[str, ...]:
        return self.shared.buffers(self)


class OtherOptimizer(ClientModule):
    def configure_optimizers(self) -> list[Any]:
        super().configure_optimizers()
        return [SGD(self.parameters(), 0.5)]


class Keeps(FedAvg):
    def fuse(self, state: Any, uplinks: Any) -> Any:
        fused = super().fuse(state, uplinks)
        return replace(fused, weights=uplinks[0].weights)


def making(client: type[ClientModule], rule: ServerRule[Any] | None = None) -> Make:
    """Prepare runs of a class of this file."""
    make = maker("fedavg", (), [CONFIGS])

    def made(*more: str) -> Any:
        run = make(*more)
        factory = replace(run.factory, client=client)
        federation = replace(run.federation, initial=factory.build().shared_tensors())
        return replace(run, factory=factory, federation=federation, rule=rule or run.rule)

    return made


@pytest.mark.parametrize(
    ("check", "client", "rule"),
    [
        (checks.rounds_run, Counts, None),
        (checks.only_shared_tensors_are_sent, SendsMore, None),
        (checks.losses_are_named_and_finite, Infinite, None),
        (checks.training_helps, Climbs, None),
        (checks.clients_are_independent, Remembers, None),
        (checks.absent_clients_keep_their_state, Idle, None),
        (checks.evaluation_changes_nothing, Remembers, None),
        (checks.evaluated_together_as_alone, Compares, None),
        (checks.received_tensors_are_not_written, Writes, None),
        (checks.received_tensors_are_not_written, ClientModule, Keeps()),
        (checks.resumed_equals_straight, Remembers, None),
        (checks.newcomers_join, NeedsWeights, NothingForNewcomers()),
        (checks.batch_norm_works, SendsStatistics, None),
        (checks.takes_uplink, Remembers, None),
        (checks.takes_attack, Remembers, None),
        (checks.takes_aggregator, Remembers, None),
        (checks.takes_privacy_of_clients, Remembers, None),
        (checks.takes_privacy_of_examples, Remembers, None),
        (checks.lockstep_equals_loop, Remembers, None),
        (checks.trainer_equals_loop, OtherOptimizer, None),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_check_can_fail(check: Callable[[Make], None], client: Any, rule: Any) -> None:
    with pytest.raises((Broken, RunError)):
        check(making(client, rule))


def test_all_checks_are_tested() -> None:
    marks: Any = test_every_check_can_fail.pytestmark  # type: ignore[attr-defined]
    tested = {row[0] for mark in marks if mark.name == "parametrize" for row in mark.args[1]}
    assert tested == {*checks.CHECKS}


MEDIAN, BY_FILE = "method.server=mine.median.Median", ["method=body_prox", "--config-dir", "mine/configs"]


@pytest.mark.parametrize(
    "words",
    [
        ["mine.body_prox", "method.mu=0.5"],
        ["mine.body_prox.BodyProx", MEDIAN],
        [*BY_FILE, MEDIAN],
        pytest.param([*BY_FILE, "--ray"], marks=pytest.mark.ray),
    ],
)
@pytest.mark.slow
def test_the_methods_of_the_page(mine: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-method", *words]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(checks.CHECKS) + ("--ray" in words) and "passed" in last
    assert {line.split()[0] for line in lines} <= {"ok", "skipped", "refused"}, lines


def test_what_is_wrong_is_named(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "from lightning_modules.base import ClientModule\n\nclass A(ClientModule):\n    def reply(self, shard):\n"
    (mine / "mine" / "buggy.py").write_text(f"{text}        return {{}}['gone']\n")
    assert cli.main(["check-method", "mine.buggy"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAILED") and "KeyError: 'gone'" in out and "buggy.py, line 5" in out


WRONG = {
    "fedprxo": "did you mean fedprox",
    "mine.body_prox.BodyProxx": "BodyProx",
    "mine.median": "mine.median.Median",
    "mine.body_prox method.mu=-1": "method.mu=-1",
    "mine.body_prox method.my=1": "method.my",
}


@pytest.mark.parametrize(("words", "found"), WRONG.items())
def test_wrong_names_and_settings(mine: Path, words: str, found: str, refused: Callable[..., str]) -> None:
    assert found in refused("check-method", *words.split())
