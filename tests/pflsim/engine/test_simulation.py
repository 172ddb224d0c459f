"""The order of events of a round, as an executor sees it."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_files import read_message, read_server, read_state
from support import PLANNED, Records, planned

from pflsim.engine.diagnostics import RoundDiagnostics
from pflsim.engine.execution import ClientTask, EvalRequest, FaultRecorder, FinetuneTask, Sent, Trained
from pflsim.engine.plan import RunPlan
from pflsim.engine.simulation import Simulation
from pflsim.errors import ClientError, RunError
from pflsim.messages import Message, Uplink
from pflsim.records.folder import LOG, run_log
from pflsim.types import Axis, EvalRow, Matrix, Tensors, TrainReport

SEEN = Matrix("seen", "Seen", Axis("row"), Axis("column"), np.zeros((1, 1), np.float32))


class Handle:
    """Something that can be watched."""

    def __init__(self, content: Any):
        self.content = content


class Recorder:
    """An executor of three clients that writes down what it is asked for."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.alive: list[weakref.ref[Handle]] = []
        self.fused = 0
        self.clients_done: Callable[[int], None] = lambda done: None
        self.faults = FaultRecorder()

    def handle(self, content: Any) -> Handle:
        made = Handle(content)
        self.alive.append(weakref.ref(made))
        return made

    def start(self) -> None: ...

    def send(self, clients: Sequence[int], joining: bool = False) -> Sent[Handle]:
        self.events.append(("join" if joining else "send", tuple(clients)))
        messages = {c: Message(weights={"w": torch.tensor([float(self.fused), c])}) for c in clients}
        return Sent({c: self.handle(m) for c, m in messages.items()}, dict.fromkeys(clients, 8))

    def run(self, task: ClientTask, sent: Sent[Handle]) -> Trained[Handle]:
        if isinstance(task, FinetuneTask):
            self.events.append(("finetune", task.round_number, tuple(sent.downlinks), task.epochs))
            return Trained((), ())
        self.events.append(("train", task.round_number, tuple(sent.downlinks)))
        self.clients_done(len(sent.downlinks))
        ups = [[Uplink(weights={"w": torch.ones(1)}, client=c, num_examples=c + 1)] for c in reversed(sent.downlinks)]
        return Trained([self.handle(up) for up in ups], tuple(TrainReport(c, c + 1, 1) for c in sent.downlinks))

    def fuse(self, trained: Trained[Handle], matrices: bool = False) -> RoundDiagnostics:
        self.events.append(("fuse", len(trained.uplinks)))
        self.fused += 1
        return RoundDiagnostics({0: 1.0, 2: 3.0}, (SEEN,) if matrices else ())

    def store(self, trained: Trained[Handle]) -> None:
        self.events.append(("store",))

    def evaluate(self, request: EvalRequest, sent: Sent[Handle] | None = None) -> list[EvalRow]:
        held = [ref() for ref in self.alive if ref() is not None]
        assert held == ([] if sent is None else list(sent.downlinks.values())), "messages of the round are still held"
        asked = request.model, request.phase, request.clients, request.splits, request.round_number
        self.events.append(("evaluate", *asked))
        return [] if request.model == "global" else [EvalRow(0, "test", "personal", request.phase, 1, 2, 0.5)]

    def downlink(self, handle: Handle) -> Message:
        return handle.content

    def uplinks(self, handle: Handle) -> Sequence[Uplink]:
        return handle.content

    def server_numbers(self) -> Tensors:
        self.events.append(("numbers", self.fused))
        return {"fused": torch.tensor(self.fused)}

    def server_state(self) -> object:
        self.events.append(("save", self.fused))
        return {"fused": self.fused}

    def client_states(self) -> Iterator[tuple[int, Tensors]]:
        yield from ((c, {"w": torch.zeros(1)}) for c in range(3))

    def restore(self, server: object, clients: Any) -> None: ...

    def rollback(self) -> None: ...

    def recover(self) -> bool:
        return True

    def commit(self) -> None: ...


PLAN = RunPlan(PLANNED, cohorts=((0, 2), (1,), (0, 1), (2,), (0, 1, 2)), clients=3)


def simulate(folder: Path, **settings: Any) -> tuple[Recorder, Records]:
    recorder, records = Recorder(), Records()
    Simulation(recorder, planned(PLAN, **settings), folder, records).run()
    return recorder, records


def rounds_with(recorder: Recorder, kind: str) -> list[int]:
    """The rounds in which something was asked for."""
    found, current = [], 0
    for event in recorder.events:
        current = event[1] if event[0] == "train" else current
        if event[0] == kind and (not found or found[-1] != current):
            found.append(current)
    return found


def test_events_of_a_round(tmp_path: Path) -> None:
    recorder, _ = simulate(tmp_path, cohorts=((0, 2),), trace_rounds=(1,), eval_received=True, splits=("test", "val"))
    all_clients, both = (0, 1, 2), ("test", "val")
    assert recorder.events == [
        ("send", (0, 2)),
        ("train", 1, (0, 2)),
        ("fuse", 2),
        ("numbers", 1),
        ("evaluate", "personal", "trained", all_clients, both, 1),
        ("evaluate", "personal", "received", all_clients, both, 1),
        ("evaluate", "global", "received", all_clients, both, 1),
        ("save", 1),
    ]


def test_record_of_a_round(tmp_path: Path) -> None:
    _, records = simulate(tmp_path)
    assert [(r.round, r.cohort) for r in records.records] == list(enumerate(PLAN.cohorts, start=1))
    first = records.records[0]
    assert [report.client for report in first.reports] == [0, 2]
    assert first.down_bytes == {0: 8, 2: 8}
    assert first.evaluations == (EvalRow(0, "test", "personal", "trained", 1, 2, 0.5),)
    assert list(first.seconds) == ["downlink", "train", "fuse", "diagnostics", "evaluate"]
    assert list(records.records[-1].seconds) == [*first.seconds, "checkpoint"]


@pytest.mark.parametrize(
    ("every", "rounds"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (5, [5]), (9, [5]), (0, [5])]
)
def test_what_is_due_and_always_in_the_last_round(tmp_path: Path, every: int, rounds: list[int]) -> None:
    recorder, records = simulate(tmp_path, eval_every=every, checkpoint_every=every, checkpoint_keep=2)
    assert rounds_with(recorder, "evaluate") == rounds_with(recorder, "save") == rounds
    assert [r.round for r in records.records if r.evaluations] == rounds
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [f"round_{number:04d}" for number in rounds[-2:]]
    assert read_state(tmp_path / "checkpoints" / kept[-1], "server") == {"fused": 5}


def test_only_participants_or_a_sample_are_evaluated_where_that_is_set(tmp_path: Path) -> None:
    def reported(clients: str | int) -> list[tuple[int, ...]]:
        recorder, _ = simulate(tmp_path / str(clients), eval_clients=clients)
        return [event[3] for event in recorder.events if event[0] == "evaluate" and event[1] == "personal"]

    assert reported("participants") == list(PLAN.cohorts)
    (chosen,) = {*reported(2)}
    assert len({*chosen}) == 2 and {*chosen} < {*range(PLAN.clients)} and list(chosen) == sorted(chosen)


def test_a_model_evaluated_as_received_is_evaluated_trained_too_where_both_are_set(tmp_path: Path) -> None:
    """Each phase once, the one that the method reports first."""
    recorder, _ = simulate(tmp_path, cohorts=((0,),), reported_phase="received", eval_received=True)
    reported = [event[1:3] for event in recorder.events if event[0] == "evaluate"]
    assert reported == [("personal", "received"), ("personal", "trained"), ("global", "received")]


def test_only_the_chosen_models_are_evaluated_and_the_personal_ones_of_newcomers(tmp_path: Path) -> None:
    recorder, _ = simulate(tmp_path, cohorts=((0,),), newcomers=(3,), eval_models=["global"])
    found = [event[1:4] for event in recorder.events if event[0] == "evaluate"]
    joined = [("personal", phase, (3,)) for phase in ("received", "trained")]
    assert found == [("global", "received", (0, 1, 2)), *joined]


def test_trace_of_the_rounds_asked_for_only(tmp_path: Path) -> None:
    """The downlinks as they were before the fusion, the server's numbers as they are after it."""
    recorder, records = simulate(tmp_path, trace_rounds=(1, 3))
    assert rounds_with(recorder, "numbers") == [1, 3]
    assert [("trace" in r.seconds) for r in records.records] == [True, False, True, False, False]
    trace = tmp_path / "trace"
    assert sorted(path.name for path in trace.iterdir()) == ["round_0001", "round_0003"]
    files = {path.name for path in (trace / "round_0003").iterdir()}
    assert files == {f"{way}_00{c}.safetensors" for way in ("up", "down") for c in (0, 1)} | {"server.safetensors"}
    assert read_message(trace / "round_0003" / "down_001.safetensors").weights["w"].tolist() == [2, 1]
    up = read_message(trace / "round_0003" / "up_001.safetensors")
    assert isinstance(up, Uplink) and (up.client, up.num_examples) == (1, 2)
    assert read_server(trace / "round_0003" / "server.safetensors")[0]["fused"] == 3


def test_newcomers_join_after_the_last_round(tmp_path: Path) -> None:
    recorder, records = simulate(tmp_path, newcomers=(3, 4), eval_finetune_epochs=2, splits=("test", "val"))
    last = max(at for at, event in enumerate(recorder.events) if event[0] == "save")
    assert recorder.events[last + 1 :] == [
        ("join", (3, 4)),
        ("evaluate", "personal", "received", (3, 4), ("test", "val"), 5),
        ("finetune", 6, (3, 4), 2),
        ("store",),
        ("evaluate", "personal", "trained", (3, 4), ("test", "val"), 5),
    ]
    (joined,) = records.joined
    assert (joined.round, joined.down_bytes) == (5, {3: 8, 4: 8})
    assert [row.phase for row in (*joined.received, *joined.trained)] == ["received", "trained"]
    assert len(records.records) == 5


def test_the_first_error_is_the_one_that_is_reported(tmp_path: Path) -> None:
    """Where the state cannot be read either, which is one line of the log."""

    class Broken(Recorder):
        def run(self, task: ClientTask, sent: Sent[Handle]) -> Trained[Handle]:
            if task.round_number == 2:
                raise ClientError(3, 2, "local training", "it broke")
            return super().run(task, sent)

        def server_state(self) -> object:
            raise RunError("the server is gone")

    with pytest.raises(ClientError, match="it broke"), run_log(tmp_path):
        Simulation(Broken(), PLAN, tmp_path, Records()).run()
    assert "not saved: the server is gone" in (tmp_path / LOG).read_text()


def test_what_is_seen_of_a_round_is_recorded_with_it(tmp_path: Path) -> None:
    """Matrices in the rounds that are due, and in the last; distances in every round."""
    _, records = simulate(tmp_path, tracking_diagnostics_every=2)
    assert [r.round for r in records.records if r.diagnostics == (SEEN,)] == [2, 4, 5]
    assert [r.drift for r in records.records] == [{0: 1.0, 2: 3.0}] * 5


def test_a_listener_follows_the_phases(tmp_path: Path) -> None:
    _, records = simulate(
        tmp_path, cohorts=((0, 2),), absentees=((2,),), tracking_diagnostics_every=1, trace_rounds=(1,)
    )
    names = ["downlink", "train", "fuse", "trace", "evaluate", "evaluate", "evaluate", "checkpoint"]
    assert [phase[1] for phase in records.phases if isinstance(phase, tuple)] == names
    at = records.phases.index((1, "train", 1))
    assert records.phases[at + 1] == 1  # the one that is there is through
    assert (1, "evaluate", 3) in records.phases
