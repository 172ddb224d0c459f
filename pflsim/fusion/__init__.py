"""Fusion as pure functions on stacked tensors."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt


@dataclass(frozen=True)
class ServerOptimizer:
    """The optimiser that moves the server's model, if the server takes a mean of the clients' models."""

    name: Literal["none", "fedavgm", "fedadagrad", "fedadam", "fedyogi"] = "none"
    """none (the mean is the model), fedavgm, fedadagrad, fedadam or fedyogi; server_optimizer=NAME is the same."""
    lr: Annotated[float, Gt(0), Le(1e30)] | None = None
    """Learning rate η of the server; null: 1 for fedavgm, 0.01 for the others."""
    beta1: Annotated[float, Ge(0), Lt(1)] | None = None
    """Momentum β of fedavgm and β₁ of the others, in [0, 1); null: 0 for fedadagrad, 0.9 for the others."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    """β₂ of fedadam and fedyogi, in [0, 1)."""
    tau: Annotated[float, Gt(0), Le(1e30)] = 1e-3
    """τ of fedadagrad, fedadam and fedyogi, added to the root of v."""
    v0: Annotated[float, Ge(0), Le(1e30)] = 0.0
    """First value of their v."""
    bias_correction: bool = False
    """Correct the bias of m and v, as Adam does, in fedadam and fedyogi."""
    nesterov: bool = False
    """Nesterov's momentum in fedavgm."""
