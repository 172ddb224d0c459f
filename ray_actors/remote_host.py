"""The client actor: a process that a host moves into."""

from __future__ import annotations

from collections.abc import Sequence

from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.execution import Judge
from pflsim.messages import Message
from pflsim.types import EvalRow, TrainReport
from ray_actors.client_host import ClientHost
from ray_actors.parcel import Parcel
from ray_actors.recipe import Recipe


class RemoteHost:
    """Starts empty; is settled for a run, and can be settled anew for the next."""

    def settle(self, recipe: Recipe, dataset: Dataset, partition: Partition, clients: Sequence[int]) -> list[int]:
        """Build the host of these clients in place of any that was here; returns the clients."""
        self.host = ClientHost(recipe, dataset, partition, clients)
        return list(clients)

    def train(
        self, round_number: int, clients: Sequence[int], positions: Sequence[int], *downlinks: Message
    ) -> tuple[Parcel, list[TrainReport]]:
        """As `ClientHost.train`, the uplinks in a parcel."""
        uplinks, reports = self.host.train(round_number, clients, positions, *downlinks)
        return Parcel(uplinks), reports

    def finetune(
        self, round_number: int, epochs: int, clients: Sequence[int], positions: Sequence[int], *downlinks: Message
    ) -> None:
        """As `ClientHost.finetune`."""
        self.host.finetune(round_number, epochs, clients, positions, *downlinks)

    def open(self, clients: Sequence[int]) -> tuple[Parcel, list[TrainReport]]:
        """As `ClientHost.open`, the uplinks in a parcel."""
        uplinks, reports = self.host.open(clients)
        return Parcel(uplinks), reports

    def evaluate(
        self, judge: Judge, clients: Sequence[int], positions: Sequence[int], *messages: Message
    ) -> list[EvalRow]:
        """As `ClientHost.evaluate`."""
        return self.host.evaluate(judge, clients, positions, *messages)

    def private_states(self, clients: Sequence[int]) -> Parcel:
        """As `ClientHost.private_states`."""
        return Parcel(self.host.private_states(clients))
