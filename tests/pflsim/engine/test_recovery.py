"""Runs that lose a node, or states with it, at every point of a round have the results of a run that loses none."""

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from failing_clients import set_trap
from failing_executor import PLAN, TASKS, Loss, Run, assert_same, files, go
from failure_runs import SIZES, TRAINING, endangered
from support import World, dropout_mlp, pfedcfr, planned, slow_except, world

import pflsim
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedfcd import FedFCD
from lightning_modules.methods.fedfomo import FedFomo
from lightning_modules.methods.fesem import FeSEM
from lightning_modules.methods.floco import Floco
from lightning_modules.methods.l2gd import L2GD
from pflsim.engine.execution import NodeLost, StatesLost
from pflsim.engine.interrupts import Interrupts
from pflsim.engine.plan import RunPlan
from pflsim.errors import RunError
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.fedfcd import FedFCD as FedFCDServer
from pflsim.servers.fedfomo import FedFomo as FedFomoServer
from pflsim.servers.fesem import FeSEM as FeSEMServer
from pflsim.servers.floco import Floco as FlocoServer
from pflsim.servers.l2gd import L2GD as L2GDServer


def four(made: World) -> World:
    """Four clients that train, and one that joins."""
    return replace(made, federation=replace(made.federation, clients=made.federation.clients[:4]))


def five(client: Any, rule: Any, **settings: Any) -> World:
    return four(world(client, rule, sizes=SIZES, training=TRAINING, **{"model": dropout_mlp, **settings}))


METHODS: dict[str, Callable[[], World]] = {
    "fedavg": lambda: five(FedAvg, FedAvgServer(), init="per_client"),
    "in lockstep": lambda: five(FedAvg, FedAvgServer(), init="per_client", stacks=((0, 3),)),
    "pfedcfr": lambda: four(pfedcfr(sizes=SIZES, training=TRAINING)),
    "l2gd": lambda: five(partial(L2GD, p=0.5), L2GDServer(p=0.5)),
    "fedfomo": lambda: five(FedFomo, FedFomoServer(models=2), model=None),
    "fesem": lambda: five(FeSEM, FeSEMServer(groups=2)),
    "fedfcd": lambda: five(
        partial(FedFCD, feature_alignment=True, decision_fusion=True),
        FedFCDServer(feature_alignment=True, decision_fusion=True),
        model=None,
    ),
    "floco": lambda: five(partial(Floco, endpoints=3), FlocoServer(endpoints=3)),
}


def plan(method: str, **settings: Any) -> RunPlan:
    """With an initial round, or a survey before round 3, where the method has one."""
    surveys = frozenset({3}) if method == "floco" else frozenset()
    return planned(PLAN, newcomers=(4,), initial_round=method == "fedfcd", surveys=surveys, **settings)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[World, RunPlan, Run]]:
    """What comes of a method when nothing is lost, with a checkpoint of round 2."""

    @cache
    def run(method: str) -> tuple[World, RunPlan, Run]:
        made, drawn = METHODS[method](), plan(method, checkpoint_every=2)
        return made, drawn, go(made, drawn, tmp_path_factory.mktemp("straight"))

    return run


POINTS = {
    "first downlink": [Loss("send", 1)],
    "downlink": [Loss("send", 4)],
    "train": [Loss("train", 4)],
    "train, with some replies": [Loss("train", 4, after=True)],
    "fuse": [Loss("fuse", 4)],
    "fuse, having fused": [Loss("fuse", 4, after=True)],
    "first fuse, having fused": [Loss("fuse", 1, after=True)],
    "trace": [Loss("uplinks", 2)],
    "trace of a downlink": [Loss("downlink", 4)],
    "trace of the server": [Loss("server_numbers", 2)],
    "evaluate": [Loss("evaluate", 10)],
    "evaluate, having evaluated": [Loss("evaluate", 12, after=True)],
    "checkpoint": [Loss("client_states", 1)],
    "server's state for a checkpoint": [Loss("server_state", 1)],
    "downlinks of newcomers": [Loss("send", 6)],
    "evaluating newcomers": [Loss("evaluate", 16)],
    "fine-tuning": [Loss("finetune", 1)],
    "fine-tuning, having done so": [Loss("finetune", 1, after=True)],
    "storing newcomers' states": [Loss("store", 1)],
    "storing newcomers' states, having done so": [Loss("store", 1, after=True)],
    "evaluating newcomers again": [Loss("evaluate", 17)],
    "the same twice": [Loss("train", 3), Loss("train", 4)],
    "in two rounds": [Loss("fuse", 2, after=True), Loss("evaluate", 15)],
    "in recovery": [Loss("train", 4), Loss("recover", 1), Loss("recover", 2)],
}


@pytest.mark.parametrize("point", slow_except([*POINTS][2::4], POINTS))
def test_a_lost_node_changes_no_bit(point: str, straight: Any, tmp_path: Path) -> None:
    """Wherever it is lost; every round is recorded once."""
    made, drawn, before = straight("fedavg")
    found = go(made, drawn, tmp_path, POINTS[point])
    assert_same(found, before)
    assert [record.round for record in found.listener.records] == [1, 2, 3, 4, 5]
    assert found.executor.faults.restarts == len(POINTS[point])


@pytest.mark.parametrize("losses", [[Loss("train", 5)], [Loss("fuse", 3, after=True), Loss("store", 1, after=True)]])
@pytest.mark.parametrize("method", slow_except(["l2gd"], [name for name in METHODS if name != "fedavg"]))
def test_methods_whose_rounds_depend_on_draws_coins_and_each_other(
    method: str, losses: list[Loss], straight: Any, tmp_path: Path
) -> None:
    made, drawn, before = straight(method)
    assert_same(go(made, drawn, tmp_path, losses), before)


SURVEYS = [Loss("open"), Loss("open", after=True), Loss("fuse", 3), Loss("fuse", 3, after=True), Loss("train", 3)]
INITIAL = [Loss("open", 1), Loss("open", 1, after=True), Loss("fuse", 1), Loss("send", 1)]


@pytest.mark.parametrize(
    ("method", "loss"),
    slow_except(
        [("fedfcd", INITIAL[-1]), ("floco", SURVEYS[1])],
        [*product(["fedfcd"], INITIAL), *product(["floco"], [*SURVEYS, Loss("fuse", 4), Loss("train", 4)])],
    ),
)
def test_initial_rounds_and_surveys(method: str, loss: Loss, straight: Any, tmp_path: Path) -> None:
    """Broken off before, within and after it, and in a later round."""
    made, drawn, before = straight(method)
    found = go(made, drawn, tmp_path, [loss])
    assert_same(found, before)
    assert [record.round for record in found.listener.records] == [*range(method == "floco", 6)]


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("losses", [POINTS["train"], POINTS["first downlink"], POINTS["fine-tuning"]])
def test_lost_states_end_the_simulation(losses: list[Loss], every: int, straight: Any, tmp_path: Path) -> None:
    """Nothing is saved under a wrong round."""
    made, drawn, before = straight("fedavg")
    with pytest.raises(StatesLost):
        go(made, planned(drawn, checkpoint_every=every), tmp_path, [replace(loss, keeps=False) for loss in losses])
    saved = {name: data for name, data in files(tmp_path).items() if name.startswith("checkpoints")}
    assert saved.items() <= before.files.items() and (every or losses[0].call == "finetune" or not saved)


SMALL: dict[str, Any] = {
    "method": "l2gd", "executor": "inline", "clients": 4, "rounds": 5, "fraction": 0.5, "progress": "none",
    "overrides": ["batch_size=50", "model.hidden=[4]", "eval.holdout_clients=1", "tracking.loggers=[csv]"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("lost", "every"),
    [
        ({"send": 1}, 0),
        ({"train": 4}, 2),
        ({"train": 4, "fuse": 5}, 0),
        ({"train": 4, "fuse": 5}, 1),
        ({"finetune": 1}, 2),
    ],
)
def test_the_run_resumes_after_lost_states(
    lost: dict[str, int], every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its newest checkpoint, or from the beginning; callbacks are called once for each round.

    Losses are counted anew after each new checkpoint.
    """
    left, calls = dict(lost), Counter[str]()
    monkeypatch.setattr("ray_actors.run.MAX_NODE_LOSSES", 3 if every == 0 else 2)

    class Losing(InlineExecutor):
        def recover(self) -> None:
            raise StatesLost("states are gone")

    def losing(name: str) -> Callable[..., Any]:
        def call(executor: InlineExecutor, *arguments: Any, **more: Any) -> Any:
            point = TASKS[type(arguments[0])] if name == "run" else name
            calls[point] += 1
            if left.get(point) == calls[point]:
                del left[point]
                raise NodeLost("a node left")
            return getattr(InlineExecutor, name)(executor, *arguments, **more)

        return call

    settings = SMALL | {"checkpoint": {"every": every}}
    before = pflsim.run(run_dir=tmp_path / "straight", **settings)
    for name in ("send", "run", "fuse"):
        setattr(Losing, name, losing(name))
    monkeypatch.setattr("ray_actors.run.InlineExecutor", Losing)
    rounds = list[int]()
    found = pflsim.run(run_dir=tmp_path / "lost", callbacks=[lambda result: rounds.append(result.round)], **settings)
    assert not left and rounds == [1, 2, 3, 4, 5]
    for name in ("per_client.csv", "checkpoints/round_0005/clients_000000.pt", "checkpoints/round_0005/server.pt"):
        assert (found.folder / name).read_bytes() == (before.folder / name).read_bytes()
    metrics = [run.metrics().filter(regex="^(?!seconds)") for run in (found, before)]
    pd.testing.assert_frame_equal(*metrics)


# Clients that fail ----------------------------------------------------------------------------------------------------


def trapped(folder: Path, on_nonfinite: str = "abort") -> World:
    folder.mkdir(exist_ok=True)
    return four(endangered(folder, on_nonfinite=on_nonfinite))


def test_a_round_that_is_broken_off_is_drawn_anew(tmp_path: Path) -> None:
    """A client that failed in it and does not fail again is reported, and no fault is recorded."""
    drawn = planned(PLAN, checkpoint_every=2)
    made = trapped(tmp_path / "traps")
    before = go(made, drawn, tmp_path / "straight", rule="drop")
    set_trap(tmp_path / "traps", "raise_train_3_3")
    assert_same(go(made, drawn, tmp_path / "lost", [Loss("fuse", 3)], rule="drop"), before)
    assert not [*(tmp_path / "traps").iterdir()]


# Being stopped, and errors, in the middle -----------------------------------------------------------------------------


def stopping() -> tuple[Interrupts, Callable[[], BaseException]]:
    """What a signal does inside of what may be broken off."""
    interrupts = Interrupts()

    def signalled() -> BaseException:
        interrupts.requested, interrupts.count = signal.SIGTERM, 1
        return KeyboardInterrupt()

    return interrupts, signalled


@pytest.fixture(scope="module")
def all_saved(tmp_path_factory: pytest.TempPathFactory, straight: Any) -> dict[str, bytes]:
    """The states after every round."""
    made, drawn, _ = straight("fedavg")
    return go(made, planned(drawn, checkpoint_every=1, checkpoint_keep=9), tmp_path_factory.mktemp("all")).files


BROKE = partial(RunError, "it broke")
ENDS = {
    "an error while it recovers": [Loss("train", 4), Loss("recover", 1, raises=BROKE)],
    "an error later": [Loss("evaluate", 9), Loss("evaluate", 13, raises=BROKE)],
}


@pytest.mark.parametrize("losses", [*ENDS.values(), None], ids=[*ENDS, "a signal while it recovers"])
def test_a_run_that_ends_saves_its_last_whole_round(
    losses: list[Loss] | None, straight: Any, all_saved: dict[str, bytes], tmp_path: Path
) -> None:
    made, drawn, _ = straight("fedavg")
    interrupts, signalled = stopping()
    losses = losses or [Loss("train", 4), Loss("recover", 1, raises=signalled)]
    with pytest.raises((RunError, KeyboardInterrupt), match="^(it broke)?$"):
        go(made, drawn, tmp_path, losses, interrupts=interrupts)
    saved = {name: data for name, data in files(tmp_path).items() if name.startswith("checkpoints")}
    assert max(Path(name).parent.name for name in saved) == "round_0003"
    assert all(all_saved[name] == data for name, data in saved.items())


def test_what_is_lost_again_and_again_ends_the_run_with_a_message(straight: Any, tmp_path: Path) -> None:
    made, drawn, _ = straight("fedavg")
    for call, first in (("train", 4), ("recover", 1)):
        losses = [Loss("train", 3), *(Loss(call, time) for time in range(first, 40))]
        with pytest.raises(RunError, match="10th"):
            go(made, drawn, tmp_path / call, losses)
