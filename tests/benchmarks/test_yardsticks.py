"""The yardsticks do what ours does."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support import inline
from torch import Tensor

from benchmarks.cases import CASES, overrides, settings_of
from benchmarks.speed import ours, plain, plain_ray
from benchmarks.speed.rounds import expected_steps, forward_flops, step_flops
from lightning_modules.hosts.devices import torch_threads
from lightning_modules.nets.mlp import Mlp
from lightning_modules.prepare import PreparedRun, prepare
from pflsim.config.settings import Settings
from pflsim.engine.execution import TrainTask

pytestmark = pytest.mark.slow


def digits(batch_size: int, rounds: int = 1, lockstep: str = "false") -> Settings:
    """Four clients on the digits, divided and trained as the cases say."""
    case = overrides(CASES["mlp-20"], "loop", rounds, "")
    kept = [line for line in case if not line.startswith(("data", "clients", "batch_size", "lockstep"))]
    return settings_of([*kept, "data=digits", "clients=4", f"batch_size={batch_size}", f"lockstep={lockstep}"])


@pytest.fixture(scope="module")
def job() -> PreparedRun:
    """Full batches: one step for each client."""
    return prepare(digits(batch_size=2000))


@pytest.fixture(scope="module")
def mean_of_ours(job: PreparedRun) -> Mapping[str, Tensor]:
    executor = inline(job)
    executor.fuse(executor.run(TrainTask(1), executor.send(range(4))))
    message = executor.server.global_message()
    return {name.removeprefix("net."): value for name, value in message.weights.items()}


def test_the_plain_loop_averages_to_the_same(job: PreparedRun, mean_of_ours: Mapping[str, Tensor]) -> None:
    loop = plain.PlainLoop(job)
    before = loop.server.state_dict()["head.weight"].clone()
    done, accuracy = loop.round()
    found = loop.server.state_dict()
    assert found.keys() == mean_of_ours.keys() and not torch.equal(before, found["head.weight"])
    for name, value in found.items():
        torch.testing.assert_close(value, mean_of_ours[name], atol=1e-6, rtol=0)
    assert done["steps"] == expected_steps(job) == 4 and 0 <= accuracy <= 1


def test_the_workers_average_to_the_same(job: PreparedRun, mean_of_ours: Mapping[str, Tensor]) -> None:
    with torch_threads(1):  # a worker sets its number for good
        worker = plain_ray.Worker(job.factory, job.dataset, job.partition)
    weights = worker.weights()
    fits = [worker.fit(weights, client) for client in range(4)]
    mean = plain_ray.mean([fit[1] for fit in fits], [len(rows) for rows in job.partition.train])
    for name, value in zip(worker.net.state_dict(), mean, strict=True):
        torch.testing.assert_close(torch.from_numpy(value), mean_of_ours[name], atol=1e-6, rtol=0)
    assert worker.evaluate(mean, 0)[1] == len(job.partition.test[0])


def test_ours_takes_as_many_steps_and_evaluates_as_much(tmp_path: Path) -> None:
    with torch_threads(1):
        yard = plain.measure(prepare(digits(batch_size=10, rounds=2)), threads=1)
    for lockstep in ("false", "true"):
        found = ours.measure(digits(10, rounds=2, lockstep=lockstep), tmp_path / lockstep, growth=True)
        assert found["lockstep"] == (lockstep == "true") and len(found["held_mb"]) == 2
        for key in ("steps", "examples", "evaluated", "up_bytes", "down_bytes"):
            assert found["round"][key] == yard["round"][key], key
        assert found["gflop_train"] == yard["gflop_train"] > yard["gflop_evaluate"] == found["gflop_evaluate"]
        assert found["rounds"] == 1 and found["cores"] == 1 and found["round"]["server"] > 0
        assert sum(found["round"][phase] for phase in ours.PHASES) < found["round"]["total"]


@pytest.mark.parametrize("batch", [1, 10])
def test_an_mlp(batch: int) -> None:
    """Two products for the first layer (its inputs need no gradient) and three for the second, 2·B·in·out each."""
    net = Mlp((1, 28, 28), 10)
    assert step_flops(net, (1, 28, 28), batch) == 2 * batch * (2 * 784 * 100 + 3 * 100 * 10)
    assert forward_flops(net, (1, 28, 28), batch) == 2 * batch * (784 * 100 + 100 * 10)
