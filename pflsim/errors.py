"""Errors that the command line prints without a traceback."""

from __future__ import annotations


class SettingsError(ValueError):
    """Raised before any actor starts when settings are invalid or contradict each other; exit status 2."""


class RunError(RuntimeError):
    """Raised when a run fails; exit status 1."""


class ClientError(RunError):
    """Raised when a client fails.

    Args:
        client: its id.
        round_number: from 1; 0 is the initial round.
        phase: what the client was doing, e.g. "local training".
        reason: the error as text.
        suspects: the clients that trained together, if the failure cannot be attributed to one of them.
    """

    def __init__(
        self, client: int, round_number: int, phase: str, reason: str, suspects: tuple[int, ...] | None = None
    ):
        super().__init__(f"client {client} failed in round {round_number} ({phase}): {reason}")
        self.client, self.round_number, self.phase, self.reason = client, round_number, phase, reason
        self.suspects = suspects or (client,)

    def __reduce__(self):
        """Keep the attributes when the error is pickled."""
        return type(self), (self.client, self.round_number, self.phase, self.reason, self.suspects)


class ServerError(RunError):
    """Raised when the server rule or its actor fails."""
