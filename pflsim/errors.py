"""The errors a user may meet."""

from __future__ import annotations


class SettingsError(ValueError):
    """A setting, or a combination of settings, that cannot be run. Raised before any actor starts; exit status 2."""


class RunError(RuntimeError):
    """A run ended before its end; exit status 1. Its message is for a user, and no traceback is needed beside it."""


class ClientError(RunError):
    """A client failed: says which client, in which round and phase.

    Args:
        client: its id.
        round_number: from 1; 0 is the opening.
        phase: of its work.
        reason: in words.
        suspects: the clients that worked together when it happened, where it cannot be told whose fault it was.
    """

    def __init__(
        self, client: int, round_number: int, phase: str, reason: str, suspects: tuple[int, ...] | None = None
    ):
        super().__init__(f"client {client} failed in round {round_number} ({phase}): {reason}")
        self.client, self.round_number, self.phase, self.reason = client, round_number, phase, reason
        self.suspects = suspects or (client,)

    def __reduce__(self):
        """Keep the parts when the error crosses a process boundary."""
        return type(self), (self.client, self.round_number, self.phase, self.reason, self.suspects)


class ServerError(RunError):
    """The server failed, in its rule or as an actor."""
