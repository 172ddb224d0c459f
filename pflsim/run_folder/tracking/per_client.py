"""per_client.csv: correct predictions, losses and traffic of every client."""

from __future__ import annotations

import csv
import os
from dataclasses import astuple
from pathlib import Path

from pflsim.run_folder.accounting import Traffic, client_traffic
from pflsim.types import NewcomerRecord, RoundRecord

COLUMNS = ("round", "client", "split", "model", "phase", "correct", "total", "loss", "up_bytes", "down_bytes", "fault")


class PerClientFile:
    """Writes one row per evaluation of a client's model on a split.

    `loss` is summed over the examples, in nats. `up_bytes`, `down_bytes` and `fault` describe the client's round, so
    they are equal in all rows with the same round and client: use one of these rows to sum bytes. A client with traffic
    or a fault but without an evaluation has one row with empty split, model and phase, and zero counts. Rows of a round
    are sorted by client, split, model and phase.

    Args:
        path: the file.
        append: append to an existing file.
    """

    def __init__(self, path: Path, append: bool = False):
        self._file = path.open("a" if append else "x", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if not append:
            self._writer.writerow(COLUMNS)
            self._file.flush()

    def write(self, record: RoundRecord) -> None:
        """Append the rows of a round."""
        traffic = client_traffic(record)
        rows = sorted(record.evaluations, key=lambda row: (row.client, row.split, row.model, row.phase))
        unevaluated = (traffic.keys() | record.faults.keys()) - {row.client for row in rows}
        lines = [(row.client, (row.split, row.model, row.phase, row.correct, row.total, row.loss)) for row in rows]
        lines += [(client, ("", "", "", 0, 0, 0.0)) for client in unevaluated]
        for client, counts in sorted(lines, key=lambda line: line[0]):
            up, down = astuple(traffic.get(client, Traffic()))
            self._writer.writerow((record.round, client, *counts, up, down, record.faults.get(client, "")))
        self._file.flush()

    def write_newcomers(self, record: NewcomerRecord) -> None:
        """Append the evaluations of newcomers, with model "newcomer". Newcomers have no uplinks."""
        for row in sorted((*record.received, *record.trained), key=lambda row: (row.client, row.split, row.phase)):
            counts = (row.client, row.split, "newcomer", row.phase, row.correct, row.total, row.loss)
            self._writer.writerow((record.round, *counts, 0, record.down_bytes[row.client], ""))
        self._file.flush()

    def sync(self) -> None:
        """Fsync the file."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
