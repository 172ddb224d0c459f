"""Work of clients, unit by unit, such that a failure is the result of its unit and nothing else."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from pflsim.engine.execution import EvalRequest
from pflsim.errors import ClientError
from pflsim.messages import Message, Uplink
from pflsim.types import EvalRow, Tensors, TrainReport
from ray_actors.hosts.client_host import ClientHost


@dataclass(frozen=True, slots=True)
class Failure:
    """What is there in place of a unit's results.

    Args:
        error: what happened to whom.
        unit: the clients whose results are missing for it.
        trace: the traceback; empty where there is none.
        kind: an error that was raised, values that are not finite, or an actor that died.
        where: on which actor, where there are any.
    """

    error: ClientError
    unit: tuple[int, ...]
    trace: str = ""
    kind: Literal["error", "nonfinite", "death"] = "error"
    where: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client's training came to. `nonfinite` says in words what is not finite and was let through."""

    uplink: Uplink
    report: TrainReport
    state: Tensors
    nonfinite: str = ""


class Attempts:
    """The work of some units on a host, which has the states that it had before when it is over.

    Args:
        host: holds the states that the work starts from.
        units: who works together.
    """

    def __init__(self, host: ClientHost, units: Sequence[tuple[int, ...]]):
        self.host, self.units = host, units

    def train(
        self, round_number: int, downlinks: Mapping[int, Message], work: Mapping[int, float]
    ) -> dict[int, Reply | Failure]:
        """See `ClientHost.train`."""

        def unit(clients: tuple[int, ...]) -> dict[int, Reply | Failure]:
            positions, messages = range(len(clients)), [downlinks[client] for client in clients]
            ups, reports = self.host.train(round_number, clients, positions, *messages, work=work)
            return {up.client: self._reply(round_number, up, report) for up, report in zip(ups, reports, strict=True)}

        return self._each(round_number, unit)

    def open(self) -> dict[int, Reply | Failure]:
        """See `ClientHost.open`."""

        def unit(clients: tuple[int, ...]) -> dict[int, Reply | Failure]:
            ups, reports = self.host.open(clients)
            return {up.client: self._reply(0, up, report) for up, report in zip(ups, reports, strict=True)}

        return self._each(0, unit)

    def finetune(
        self, round_number: int, epochs: int, downlinks: Mapping[int, Message]
    ) -> dict[int, Tensors | Failure]:
        """See `ClientHost.finetune`; returns the new states."""

        def unit(clients: tuple[int, ...]) -> dict[int, Tensors]:
            messages = [downlinks[client] for client in clients]
            self.host.finetune(round_number, epochs, clients, range(len(clients)), *messages)
            return {client: self.host.states[client] for client in clients}

        return self._each(round_number, unit)

    def evaluate(self, request: EvalRequest, messages: Mapping[int, Message]) -> dict[int, list[EvalRow] | Failure]:
        """See `ClientHost.evaluate`."""

        def unit(clients: tuple[int, ...]) -> dict[int, list[EvalRow]]:
            positions = range(len(clients)) if messages else ()
            rows = self.host.evaluate(request, clients, positions, *[messages[c] for c in clients if messages])
            return {client: [row for row in rows if row.client == client] for client in clients}

        return self._each(request.round_number, unit)

    def _each(self, round_number: int, work: Callable[[tuple[int, ...]], Mapping[int, Any]]) -> dict[int, Any]:
        results: dict[int, Any] = {}
        for unit in self.units:
            with _as_before(self.host, unit):
                try:
                    results.update(work(unit))
                except Exception as error:
                    trace = "".join(traceback.format_exception(error.__cause__ or error))
                    results.update(dict.fromkeys(unit, Failure(_of(unit, round_number, error), unit, trace)))
        return results

    def _reply(self, round_number: int, uplink: Uplink, report: TrainReport) -> Reply | Failure:
        reply = Reply(uplink, report, self.host.states[uplink.client])
        found = nonfinite(uplink, report.losses)
        if not found:
            return reply
        if self.host.factory.on_nonfinite == "keep":
            return replace(reply, nonfinite=found)
        error = ClientError(uplink.client, round_number, "local training" if round_number else "initial round", found)
        return Failure(error, (uplink.client,), kind="nonfinite")


def _of(unit: tuple[int, ...], round_number: int, error: Exception) -> ClientError:
    """The error as one of these clients'; what is wrong with a reply shows only when it is looked at."""
    if isinstance(error, ClientError):
        return error
    return ClientError(unit[0], round_number, "what it gave back", f"{type(error).__name__}: {error}", unit)


@contextmanager
def _as_before(host: ClientHost, clients: Sequence[int]) -> Iterator[None]:
    """Whatever becomes of the states of these clients inside the block, afterwards they are what they were."""
    before = {client: host.states[client] for client in clients}
    try:
        yield
    finally:
        host.states.update(before)


def nonfinite(uplink: Uplink, losses: Mapping[str, float]) -> str:
    """What of a client's losses and message is not finite, in words, if anything is. Missing classes do not count."""
    found = [f"loss {name} is {value}" for name, value in losses.items() if not _finite(value)]
    found += [f"number {name} is {value}" for name, value in uplink.numbers.items() if not _finite(value)]
    tensors = {**uplink.weights, **uplink.extra}
    if uplink.prototypes is not None:
        tensors["prototypes"] = uplink.prototypes.means[uplink.prototypes.counts > 0]
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            found.append(f"{count} of {tensor.numel()} values of {name} are not finite")
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def _finite(value: float) -> bool:
    return value - value == 0
