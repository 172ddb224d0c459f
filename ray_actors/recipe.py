"""How to build a client's module, in a form that travels to actors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.params import snapshot
from pflsim.seeding import seeded_global
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything a host needs to make clients, apart from their data.

    Args:
        client: (net, training) → module; a class with its settings bound.
        models: (input_shape, num_classes) → net; classes with their settings bound, one for each variant of the model.
            Client i has variant i mod len(models).
        training: the run's local training settings.
        input_shape, num_classes: of the data.
        seed: the run's seed.
        init: initial values of what is not shared: the same for all, or per client.
        device: torch device of the computation, e.g. "cpu" or "cuda:0".
        gpu_share: the share of a GPU's memory that a host may take.
        threads: torch threads of the computation.
        eval_batch_size: examples per forward pass in evaluation; None: as suits the device.
        stacks: clients that train in lockstep, stack by stack; a stack lives whole on one host, and all of it has one
            variant. Who is in none trains alone.
    """

    client: Callable[[Net, Training], ClientModule]
    models: tuple[Callable[[tuple[int, ...], int], Net], ...]
    training: Training
    input_shape: tuple[int, ...]
    num_classes: int
    seed: int
    init: Literal["same", "per_client"] = "same"
    device: str = "cpu"
    gpu_share: float = 1.0
    threads: int = 1
    eval_batch_size: int | None = None
    stacks: tuple[tuple[int, ...], ...] = ()

    def variant_of(self, client: int) -> int:
        """Which of the models a client has."""
        return client % len(self.models)

    def build(self, variant: int = 0, client: int = -1) -> ClientModule:
        """A new module on the CPU; its values are a function of (seed, variant, client), -1 for the common ones."""
        with seeded_global(self.seed, "init", client):
            return self.client(self.models[variant](self.input_shape, self.num_classes), self.training)

    def initial_state(self, client: int, common: ClientModule) -> Tensors:
        """A client's private state before the first round; `common` is a module as `build(variant)` makes it."""
        state = snapshot(common.state_dict())
        if self.init == "per_client":
            shared = set(common.shared.parameters(common)) | set(common.shared.buffers(common))
            own = snapshot(self.build(self.variant_of(client), client).state_dict())
            state.update({key: value for key, value in own.items() if key not in shared})
        return state
