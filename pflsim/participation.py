"""Which clients take part in a round; `pflsim.seeding` draws them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le


@dataclass(frozen=True)
class Participation:
    """Which clients take part in a round, besides `fraction`."""

    sampling: Literal["fixed", "poisson"] = "fixed"
    """fixed: that fraction of the clients; poisson: each client with that probability, so a round may have none."""
    cycle: Annotated[int, Ge(1), Le(1_000_000)] = 1
    """Groups of clients that are available in turn, of which `fraction` is drawn; 1: all are always available."""
    cycle_rounds: Annotated[int, Ge(1), Le(100_000)] = 1
    """Rounds in which a group is available before the next one."""
    last: Literal["sampled", "all"] = "sampled"
    """Clients of the last round: sampled as in the others, or all."""
