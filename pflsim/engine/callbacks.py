"""Callbacks: what a run calls on the driver after each round and at its end."""

from collections.abc import Iterable, Mapping
from contextlib import chdir
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pflsim.errors import RunError, SettingsError, in_one_line
from pflsim.records.history import Traffic, round_metrics
from pflsim.types import EvalRow, RoundRecord

EVENTS = ("on_round", "on_evaluate", "on_end")
STOP = "stop"
"""What `on_round` and `on_evaluate` return to end the run after this round."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of one round, as callbacks get it.

    Args:
        round: from 1; 0 is the initial round of methods that have one.
        rows: the evaluations, one row per client, model and split, as counts; empty if the round has no evaluation.
        losses: mean of each loss term over the clients, weighted by their training examples.
        bytes: that all clients sent and received in this round.
        seconds: wall time of the round.
    """

    round: int
    rows: tuple[EvalRow, ...]
    losses: Mapping[str, float]
    bytes: Traffic
    seconds: float


class Callbacks:
    """The callbacks of a run, called in order.

    Args:
        callbacks: objects with any of the methods `on_round(result)`, `on_evaluate(result)` and `on_end(run)`. A
            function is an `on_round`.

    Raises:
        SettingsError: an object has none of these methods and is no function.
    """

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        self._calls: dict[str, list[Any]] = {event: [] for event in EVENTS}
        self._seen = -1
        for callback in callbacks:
            found = {event: getattr(callback, event) for event in EVENTS if hasattr(callback, event)}
            if isinstance(callback, type) or not (found or callable(callback)):
                raise SettingsError(f"callbacks: {callback!r}: expected a function, or an object with {EVENTS}")
            for event, call in (found or {"on_round": callback}).items():
                self._calls[event].append(call)

    def round(self, record: RoundRecord) -> str:
        """Call `on_evaluate` if the round has an evaluation, then `on_round`; not for rounds that are repeated.

        Returns:
            Which callback asks to stop, or "".

        Raises:
            RunError: a callback raised an error.
        """
        if not any(self._calls.values()) or record.round <= self._seen:
            return ""
        self._seen = record.round
        found = round_metrics(record, Traffic())
        losses = MappingProxyType({**found.losses})
        result = RoundResult(record.round, record.evaluations, losses, found.traffic, found.total_seconds)
        events = ("on_evaluate", "on_round") if result.rows else ("on_round",)
        asked = [name for event in events for name, said in self._call(event, result, record.round) if said == STOP]
        return f"callback {asked[0]} returned {STOP!r}" if asked else ""

    def end(self, run: Any) -> None:
        """Call `on_end` with the run, a `pflsim.analysis.runs.Run`."""
        self._call("on_end", run, run.done)

    def _call(self, event: str, argument: Any, round_number: int) -> list[tuple[str, Any]]:
        said = []
        for call in self._calls[event]:
            name = getattr(call, "__qualname__", type(call).__name__)
            try:
                with chdir("."):  # paths of the run may be relative
                    said.append((name, call(argument)))
            except Exception as error:
                raise RunError(f"callback {name} failed after round {round_number}: {in_one_line(error)}") from error
        return said
