"""Checks that enough memory is free."""

from __future__ import annotations

import psutil

from pflsim.errors import SettingsError


def check_room(what: str, needed: int, instead: str) -> None:
    """Check that enough memory is free; the kernel kills a process that takes more without a message.

    Args:
        what: what the memory is for; the error begins with it.
        needed: bytes.
        instead: advice that ends the error.

    Raises:
        SettingsError: less is free.
    """
    free = psutil.virtual_memory().available
    if needed > free:
        raise SettingsError(
            f"{what} would need {needed / 2**30:.4g} GiB of memory, but only {free / 2**30:.4g} GiB are free: {instead}"
        )
