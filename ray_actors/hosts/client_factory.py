"""How to build a client's module, in a form that travels to actors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.params import snapshot
from pflsim.seeding import seeded_global
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class ClientFactory:
    """Everything a host needs to make clients, apart from their data.

    Args:
        client: (net, training) → module; a class with its settings bound.
        models: (input_shape, num_classes) → net; classes with their settings bound, one for each variant of the model.
            Client i has variant i mod len(models).
        training: the run's local training settings.
        input_shape, num_classes: of the data.
        seed: the run's seed.
        init: initial values of what is not shared: the same for all, or per client.
        device: torch device of the computation, "cpu" or "cuda:0"; see `seated` for those of a mix.
        gpu_share: the share of a GPU's memory that a host may take, with what CUDA itself takes.
        threads: torch threads of the computation.
        eval_batch_size: examples per forward pass in evaluation; None: as suits the device.
        stacks: clients that train in lockstep, stack by stack; a stack lives whole on one host, and all of it has one
            variant. Who is in none trains alone.
        on_nonfinite: what becomes of a client whose losses or message are not finite: abort, drop or keep.
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
    on_nonfinite: Literal["abort", "drop", "keep"] = "abort"

    def seated(self, gpus: float) -> ClientFactory:
        """This recipe for a host that has so much of a GPU; one that has nothing of it works on the CPU."""
        return replace(self, gpu_share=min(gpus, 1.0)) if gpus else replace(self, device="cpu")

    def variant_of(self, client: int) -> int:
        """Which of the models a client has."""
        return client % len(self.models)

    def build(self, variant: int = 0, client: int = -1) -> ClientModule:
        """A new module on the CPU; its values are a function of (seed, variant, client), -1 for the common ones."""
        with seeded_global(self.seed, "init", client):
            return self.client(self.models[variant](self.input_shape, self.num_classes), self.training)

    def units(self, clients: Collection[int]) -> list[tuple[int, ...]]:
        """Who of some clients works together, unit by unit: what there is of each stack, then everyone else alone."""
        held = set(clients)
        present = [tuple(client for client in stack if client in held) for stack in self.stacks]
        together = [unit for unit in present if unit]
        return together + [(client,) for client in sorted(held.difference(*together))]


class InitialStates(dict[int, Tensors]):
    """Every client's private state before the first round, made when it is first asked for.

    Args:
        factory: says how.
        modules: of every variant, as `Recipe.build(variant)` makes them; what they hold is copied.
    """

    def __init__(self, factory: ClientFactory, modules: Mapping[int, ClientModule]):
        self._recipe = factory
        self._common = {variant: snapshot(module.state_dict()) for variant, module in modules.items()}
        self._shared = {
            variant: {*module.shared.parameters(module), *module.shared.buffers(module)}
            for variant, module in modules.items()
        }

    def __missing__(self, client: int) -> Tensors:
        factory, variant = self._recipe, self._recipe.variant_of(client)
        state = self._common[variant]
        if factory.init == "per_client":
            own = snapshot(factory.build(variant, client).state_dict())
            state = {**state, **{key: value for key, value in own.items() if key not in self._shared[variant]}}
            self[client] = state
        return state
