"""The errors a user may meet."""

from __future__ import annotations


class SettingsError(ValueError):
    """A setting, or a combination of settings, that cannot be run. Raised before any actor starts; exit status 2."""


class ClientError(RuntimeError):
    """A client failed: says which client, in which round and phase."""

    def __init__(self, client: int, round_number: int, phase: str, reason: str):
        super().__init__(f"client {client} failed in round {round_number} ({phase}): {reason}")
        self.client, self.round_number, self.phase, self.reason = client, round_number, phase, reason

    def __reduce__(self):
        """Keep the four parts when the error crosses a process boundary."""
        return type(self), (self.client, self.round_number, self.phase, self.reason)
