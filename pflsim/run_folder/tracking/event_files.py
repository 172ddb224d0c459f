"""Truncates the TensorBoard event files of a run that is resumed."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path

from pflsim.run_folder.files import write_atomically
from pflsim.run_folder.history import RoundMetrics
from pflsim.run_folder.metrics import Scope
from pflsim.run_folder.tracking.scalars import Scalars

EARLIER = "events.out.tfevents.0000000000.earlier"
"""The event file with the scalars of all earlier sessions. Readers sort files by name, so they read it first."""

NOT_KEPT = ("newcomer", "partition", "_hparams_/", "personal/", "global/", "final/", "seconds/run")
"""Tags that each session writes anew, and tags of older versions."""


def cut(folder: Path, history: Sequence[RoundMetrics], reported: Scope) -> None:
    """Replace all event files by one file with the events of the rounds in `history`.

    Removes events of newcomers and of later rounds. Adds scalars that are in metrics.jsonl but not in the event files.
    `reported` is the scope that the method reports.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
    from tensorboard.summary.writer.record_writer import RecordWriter

    points: dict[int, dict[str, bytes]] = {metrics.round: {} for metrics in history}
    files = sorted(path for path in folder.glob("*tfevents*") if path.is_file())
    for path in files:
        for data in RawEventFileLoader(str(path)).Load():  # up to the first incomplete or damaged record
            event = Event.FromString(data)
            (tag,) = [value.tag for value in event.summary.value] or [""]
            if tag and not tag.startswith(NOT_KEPT) and event.step in points:
                points[event.step].setdefault(tag, data)
    now, scalars = time.time(), Scalars(reported)
    for metrics in history:
        for tag, number in scalars(metrics).items():
            if tag not in points[metrics.round]:
                value = Summary.Value(tag=tag, simple_value=number)
                event = Event(wall_time=now, step=metrics.round, summary=Summary(value=[value]))
                points[metrics.round][tag] = event.SerializeToString()
    content = io.BytesIO()
    writer = RecordWriter(content)
    writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
    for events in points.values():
        for data in events.values():
            writer.write(data)
    folder.mkdir(exist_ok=True)
    write_atomically(folder / EARLIER, content.getvalue())
    for path in files:
        if path.name != EARLIER:
            path.unlink()
