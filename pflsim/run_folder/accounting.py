"""Bytes sent and received per client, summed over the rounds."""

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
    """Return each client's traffic in a round, by ascending id. Clients without traffic are left out."""
    entries = [(report.client, Traffic(up_bytes=report.up_bytes)) for report in record.reports]
    entries += [(client, Traffic(down_bytes=count)) for client, count in record.down_bytes.items()]
    traffic: dict[int, Traffic] = {}
    for client, part in entries:
        traffic[client] = traffic.get(client, Traffic()) + part
    return {client: traffic[client] for client in sorted(traffic) if traffic[client] != Traffic()}


def total(traffic: Iterable[Traffic]) -> Traffic:
    """Return the sum."""
    return sum(traffic, Traffic())


class Ledger:
    """Sums the traffic of every client over the rounds."""

    def __init__(self, records: Iterable[RoundRecord] = ()):
        self.clients: dict[int, Traffic] = {}
        for record in records:
            self.add(record)

    def add(self, record: RoundRecord) -> Traffic:
        """Add a round and return the round's traffic, summed over clients."""
        return self.add_traffic(client_traffic(record))

    def add_traffic(self, clients: Mapping[int, Traffic]) -> Traffic:
        """Add a round's traffic by client and return its sum."""
        for client, traffic in clients.items():
            self.clients[client] = self.clients.get(client, Traffic()) + traffic
        return total(clients.values())

    @property
    def total(self) -> Traffic:
        """Return the traffic of all clients in all rounds so far."""
        return total(self.clients.values())
