"""Checks that enough memory is free."""

from __future__ import annotations

import resource

import psutil

from pflsim.errors import SettingsError

ADDRESS_SPACE = 6 * 10**9
"""Bytes of addresses that the driver needs: torch maps about 4 GB, and Ray about 1.5 GB."""


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


def check_address_space() -> None:
    """Check that `ulimit -v` leaves room to load torch and to start Ray, which otherwise abort or hang.

    Raises:
        SettingsError: the limit is below `ADDRESS_SPACE`.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_SPACE:
        raise SettingsError(
            f"a process may use {limit / 2**30:.3g} GiB of addresses (ulimit -v), and a run needs at least "
            f"{ADDRESS_SPACE / 2**30:.3g} GiB: raise the limit, for example with ulimit -v unlimited"
        )
