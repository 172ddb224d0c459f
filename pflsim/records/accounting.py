"""Bytes sent and received by clients in a round."""

from __future__ import annotations

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
    up, down = {report.client: report.up_bytes for report in record.reports}, record.down_bytes
    traffic = {client: Traffic(up.get(client, 0), down.get(client, 0)) for client in sorted({*up, *down})}
    return {client: both for client, both in traffic.items() if both != Traffic()}


def round_traffic(record: RoundRecord) -> Traffic:
    """Return a round's traffic, summed over clients."""
    return sum(client_traffic(record).values(), Traffic())
