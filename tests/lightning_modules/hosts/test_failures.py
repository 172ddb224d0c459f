"""Clients that raise errors or diverge: every rule for them, in this process and on actors."""

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_clients import ALWAYS, set_trap
from failure_runs import endangered, on_ray, outcome, take_log
from support import World, agree, inline, prepared, same

from lightning_modules.hosts.client_host import Reply
from lightning_modules.hosts.failures import Failure, nonfinite
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedavg import FedAvg
from pflsim.data.federated import Shard
from pflsim.engine.execution import TrainTask
from pflsim.errors import ClientError, SettingsError
from pflsim.messages import Prototypes, Uplink
from ray_actors.resources import ActorPool


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    folder = tmp_path / "traps"
    folder.mkdir()
    return folder


def executors(made: World, pool: ActorPool, rule: str) -> list[Any]:
    return [inline(made.on_error(rule)), on_ray(made, pool, rule)]


@pytest.mark.slow
@pytest.mark.parametrize("trap", ["raise_train_2_2", "raise_train_3_1", "raise_evaluate_4_2"])
def test_what_goes_away_by_itself_changes_nothing(trap: str, traps: Path, pool: ActorPool, tmp_path: Path) -> None:
    made = endangered(traps)
    straight = outcome(inline(made), tmp_path)
    for executor in executors(made, pool, "retry(1)"):
        set_trap(traps, trap)
        agree(outcome(executor, tmp_path), straight)
        text = take_log(tmp_path)
        assert text.count("retry 1 of 1") == 1 and text.count("ValueError: a trap") >= 1
        assert executor.faults.restarts == 0


def test_a_gpu_that_fails_ends_a_run_in_this_process(traps: Path, tmp_path: Path) -> None:
    """No retry can succeed, and the groups after it would fail too."""
    executor = inline(endangered(traps))
    set_trap(traps, "gpu_train_2_2")
    with pytest.raises(ClientError, match="client 2 .*device-side assert"):
        outcome(executor, tmp_path)
    results = executor.host.run_groups(TrainTask(3), [(1,), (2,), (4,)], executor.send([1, 2, 4]).downlinks)
    assert not any(isinstance(result, Failure) for result in results.values())
    set_trap(traps, "gpu_train_2_4")
    results = executor.host.run_groups(TrainTask(4), [(1,), (2,), (4,)], executor.send([1, 2, 4]).downlinks)
    assert isinstance(results[1], Reply) and results[2] is results[4] and results[2].group == (2, 4)


def test_a_failure_keeps_no_frames(traps: Path) -> None:
    """They would keep the tensors of the failed attempt until the next one has ended."""
    executor = inline(endangered(traps))
    set_trap(traps, "raise_train_2_1")
    failure = executor.host.run_groups(TrainTask(1), [(2,)], executor.send([2]).downlinks)[2]
    frames = [frame for frame, _ in traceback.walk_tb(failure.error.__cause__.__traceback__)]
    assert "before_training" in {frame.f_code.co_name for frame in frames}
    assert not any(frame.f_locals for frame in frames if frame.f_code.co_name not in ("run_groups", "<lambda>"))


class Refusing(FedAvg):
    """Refuses a setting when it trains."""

    def before_training(self, shard: Shard) -> None:
        raise SettingsError("method.x=1: expected 2")


@pytest.mark.parametrize("rule", ["drop", "retry(3)"])
def test_a_refused_setting_ends_the_run_without_advice_about_clients(rule: str) -> None:
    made = prepared("data=digits", "clients=4", f"on_client_error={rule}", "method=fedavg")
    executor = inline(replace(made, factory=replace(made.factory, client=Refusing)))
    with pytest.raises(ClientError, match=r"method\.x=1: expected 2$"):
        executor.run(TrainTask(1), executor.send([0, 1]))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "shown"), [("retry(3)", 1), ("abort", 1), ("retry(0)", 1)])
def test_an_error_that_stays_is_printed_once_and_ends_the_run(
    rule: str, shown: int, traps: Path, pool: ActorPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Client, round, phase and actor, with the traceback, on standard error and in the run folder."""
    made = endangered(traps)
    for executor in executors(made, pool, rule):
        set_trap(traps, "raise_train_2_2", ALWAYS)
        with pytest.raises(ClientError, match="client 2 failed in round 2 .local training.: ValueError: a trap"):
            outcome(executor, tmp_path)
        printed, written = capsys.readouterr().err, take_log(tmp_path)
        for text in (printed, written):
            assert text.count("Traceback") == shown and "failing_clients.py" in text
            assert text.count("; retry ") == (rule == "retry(3)") == text.count("the same error twice")
        if not isinstance(executor, InlineExecutor):
            assert "client actor" in printed and "process" in printed and "node" in printed


@pytest.mark.slow
def test_drop_goes_on_without_it(traps: Path, pool: ActorPool, tmp_path: Path) -> None:
    """As if it had been absent in that round, also in a stack, whose others train without it."""
    made = endangered(traps)
    for trap, clients in (("raise_train_2_2", (2,)), ("raise_train_3_2", (3,))):
        absent = outcome(inline(made), tmp_path, absentees=((), clients, ()))
        for executor in executors(made, pool, "drop"):
            set_trap(traps, trap)
            found = outcome(executor, tmp_path)
            agree(found[:4], absent[:4])
            assert [faults for _, faults in found[4]] == [{}, dict.fromkeys(clients, "error"), {}]


@pytest.mark.slow
def test_drop_in_an_evaluation_leaves_its_rows_out(traps: Path, pool: ActorPool, tmp_path: Path) -> None:
    made = endangered(traps)
    straight = outcome(inline(made), tmp_path)
    for executor in executors(made, pool, "drop"):
        set_trap(traps, "raise_evaluate_4_2")
        found = outcome(executor, tmp_path)
        assert same(found[0], straight[0])
        left = [row for rows in found[2] for row in rows]
        missing = [row for rows in straight[2] for row in rows if row not in left]
        assert {row.client for row in missing} == {4} and len(missing) + len(left) == sum(map(len, straight[2]))
        assert found[4][1][1] == {4: "error"}


@pytest.mark.slow
@pytest.mark.parametrize("client", [2, 3])
def test_values_that_are_not_finite(client: int, traps: Path, pool: ActorPool, tmp_path: Path) -> None:
    """Abort says what and whose; drop is as if it had been absent; keep fuses it and says so. 3 is in a stack."""
    trap = f"nan_{client}_2"
    made = endangered(traps)
    absent = outcome(inline(made), tmp_path, absentees=((), (client,), ()))
    for rule in ("abort", "drop", "keep"):
        for executor in executors(endangered(traps, on_nonfinite=rule), pool, "retry(3)"):
            set_trap(traps, trap)
            if rule == "abort":
                words = f"client {client} failed in round 2 .*values of net.body.fc1.weight are not finite.*drop"
                with pytest.raises(ClientError, match=words):
                    outcome(executor, tmp_path)
                continue
            found = outcome(executor, tmp_path)
            later = dict.fromkeys(range(5), "nonfinite") if rule == "keep" else {}  # it spreads to all clients
            assert [faults for _, faults in found[4]] == [{}, {client: "nonfinite"}, later]
            spread = any(not torch.isfinite(v).all() for v in found[1]["weights"].values())
            assert spread == (rule == "keep")
            if rule == "drop" and client == 2:  # in a stack the others have trained with it, not without
                agree(found[:4], absent[:4])
            text = take_log(tmp_path)
            assert f"client {client}" in text and "not finite" in text


def test_what_counts_as_finite() -> None:
    means = Prototypes(torch.tensor([[float("nan")], [1.0]]), torch.tensor([0, 2]))
    fine = Uplink({"w": torch.ones(2), "n": torch.tensor(3)}, means, {"e": torch.zeros(1)}, {"a": 1.0})
    assert nonfinite(fine, {"ce": 0.5}) == ""
    assert nonfinite(fine, {"ce": float("inf")}) == "loss term ce is inf"
    assert "number a is nan" in nonfinite(Uplink(numbers={"a": float("nan")}), {})
    assert "1 of 2 values of w" in nonfinite(Uplink({"w": torch.tensor([1.0, float("-inf")])}), {})
    overflowing = {"w": torch.full((2,), 3e38), "v": torch.full((2,), 6e4).half()}
    assert nonfinite(Uplink(overflowing), {}) == ""
    assert "2 of 2 values of w" in nonfinite(Uplink({"w": torch.tensor([float("inf"), float("-inf")])}), {})
    assert "extra" not in nonfinite(Uplink(extra={"e": torch.tensor(float("nan"))}), {}) != ""
    here = Prototypes(torch.full((1, 2), float("nan")), torch.tensor([1]))
    assert "2 of 2 values of prototypes" in nonfinite(Uplink(prototypes=here), {})


@pytest.mark.slow
def test_stragglers_and_absentees_of_a_plan(traps: Path, pool: ActorPool, tmp_path: Path) -> None:
    """Who is absent gets its message and changes nothing; who is slow takes half of its steps; equal on actors."""
    made = endangered(traps)
    settings: dict[str, Any] = {
        "absentees": ((1,), (), (0, 1, 2, 3, 4)),
        "stragglers": ((1, 2), (3,), ()),
        "faults_straggler_work": 0.5,
    }
    one, other = (outcome(e, tmp_path, **settings) for e in executors(made, pool, "abort"))
    agree(one, other)
    full = outcome(inline(made), tmp_path)
    assert [faults for _, faults in one[4]] == [
        {1: "dropout", 2: "straggler"},
        {3: "straggler"},
        dict.fromkeys(range(5), "dropout"),
    ]
    assert all(set(down) == {0, 1, 2, 3, 4} for down, _ in one[4])
    steps = [{report.client: report.steps for report in reports} for reports in one[3]]
    whole = [{report.client: report.steps for report in reports} for reports in full[3]]
    assert steps[0] == {**{c: whole[0][c] for c in (0, 3, 4)}, 2: -(-whole[0][2] // 2)}
    assert steps[1][3] == -(-whole[1][3] // 2) and steps[2] == {}


@pytest.mark.slow
def test_a_fusion_can_be_gone_back_on(traps: Path, pool: ActorPool, tmp_path: Path) -> None:
    """Until it is confirmed: to the states before, also of clients that had not trained before."""
    made = endangered(traps)
    for executor in executors(made, pool, "abort"):
        for round_number, clients in ((1, [0, 3]), (2, [0, 1])):
            before = {client: dict(state) for client, state in executor.client_states()}, executor.server_state()
            executor.fuse(executor.run(TrainTask(round_number), executor.send(clients)))
            if round_number == 1:
                executor.commit()
        now = dict(executor.client_states())
        assert not same({c: before[0][c] for c in (0, 1)}, {c: dict(now[c]) for c in (0, 1)})
        executor.rollback()
        after = {client: dict(state) for client, state in executor.client_states()}
        assert same(before[0], after)
        saved: Any = executor.server_state()
        assert same({0: before[1]["weights"]}, {0: saved["weights"]})
