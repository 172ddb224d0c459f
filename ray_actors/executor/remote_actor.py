"""What all actors have in common."""

from __future__ import annotations

import sys
from collections.abc import Sequence


class RemoteActor:
    """The base class of actors."""

    def extend_path(self, folders: Sequence[str]) -> None:
        """Add folders to the end of the import path. Called before `build`, whose arguments may be of own classes."""
        sys.path.extend(folder for folder in folders if folder not in sys.path)
