"""The setting `on_client_error`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pflsim.errors import SettingsError

Rule = Literal["retry", "drop", "abort"]
DEFAULT_RETRIES = 3
"""Retries of `retry` without a number; with the rule drop, of what is not a client (server, a starting actor)."""


@dataclass(frozen=True, slots=True)
class OnError:
    """What to do when a client fails.

    Args:
        rule: retry, then end the run; drop the client from the round; or end the run.
        tries: maximum number of retries.
    """

    rule: Rule
    tries: int = 0

    @classmethod
    def of(cls, text: str) -> OnError:
        """Parse `retry(N)`, `retry`, `drop` or `abort`.

        Raises:
            SettingsError: the text is none of these.
        """
        if text in ("drop", "abort"):
            return cls(text)
        found = re.fullmatch(r"retry(?:\((\d{1,6})\))?", str(text))
        if found is None:
            raise SettingsError(f"on_client_error={text}: expected retry(N) with a whole number N, drop or abort")
        return cls("retry", DEFAULT_RETRIES if found[1] is None else int(found[1]))

    @property
    def tries_without_drop(self) -> int:
        """Maximum number of retries of what is not a client and cannot be dropped."""
        return DEFAULT_RETRIES if self.rule == "drop" else self.tries
