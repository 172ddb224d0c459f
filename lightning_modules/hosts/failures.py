"""Tasks of client groups in turn; the failure of one group does not end the others."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal

import torch

from lightning_modules.hosts.attributes import StateError
from lightning_modules.hosts.client_host import ClientHost, Reply
from pflsim.engine.execution import ClientTask, EvalRequest
from pflsim.errors import ClientError
from pflsim.messages import Message, Uplink


@dataclass(frozen=True, slots=True)
class Failure:
    """Stands for the results of a client group that failed.

    Args:
        error: which client failed, and why.
        group: the clients whose results are missing.
        trace: the traceback; empty if there is none.
        kind: the client raised an error, changed an attribute outside its state, has values that are not finite, its
            actor died, or its GPU cannot be used any longer by this process.
        where: the actor; empty with the inline executor.
    """

    error: ClientError
    group: tuple[int, ...]
    trace: str = ""
    kind: Literal["error", "state", "nonfinite", "death", "device"] = "error"
    where: str = ""


def run_groups(
    host: ClientHost,
    task: ClientTask | EvalRequest,
    groups: Sequence[tuple[int, ...]],
    messages: Mapping[int, Message | None],
) -> dict[int, Any]:
    """Do a task for client groups in turn.

    Args:
        host: holds the clients.
        task: see `ClientHost.run`.
        groups: which clients work together.
        messages: see `ClientHost.run`.

    Returns:
        By client the result of `ClientHost.run`, or the `Failure` of its group. After an error of the GPU, all groups
        that are left share one failure.
    """
    results: dict[int, Any] = {}
    for number, group in enumerate(groups):
        try:
            found = host.run(task, {client: messages[client] for client in group})
            results.update({client: _checked(host, task, client, result) for client, result in found.items()})
        except Exception as error:
            trace = "".join(traceback.format_exception(error.__cause__ or error))
            if not isinstance(error, ClientError):
                reason = f"{type(error).__name__}: {error}"
                error = ClientError(group[0], task.round_number, f"checking the result of {task.name}", reason, group)
            failure = Failure(error, group, trace, kind_of(error.__cause__))
            _free_frames(error)
            if failure.kind == "device":
                failure = replace(failure, group=tuple(client for left in groups[number:] for client in left))
            results.update(dict.fromkeys(failure.group, failure))
            if failure.kind == "device":
                break
    return results


def _free_frames(error: BaseException | None) -> None:
    """Free the tensors of the failed attempt: the next one may need the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def kind_of(cause: BaseException | None) -> Literal["error", "state", "device"]:
    """Return the kind of a failure. After an error of a GPU other than a lack of memory, all later calls fail."""
    if isinstance(cause, torch.AcceleratorError) and not isinstance(cause, torch.OutOfMemoryError):
        return "device"
    return "state" if isinstance(cause, StateError) else "error"


def _checked(host: ClientHost, task: ClientTask | EvalRequest, client: int, result: Any) -> Any:
    """Return the result, or a failure if its losses or its uplink are not finite."""
    if not isinstance(result, Reply) or result.uplink is None:
        return result
    found = nonfinite(result.uplink, result.report.losses)
    if not found:
        return result
    if host.factory.on_nonfinite == "keep":
        return replace(result, nonfinite=found)
    return Failure(ClientError(client, task.round_number, task.name, found), (client,), kind="nonfinite")


def nonfinite(uplink: Uplink, losses: Mapping[str, float]) -> str:
    """Return which losses and values of an uplink are not finite; prototypes of missing classes are ignored."""
    found = [f"loss {name} is {value}" for name, value in losses.items() if not isfinite(value)]
    found += [f"number {name} is {value}" for name, value in uplink.numbers.items() if not isfinite(value)]
    tensors = {**uplink.weights, **uplink.extra}
    if uplink.prototypes is not None:
        tensors["prototypes"] = uplink.prototypes.means[uplink.prototypes.counts > 0]
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or isfinite(tensor.sum()):  # cheaper; a sum may overflow
            continue
        if count := int((~torch.isfinite(tensor)).sum()):
            found.append(f"{count} of {tensor.numel()} values of {name} are not finite")
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
