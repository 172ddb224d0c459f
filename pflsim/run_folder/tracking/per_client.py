"""per_client.csv: the counts behind every rate, and every client's bytes."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from pflsim.run_folder.accounting import Traffic, client_traffic
from pflsim.types import NewcomerRecord, RoundRecord

COLUMNS = ("round", "client", "split", "model", "phase", "correct", "total", "loss", "up_bytes", "down_bytes", "fault")


class PerClientFile:
    """One line per evaluation of a client's model on a split.

    `loss` is summed over the examples, in nats. `up_bytes` and `down_bytes` are the client's in that round, whatever
    was evaluated, so they are the same in all lines of one (round, client): take one line of each before adding up.
    So is `fault`: what befell the client in the round, mostly nothing. A client with traffic or a fault but without an
    evaluation in the round has one line with empty split, model and phase, and zero counts. Lines are sorted by client,
    split, model, phase.

    Args:
        path: where it is.
        append: go on writing one that exists.
    """

    def __init__(self, path: Path, append: bool = False):
        self._file = path.open("a" if append else "x", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if not append:
            self._writer.writerow(COLUMNS)
            self._file.flush()

    def write(self, record: RoundRecord) -> None:
        """Append a round."""
        traffic = client_traffic(record)
        rows = sorted(record.evaluations, key=lambda row: (row.client, row.split, row.model, row.phase))
        unevaluated = (traffic.keys() | record.faults.keys()) - {row.client for row in rows}
        lines = [(row.client, (row.split, row.model, row.phase, row.correct, row.total, row.loss)) for row in rows]
        lines += [(client, ("", "", "", 0, 0, 0.0)) for client in unevaluated]
        for client, counts in sorted(lines, key=lambda line: line[0]):
            bytes_of = traffic.get(client, Traffic())
            both = bytes_of.up_bytes, bytes_of.down_bytes
            self._writer.writerow((record.round, client, *counts, *both, record.faults.get(client, "")))
        self._file.flush()

    def write_newcomers(self, record: NewcomerRecord) -> None:
        """Append what newcomers came to: their model is called "newcomer"; they have sent nothing."""
        for row in sorted((*record.received, *record.trained), key=lambda row: (row.client, row.split, row.phase)):
            counts = (row.client, row.split, "newcomer", row.phase, row.correct, row.total, row.loss)
            self._writer.writerow((record.round, *counts, 0, record.down_bytes[row.client], ""))
        self._file.flush()

    def sync(self) -> None:
        """Force the rows so far to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
