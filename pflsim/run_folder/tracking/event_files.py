"""The event files of TensorBoard, cut back to a round."""

from __future__ import annotations

import io
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pflsim.run_folder.files import write_atomically
from pflsim.run_folder.history import RoundMetrics
from pflsim.run_folder.tracking.scalars import scalars

EARLIER = "events.out.tfevents.0000000000.earlier"
"""Where the points of all sessions before this one are. Readers take the files by their names, so it is read first
whatever the clock said when a session began."""

OF_A_SESSION = ("newcomer/", "final/", "seconds/run", "partition", "_hparams_/")
"""Tags of what every session writes for itself, or a later one will."""


def cut(folder: Path, history: Sequence[RoundMetrics]) -> None:
    """Leave the points of these rounds, in their order, in one file, and no other.

    Points of newcomers go. Points that never reached the disk are written again, as far as metrics.jsonl has them.
    """
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
    from tensorboard.summary.writer.record_writer import RecordWriter

    points: dict[int, dict[str, bytes]] = {metrics.round: {} for metrics in history}
    files = sorted(path for path in folder.glob("*tfevents*") if path.is_file())
    for path in files:
        for data in _events(path.read_bytes()):
            event = Event.FromString(data)
            (tag,) = [value.tag for value in event.summary.value] or [""]
            if tag and not tag.startswith(OF_A_SESSION) and event.step in points:
                points[event.step].setdefault(tag, data)
    now = time.time()
    for metrics in history:
        for tag, number in scalars(metrics).items():
            if tag not in points[metrics.round]:
                value = Summary.Value(tag=tag, simple_value=number)
                event = Event(wall_time=now, step=metrics.round, summary=Summary(value=[value]))
                points[metrics.round][tag] = event.SerializeToString()
    content = io.BytesIO()
    writer = RecordWriter(content)
    writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
    for found in points.values():
        for data in found.values():
            writer.write(data)
    folder.mkdir(exist_ok=True)
    write_atomically(folder / EARLIER, content.getvalue())
    for path in files:
        if path.name != EARLIER:
            path.unlink()


def _events(data: bytes) -> Iterator[bytes]:
    """The contents of an event file's records, up to one that is torn or damaged.

    A record is the length of its contents (8 bytes), a checksum of that (4), the contents, a checksum of those (4).
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    start = 0
    while start + 12 <= len(data):
        head = data[start : start + 8]
        length = struct.unpack("<Q", head)[0]
        end = start + 12 + length
        if end + 4 > len(data) or masked_crc32c(head) != struct.unpack("<I", data[start + 8 : start + 12])[0]:
            return
        content = data[start + 12 : end]
        if masked_crc32c(content) != struct.unpack("<I", data[end : end + 4])[0]:
            return
        yield content
        start = end + 4
