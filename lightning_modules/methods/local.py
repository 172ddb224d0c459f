"""Local: every client alone."""

from __future__ import annotations

from lightning_modules.base import ClientModule
from pflsim.params import NOTHING


class Local(ClientModule):
    """Plain SGD on the client's own data; nothing is sent, nothing received."""

    lockstep = True
    shared = NOTHING
