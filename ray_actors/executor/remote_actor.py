"""What all actors have in common."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_actors.executor.zero_copy import ZeroCopyMessage


class RemoteActor:
    """The base class of actors."""

    def extend_path(self, folders: Sequence[str]) -> None:
        """Add folders to the end of the import path. Called before `build`, whose arguments may be of own classes."""
        sys.path.extend(folder for folder in folders if folder not in sys.path)


def zero_copy(content: object) -> ZeroCopyMessage:
    """Return a `ZeroCopyMessage` of the content."""
    from ray_actors.executor.zero_copy import ZeroCopyMessage

    return ZeroCopyMessage(content)
