"""Runs of a few clients whose executor loses states at chosen calls, and what such runs leave."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import PLANNED, Records, World, agree, planned, states

from lightning_modules.hosts.inline import InlineExecutor
from pflsim.engine.execution import FaultRecorder, FinetuneTask, NodeLost, ReplyTask, StatesLost, TrainTask
from pflsim.engine.interrupts import Interrupts
from pflsim.engine.plan import RunPlan
from pflsim.engine.simulation import Simulation
from pflsim.records.folder import run_log
from pflsim.types import RoundRecord

COHORTS = ((0, 1, 2), (1, 2, 3), (0, 2, 3), (0, 1, 2, 3), (1, 2, 3))
PLAN = planned(
    RunPlan(PLANNED, COHORTS, 4), splits=("test", "val"), eval_received=True, trace_rounds=(2, 3), checkpoint_keep=2,
    absentees=((1,), (), (0, 2), (), ()), stragglers=((0,), (3,), (), (1, 2), ()), recorded_rows=(np.arange(5),) * 4,
)  # fmt: skip
"""Four clients, five rounds; some are absent, and some are slow."""


TASKS = {TrainTask: "train", ReplyTask: "open", FinetuneTask: "finetune"}


@dataclass(frozen=True, slots=True)
class Loss:
    """A call in which something is lost.

    Args:
        call: the executor's method; for `run` the task, see `TASKS`.
        time: which call of it, from 1.
        keeps: whether all states are left.
        after: whether it was as good as done.
        raises: what comes of it instead, called first; None: `NodeLost`.
    """

    call: str
    time: int = 1
    keeps: bool = True
    after: bool = False
    raises: Callable[[], BaseException] | None = None


class Shaky:
    """An executor in this process that loses a node; until it has recovered every call fails."""

    def __init__(self, made: World, losses: Sequence[Loss], rule: str = "abort"):
        self.losses, self.faults = list(losses), FaultRecorder()
        self.calls: Counter[str] = Counter()
        self._gone, self._kept = False, True
        self.inner = InlineExecutor(made.on_error(rule))
        self.inner.faults = self.inner.failure_policy.faults = self.faults
        self.inner.start()

    def recover(self) -> None:
        self._meet("recover")
        if not self._kept:
            raise StatesLost("states are gone")
        self._gone = False

    def client_states(self) -> Iterator[tuple[int, Any]]:
        for number, found in enumerate(self.inner.client_states()):
            if number == 2:
                self._meet("client_states")
            self._refuse(unless=self._kept)
            yield found

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name in ("rollback", "commit", "server", "host", "failure_policy"):
            return found

        def call(*arguments: Any, **more: Any) -> Any:
            self._refuse(unless=self._kept and name == "server_state")
            point = TASKS[type(arguments[0])] if name == "run" else name
            self._meet(point)
            result = getattr(self.inner, name)(*arguments, **more)
            if any(loss.after for loss in self._due(point)):
                if name in ("fuse", "store"):  # an actor has gone on; what it has done does not count
                    self.inner.rollback()
                self._lose(point, after=True)
            return result

        return call

    def _due(self, name: str) -> list[Loss]:
        return [loss for loss in self.losses if (loss.call, loss.time) == (name, self.calls[name])]

    def _refuse(self, unless: bool = False) -> None:
        if self._gone and not unless:
            raise NodeLost("what is asked for is gone")

    def _meet(self, name: str) -> None:
        self.calls[name] += 1
        self._lose(name, after=False)

    def _lose(self, name: str, after: bool) -> None:
        for loss in self._due(name):
            if loss.after == after:
                self.losses.remove(loss)
                if loss.raises is not None:
                    raise loss.raises()
                self._gone, self._kept = True, self._kept and loss.keeps
                raise NodeLost(f"a node left in {name}")


@dataclass
class Run:
    """What a run leaves."""

    states: dict[int, dict[str, torch.Tensor]]
    server: Any
    records: list[Any]
    joined: list[Any]
    files: dict[str, bytes]
    listener: Records
    executor: Any


def go(
    made: World,
    plan: RunPlan,
    folder: Path,
    losses: Sequence[Loss] = (),
    *,
    rule: str = "abort",
    interrupts: Interrupts | None = None,
) -> Run:
    """A run, in which all the losses must be met."""
    folder.mkdir(exist_ok=True)
    listener, executor = Records(), Shaky(made, losses, rule)
    with run_log(folder):
        Simulation(executor, plan, folder, listener, interrupts).run()
    assert not executor.losses, "something that was to be lost was not met"
    return Run(
        states(executor.inner), executor.inner.server_state(), [bare(r) for r in listener.records],
        list(listener.joined), files(folder), listener, executor,
    )  # fmt: skip


def bare(record: RoundRecord) -> Any:
    """A record without times, its matrices as lists."""
    diagnostics = [(view.name, repr(view.values.tolist())) for view in record.diagnostics]
    reports = tuple(replace(report, seconds=0.0) for report in record.reports)
    return replace(record, reports=reports, seconds={}, diagnostics=()), tuple(record.seconds), diagnostics


def files(folder: Path) -> dict[str, bytes]:
    """The traces, and the states in the checkpoints."""
    found = [*folder.glob("trace/*/*"), *folder.glob("checkpoints/*/*.pt")]
    return {str(path.relative_to(folder)): _contents(path) for path in found}


def _contents(path: Path) -> bytes:
    """The bytes of a file; the header of a trace in one spelling, for its order is left to chance."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.dumps(json.loads(data[8:end]), sort_keys=True).encode() + data[end:]


def assert_same(one: Run, other: Run) -> None:
    """All that they leave, but for times."""
    assert one.records == other.records and one.joined == other.joined
    agree([one.states, one.server], [other.states, other.server])
    assert one.files.keys() == other.files.keys()
    different = [name for name in one.files if one.files[name] != other.files[name]]
    assert not different
