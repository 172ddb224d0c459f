"""What the settings say about a client that fails."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pflsim.errors import SettingsError

Rule = Literal["retry", "drop", "abort"]
TRIES = 3
"""How often what no client can be left out for (the server, an actor that starts) is tried again with the rule drop."""


@dataclass(frozen=True, slots=True)
class OnError:
    """The rule of `on_client_error`.

    Args:
        rule: try again and then end the run, go on without the client in that round, or end the run.
        tries: how often retry tries again.
    """

    rule: Rule
    tries: int = 0

    @classmethod
    def of(cls, text: str) -> OnError:
        """Read `retry(n)`, `drop` or `abort`; `retry` alone is three times.

        Raises:
            SettingsError: it is none of these.
        """
        if text in ("drop", "abort"):
            return cls(text)
        found = re.fullmatch(r"retry(?:\((\d{1,6})\))?", str(text))
        if found is None:
            raise SettingsError(f"on_client_error={text}: expected retry(n) with a whole number n, drop or abort")
        return cls("retry", TRIES if found[1] is None else int(found[1]))

    @property
    def tries_without_drop(self) -> int:
        """How often something is tried again that no client can be left out for."""
        return TRIES if self.rule == "drop" else self.tries
