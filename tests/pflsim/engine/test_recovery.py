"""Runs that lose states at every point of a round and of the recovery have the results of a run that loses none."""

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from failing_clients import ALWAYS, ONCE, set_trap
from failing_executor import COHORTS, PLAN, Loss, Run, Shaky, assert_same, files, go, said
from failure_runs import SIZES, TRAINING, endangered
from support import Records, World, agree, dropout_mlp, pfedcfr, planned, slow_except, world

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedfcd import FedFCD
from lightning_modules.methods.fedfomo import FedFomo
from lightning_modules.methods.fesem import FeSEM
from lightning_modules.methods.floco import Floco
from lightning_modules.methods.l2gd import L2GD
from pflsim.engine.interrupts import Interrupts
from pflsim.engine.plan import RunPlan
from pflsim.errors import RunError
from pflsim.records.checkpoint_read import newest_checkpoint
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.fedfcd import FedFCD as FedFCDServer
from pflsim.servers.fedfomo import FedFomo as FedFomoServer
from pflsim.servers.fesem import FeSEM as FeSEMServer
from pflsim.servers.floco import Floco as FlocoServer
from pflsim.servers.l2gd import L2GD as L2GDServer
from pflsim.types import RoundRecord


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


EVERY = {"no checkpoint": 0, "one in between": 2}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[World, RunPlan, Run]]:
    """What comes of a method when nothing is lost, with checkpoints every so many rounds."""
    known: dict[tuple[str, int], tuple[World, RunPlan, Run]] = {}

    def run(method: str, every: int) -> tuple[World, RunPlan, Run]:
        if (method, every) not in known:
            made, drawn = METHODS[method](), plan(method, checkpoint_every=every)
            known[method, every] = made, drawn, go(made, drawn, tmp_path_factory.mktemp("straight"))
        return known[method, every]

    return run


def losses_of(text: str) -> list[Loss]:
    """What is lost in which call: `fuse 5+` is the fifth fusion, having fused; after `=` the states are left."""
    each = (one.split() for one in text.split(", "))
    return [Loss(call, int(time.rstrip("+=")), keeps="=" in time, after="+" in time) for call, time in each]


POINTS = """send 1|send 4|train 4|train 4+|fuse 4|fuse 4+|fuse 1+|uplinks 2|downlink 4|server_numbers 2|evaluate 10
evaluate 12+|client_states 1|server_state 1|send 6|evaluate 16|finetune 1|finetune 1+|store 1|store 1+|evaluate 17
train 3, train 4|fuse 2+, evaluate 15|train 4, recover 1, recover 2""".replace("\n", "|").split("|")


@pytest.mark.parametrize(
    ("keeps", "every"),
    [
        pytest.param(True, 2, id="states left", marks=pytest.mark.slow),
        pytest.param(False, 0, id="states lost, no checkpoint", marks=pytest.mark.slow),
        pytest.param(False, 2, id="states lost, a checkpoint in between"),
    ],
)
@pytest.mark.parametrize("point", slow_except(POINTS[2::4], POINTS))
def test_wherever_something_is_lost_the_run_comes_out_as_it_was(
    point: str, keeps: bool, every: int, straight: Any, tmp_path: Path
) -> None:
    """And every round is recorded once."""
    made, drawn, before = straight("fedavg", every)
    found = go(made, drawn, tmp_path, [replace(loss, keeps=keeps) for loss in losses_of(point)])
    assert_same(found, before)
    assert [record.round for record in found.listener.records] == [1, 2, 3, 4, 5]
    assert found.executor.faults.restarts == len(losses_of(point))
    again = [phase for phase in found.listener.phases if isinstance(phase, tuple) and phase[1] == "again"]
    assert not (keeps and again)
    if point == "train 4" and not keeps:
        rounds = [1, 2, 3] if every == 0 else [3]
        assert again == [(t, "again", len(set(COHORTS[t - 1]) - set(PLAN.absent(t)))) for t in rounds]


DURING = """train 5, train 6|train 5, fuse 5+|train 5, fuse 5+=|train 5, fuse 5=|train 5, send 6=
train 5, recover 1=, train 6, recover 3""".replace("\n", "|").split("|")


@pytest.mark.slow
@pytest.mark.parametrize("every", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("point", DURING)
def test_something_is_lost_again_while_a_round_is_repeated(
    point: str, every: int, straight: Any, tmp_path: Path
) -> None:
    made, drawn, before = straight("fedavg", every)
    found = go(made, drawn, tmp_path, losses_of(point))
    assert_same(found, before)
    assert len(found.listener.records) == 5


@pytest.mark.parametrize("every", slow_except([2], EVERY.values()))
@pytest.mark.parametrize("losses", [[Loss("train", 5)], [Loss("fuse", 3, after=True), Loss("store", 1, after=True)]])
@pytest.mark.parametrize("method", slow_except(["l2gd"], [name for name in METHODS if name != "fedavg"]))
def test_methods_whose_rounds_depend_on_draws_coins_and_each_other(
    method: str, losses: list[Loss], every: int, straight: Any, tmp_path: Path
) -> None:
    made, drawn, before = straight(method, every)
    assert_same(go(made, drawn, tmp_path, losses), before)


@pytest.mark.parametrize("keeps", slow_except([False], [True, False]))
@pytest.mark.parametrize("loss", [Loss("open", 1), Loss("open", 1, after=True), Loss("fuse", 1), Loss("send", 1)])
def test_the_initial_round(loss: Loss, keeps: bool, straight: Any, tmp_path: Path) -> None:
    """Broken off, and gone through again, where it was the only round so far."""
    made, drawn, before = straight("fedfcd", 0)
    found = go(made, drawn, tmp_path, [replace(loss, keeps=keeps)])
    assert_same(found, before)
    assert [record.round for record in found.listener.records] == [0, 1, 2, 3, 4, 5]
    again = (0, "again", 4) in found.listener.phases
    assert again == (loss.call == "send" and not keeps)


SURVEYS = [Loss("open"), Loss("open", after=True), Loss("fuse", 3), Loss("fuse", 3, after=True), Loss("train", 3)]


@pytest.mark.parametrize("keeps", slow_except([False], [True, False]))
@pytest.mark.parametrize("loss", slow_except(SURVEYS[1:3], [*SURVEYS, Loss("fuse", 4), Loss("train", 4)]))
def test_a_survey(loss: Loss, keeps: bool, straight: Any, tmp_path: Path) -> None:
    """Broken off before, within and after it, and in a later round."""
    made, drawn, before = straight("floco", 0)
    assert_same(go(made, drawn, tmp_path, [replace(loss, keeps=keeps)]), before)


# A session that goes on from a checkpoint -----------------------------------------------------------------------------


def first_session(made: World, drawn: RunPlan, folder: Path) -> None:
    """Three rounds, with a checkpoint of the last one, and of none before."""
    go(made, planned(drawn, cohorts=drawn.cohorts[:3], newcomers=(), checkpoint_every=0), folder)


def resumed(folder: Path) -> Callable[[Shaky], object]:
    found = newest_checkpoint(folder / "checkpoints", print)
    assert found is not None and found.round == 3
    server, clients = found.server(), list(found.clients())
    return lambda executor: executor.inner.restore(server, clients)


@pytest.mark.parametrize("method", slow_except(["l2gd"], ["fedavg", "l2gd", "fedfcd"]))
@pytest.mark.parametrize("losses", [[Loss("train", 1)], [Loss("train", 2)], [Loss("finetune", 1)]])
@pytest.mark.slow
def test_a_run_that_was_resumed(method: str, losses: list[Loss], straight: Any, tmp_path: Path) -> None:
    """It goes back to the checkpoint it was resumed from, and repeats its own rounds."""
    made, drawn, before = straight(method, 0)
    first_session(made, drawn, tmp_path)
    found = go(made, drawn, tmp_path, losses, done=3, begin=resumed(tmp_path))
    assert found.records == before.records[-2:] and found.joined == before.joined
    agree([found.states, found.server], [before.states, before.server])
    again = [phase[0] for phase in found.listener.phases if isinstance(phase, tuple) and phase[1] == "again"]
    assert again == {"train": [[], [4]][losses[0].time - 1], "finetune": []}[losses[0].call]


@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.slow
def test_without_its_checkpoint_it_ends_with_words(time: int, straight: Any, tmp_path: Path) -> None:
    """Its records do not say which clients reported in earlier rounds; no incomplete state is saved."""
    made, drawn, _ = straight("fedavg", 0)
    first_session(made, drawn, tmp_path)
    begin = resumed(tmp_path)
    (tmp_path / "checkpoints" / "round_0003" / "clients_000000.pt").write_bytes(b"damaged")
    before = files(tmp_path)
    done = 2 + time
    with pytest.raises(RunError, match=f"round {done} cannot be computed again.*no checkpoint of this session"):
        go(made, drawn, tmp_path, [Loss("train", time)], done=3, begin=begin)
    assert files(tmp_path).items() >= before.items() and not (tmp_path / "checkpoints" / "round_0004").exists()
    assert "round_0003" in said(tmp_path)
    if time == 2:
        assert "the state after round 4 is not saved" in said(tmp_path)


# Checkpoints that cannot be used --------------------------------------------------------------------------------------


class Damaging(Records):
    """Spoils a file of the newest checkpoint when round 5 begins."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder / "checkpoints"

    def phase(self, round_number: int, name: str, due: int = 0) -> None:
        if (round_number, name) == (5, "downlink") and self.phases[-1] != (4, "again"):
            (max(self.folder.glob("round_*")) / "clients_000000.pt").write_bytes(b"")
        super().phase(round_number, name, due)


def test_an_older_checkpoint_where_the_newest_is_damaged(straight: Any, tmp_path: Path) -> None:
    made, drawn, before = straight("fedavg", 0)
    saved = planned(drawn, checkpoint_every=1, checkpoint_keep=2)
    listener = Damaging(tmp_path)
    found = go(made, saved, tmp_path, [Loss("train", 5)], listener=listener)
    assert [record.round for record in listener.records] == [1, 2, 3, 4, 5]
    agree([found.states, found.server], [before.states, before.server])
    assert [evaluated(r) for r in listener.records] == [evaluated(r) for r in before.listener.records]
    assert [phase[0] for phase in listener.phases if isinstance(phase, tuple) and phase[1] == "again"] == [4]
    assert "round_0004" in said(tmp_path) and "round_0003; rounds 4 to 4" in said(tmp_path)


def evaluated(record: RoundRecord) -> Any:
    return [replace(report, seconds=0) for report in record.reports], record.evaluations


# Clients that fail ----------------------------------------------------------------------------------------------------


def trapped(folder: Path, on_nonfinite: str = "abort") -> World:
    folder.mkdir(exist_ok=True)
    return four(endangered(folder, on_nonfinite=on_nonfinite))


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize(
    ("trap", "kind"),
    [("raise_train_2_1", "error"), ("raise_train_3_2", "error"), ("nan_2_1", "nonfinite"), ("nan_3_4", "nonfinite")],
)
def test_a_client_that_was_left_out_is_left_out_again(trap: str, kind: str, every: int, tmp_path: Path) -> None:
    """One that raised an error though it would reply this time: the records have it that it did not.

    Values that are not finite are so again; 3 trains in a stack with 0 in round 4, which has worked with it.
    """
    drawn, runs = planned(PLAN, checkpoint_every=every), []
    made = trapped(tmp_path / "traps", "drop")
    for name, losses in (("straight", []), ("lost", [Loss("evaluate", 13), Loss("recover", 1)])):
        set_trap(tmp_path / "traps", trap, ALWAYS if kind == "nonfinite" else ONCE)
        runs.append(go(made, drawn, tmp_path / name, losses, rule="drop"))
    assert_same(runs[1], runs[0])
    _, client, round_number = trap.rsplit("_", 2)
    assert runs[1].records[int(round_number) - 1][0].faults[int(client)] == kind


@pytest.mark.slow
def test_a_round_that_is_broken_off_is_drawn_anew(tmp_path: Path) -> None:
    """A client that failed in it and does not fail again is reported, and no fault is recorded."""
    drawn = planned(PLAN, checkpoint_every=2)
    made = trapped(tmp_path / "traps")
    before = go(made, drawn, tmp_path / "straight", rule="drop")
    for number, loss in enumerate([Loss("fuse", 3), Loss("fuse", 3, keeps=True)]):
        set_trap(tmp_path / "traps", "raise_train_3_3")
        found = go(made, drawn, tmp_path / f"lost{number}", [loss], rule="drop")
        assert_same(found, before)
    assert not [*(tmp_path / "traps").iterdir()]


@pytest.mark.slow
def test_faults_in_a_repeated_round_are_recorded_for_that_round_alone(tmp_path: Path) -> None:
    """Client 1 is not in round 3, and was not finite in round 2; it is so again while round 2 is gone through again."""
    made = trapped(tmp_path / "traps", "keep")
    runs = []
    set_trap(tmp_path / "traps", "nan_1_2", ALWAYS)
    for name, losses in (("straight", []), ("lost", [Loss("train", 3)])):
        runs.append(go(made, PLAN, tmp_path / name, losses))
    faults = [record.faults for record, *_ in runs[1].records]
    assert faults == [record.faults for record, *_ in runs[0].records]
    assert 1 in faults[1] and 1 not in faults[2]


def test_a_round_that_does_not_come_out_again_ends_the_run_with_a_message(tmp_path: Path) -> None:
    """A client that replied then fails now: without it all later rounds would be others."""

    class Trapping(Records):
        def round(self, record: RoundRecord) -> None:
            super().round(record)
            if record.round == 2:
                set_trap(tmp_path / "traps", "raise_train_2_1", ALWAYS)

    made = trapped(tmp_path / "traps")
    with pytest.raises(RunError, match="repeated round 1 differs from its record.*client 2 replied"):
        go(made, PLAN, tmp_path / "lost", [Loss("train", 3)], rule="drop", listener=Trapping())
    assert "the state after round 2 is not saved" in said(tmp_path / "lost")


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
    made, drawn, _ = straight("fedavg", 0)
    return go(made, planned(drawn, checkpoint_every=1, checkpoint_keep=9), tmp_path_factory.mktemp("all")).files


@pytest.mark.slow
@pytest.mark.parametrize("by", ["signal", "error"])
@pytest.mark.parametrize("point", ["recover 1", "restore 1", "send 5", "train 5", "fuse 4"])
def test_nothing_is_saved_under_a_wrong_round(
    point: str, by: str, straight: Any, all_saved: dict[str, bytes], tmp_path: Path
) -> None:
    """The run ends in the middle of a recovery; resumed from an older checkpoint, it has the same results."""
    made, drawn, before = straight("fedavg", 2)
    interrupts, signalled = stopping()
    ended: Callable[[], BaseException] = signalled if by == "signal" else partial(RunError, "it broke")
    losses = [Loss("train", 4), replace(losses_of(point)[0], raises=ended)]
    with pytest.raises(KeyboardInterrupt if by == "signal" else RunError, match=None if by == "signal" else "it broke"):
        go(made, drawn, tmp_path, losses, interrupts=interrupts)
    left = files(tmp_path)
    states_left = {name: data for name, data in left.items() if name.startswith("checkpoints")}
    assert {Path(name).parent.name for name in states_left} == {"round_0002"}
    assert all(all_saved[name] == data for name, data in states_left.items())
    why = "what is asked for is gone" if (point, by) == ("recover 1", "error") else "some states were lost with a node"
    assert f"the state after round 3 is not saved: {why}" in said(tmp_path)
    found = newest_checkpoint(tmp_path / "checkpoints", print)
    rest = go(made, drawn, tmp_path, done=2, begin=lambda ex: ex.inner.restore(found.server(), found.clients()))
    assert rest.records == before.records[2:]
    agree(rest.states, before.states)


def test_what_is_lost_again_and_again_ends_the_run_with_a_message(straight: Any, tmp_path: Path) -> None:
    made, drawn, _ = straight("fedavg", 0)
    for call, first in (("train", 4), ("recover", 1)):
        losses = [Loss("train", 3, keeps=True), *(Loss(call, time, keeps=True) for time in range(first, 40))]
        with pytest.raises(RunError, match="10th"):
            go(made, drawn, tmp_path / call, losses)


def saved_in_round_3(folder: Path, all_saved: dict[str, bytes]) -> None:
    saved = {name: data for name, data in files(folder).items() if name.startswith("checkpoints")}
    assert max(Path(name).parent.name for name in saved) == "round_0003"
    assert all(all_saved[name] == data for name, data in saved.items())


def test_what_is_left_is_saved_where_it_is_not_enough_to_go_on(
    straight: Any, all_saved: dict[str, bytes], tmp_path: Path
) -> None:
    made, drawn, _ = straight("fedavg", 2)
    gone = partial(RunError, "nodes have left, and what is left has no place")
    with pytest.raises(RunError, match="has no place"):
        go(made, drawn, tmp_path, [Loss("train", 4, keeps=True), Loss("recover", 1, raises=gone)])
    saved_in_round_3(tmp_path, all_saved)


def test_a_run_that_ends_later_saves_its_last_whole_round(
    straight: Any, all_saved: dict[str, bytes], tmp_path: Path
) -> None:
    """After a recovery all is as it should be, and may be saved."""
    made, drawn, _ = straight("fedavg", 0)
    broke = partial(RunError, "it broke")
    with pytest.raises(RunError, match="it broke"):
        go(made, drawn, tmp_path, [Loss("evaluate", 9), Loss("evaluate", 13, raises=broke)])
    saved_in_round_3(tmp_path, all_saved)
