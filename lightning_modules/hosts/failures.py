"""Failures of clients, and what happens after one: another try, a round without the client, or the end of the run."""

import logging
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

import torch

from lightning_modules.hosts.attributes import StateError
from pflsim.config.settings import OnError
from pflsim.engine.execution import FaultRecorder
from pflsim.errors import ClientError, DivergenceError, SettingsError, called
from pflsim.messages import Uplink

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """Stands for the results of a client group that failed.

    Args:
        error: which client failed, and why.
        group: the clients whose results are missing.
        trace: the traceback; empty if there is none.
        kind: the client raised an error, changed an attribute outside its state, refused a setting, has values that are
            not finite, its actor died, or its GPU cannot be used any longer by this process.
        where: the actor; empty with the inline executor.
    """

    error: ClientError
    group: tuple[int, ...]
    trace: str = ""
    kind: Literal["error", "state", "settings", "nonfinite", "death", "device"] = "error"
    where: str = ""


def free_frames(error: BaseException | None) -> None:
    """Free the tensors of the failed attempt: the next one may need the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def kind_of(cause: BaseException | None) -> Literal["error", "state", "settings", "device"]:
    """Return the kind of a failure. After an error of a GPU other than a lack of memory, all later calls fail."""
    if isinstance(cause, SettingsError):
        return "settings"
    if isinstance(cause, torch.AcceleratorError) and not isinstance(cause, torch.OutOfMemoryError):
        return "device"
    return "state" if isinstance(cause, StateError) else "error"


def nonfinite(uplink: Uplink, losses: Mapping[str, float]) -> str:
    """Return which losses and values of an uplink are not finite; prototypes of missing classes are ignored."""
    found = [f"loss term {name} is {value}" for name, value in losses.items() if not isfinite(value)]
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


@dataclass
class FailurePolicy:
    """Applies the settings `on_client_error` and `on_nonfinite`, and logs every failure.

    Args:
        on_error: the setting on_client_error.
        on_nonfinite: the setting on_nonfinite: abort, drop or keep.
        faults: records the clients that failed.
        names: of the clients, if they have names.
        remedy: settings against values that are not finite.
    """

    on_error: OnError
    on_nonfinite: str
    faults: FaultRecorder
    names: tuple[str, ...] = ()
    remedy: str = ""
    _logged_traces: set[str] = field(init=False, default_factory=set)

    def retry(self, failure: Failure, tries: int, before: Failure | None = None) -> tuple[int, ...]:
        """Return the clients of the group that shall do the task again; the round continues without all others.

        Args:
            failure: what happened.
            tries: how often the group's task was retried already.
            before: the failure of the last try. There is no further try if a client raises the same error again.

        Raises:
            ClientError: the policy is to end the run.
        """
        error = failure.error
        suspects = error.suspects
        if self.names:
            cause = error.__cause__
            error = ClientError(error.client, error.round_number, error.phase, error.reason, suspects, self.names)
            error.__cause__ = cause
        text = f"{error} [{failure.where}]" if failure.where else str(error)
        if failure.kind == "nonfinite":
            if self.on_nonfinite == "abort":
                advice = f"set {self.remedy}; on_nonfinite=drop continues without the client"
                raise self._final(failure, advice, DivergenceError) from error
            logger.warning(f"{text}; dropped from this round")
            self.faults.add(suspects, "nonfinite")
            return ()
        if failure.kind in ("state", "settings"):
            raise error
        if self.on_error.rule == "drop":
            self.log(f"{text}; the round goes on without {self._clients(suspects)}", failure.trace)
            self.faults.add(suspects, "error")
            return tuple(client for client in failure.group if client not in suspects)
        repeated = failure.kind == "error" and before is not None and before.error.reason == error.reason
        if tries < self.on_error.tries and not repeated:
            self.log(f"{text}; retry {tries + 1} of {self.on_error.tries}", failure.trace)
            return failure.group
        self.log(f"{text}; the run ends{', the same error twice' if repeated else ''}", failure.trace)
        raise self._final(failure, "set on_client_error=drop to continue without it") from error

    def record_kept(self, nonfinite: Mapping[int, str]) -> None:
        """Log in one line which clients' values are not finite but were kept.

        Args:
            nonfinite: by client, which values.
        """
        if nonfinite:
            first = min(nonfinite)
            logger.warning(
                f"values that are not finite were fused (on_nonfinite=keep): {self._clients(nonfinite)}; "
                f"{called(first, self.names)}: {nonfinite[first]}"
            )
            self.faults.add(nonfinite, "nonfinite")

    def log(self, text: str, trace: str) -> None:
        """Log a failure, with its traceback unless the same one was logged before."""
        if trace and trace not in self._logged_traces:
            self._logged_traces.add(trace)
            text = f"{text}\n{trace.rstrip()}"
        logger.warning(text)

    def _clients(self, clients: Iterable[int]) -> str:
        shown = [called(client, self.names).removeprefix("client ") for client in sorted(clients)]
        return f"client{'s' if len(shown) > 1 else ''} {', '.join(shown)}"

    def _final(self, failure: Failure, advice: str, kind: type[ClientError] = ClientError) -> ClientError:
        """Return the error that ends the run, with the actor and an advice."""
        error = failure.error
        reason = f"{error.reason} [{failure.where}]" if failure.where else error.reason
        reason = f"{reason} ({advice})"
        return kind(error.client, error.round_number, error.phase, reason, error.suspects, self.names)
