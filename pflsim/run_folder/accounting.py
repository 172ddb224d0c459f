"""The byte ledger: what every client received and sent, summed over the rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pflsim.types import RoundRecord


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent by clients (up) and to clients (down)."""

    up_bytes: int = 0
    down_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.up_bytes + other.up_bytes, self.down_bytes + other.down_bytes)


def client_traffic(record: RoundRecord) -> dict[int, Traffic]:
    """Each client's bytes in one round, by ascending id; a client that got and sent nothing is not in it."""
    traffic: dict[int, Traffic] = {}
    for report in record.reports:
        traffic[report.client] = traffic.get(report.client, Traffic()) + Traffic(up_bytes=report.up_bytes)
    for client, count in record.down_bytes.items():
        traffic[client] = traffic.get(client, Traffic()) + Traffic(down_bytes=count)
    return {client: traffic[client] for client in sorted(traffic) if traffic[client] != Traffic()}


def total(traffic: Iterable[Traffic]) -> Traffic:
    """Add up."""
    return sum(traffic, Traffic())


class Ledger:
    """Cumulative traffic per client. Its whole state is `clients`, a plain mapping."""

    def __init__(self, records: Iterable[RoundRecord] = ()):
        self.clients: dict[int, Traffic] = {}
        for record in records:
            self.add(record)

    def add(self, record: RoundRecord) -> Traffic:
        """Enter a round and return its traffic, all clients together."""
        entry = client_traffic(record)
        self._enter(entry)
        return total(entry.values())

    @classmethod
    def of(cls, rounds: Iterable[Mapping[int, Traffic]]) -> Ledger:
        """The ledger of rounds of which each client's traffic is known."""
        ledger = cls()
        for entry in rounds:
            ledger._enter(entry)
        return ledger

    def _enter(self, entry: Mapping[int, Traffic]) -> None:
        for client, traffic in entry.items():
            self.clients[client] = self.clients.get(client, Traffic()) + traffic

    @property
    def total(self) -> Traffic:
        """All clients together, all rounds so far."""
        return total(self.clients.values())
