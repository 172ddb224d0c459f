"""Builds clients' modules and their initial states; can be sent to actors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_modules.base import ClientModule
from lightning_modules.nets.adjust import Adjustments
from lightning_modules.nets.net import Net
from lightning_modules.private_steps import PrivateSteps
from lightning_modules.torch_defaults import default_dtype
from lightning_modules.training import Training
from pflsim.attacks import Attackers
from pflsim.engine.execution import ClientTask, EvalRequest, TrainTask
from pflsim.params import dtype_of, second_names, snapshot
from pflsim.seeding import seeded_global
from pflsim.servers.base import ServerRule
from pflsim.tasks.metrics import Metric
from pflsim.transforms.base import Transform
from pflsim.types import Tensors


class MakesClient(Protocol):
    """Type of a method's `client` with its settings bound."""

    def __call__(self, net: Net, training: Training, /) -> ClientModule:
        """Return a client's module."""
        ...


class MakesRule(Protocol):
    """Type of a method's `server` with its settings bound."""

    def __call__(self) -> ServerRule:
        """Return the server rule."""
        ...


class MakesNet(Protocol):
    """Type of a model with its settings bound."""

    def __call__(self, input_shape: tuple[int, ...], num_classes: int, /) -> Net:
        """Return a network."""
        ...


@dataclass(frozen=True, slots=True)
class ClientFactory:
    """Builds clients' modules; holds everything that a host needs besides the data.

    Args:
        client: (net, training) → module; a class with its settings bound. One with a common net gets it as `common`.
        models: (input_shape, num_classes) → net; one for each variant of the model. Client i has variant
            i mod len(models).
        training: the settings of local training.
        input_shape: of the data.
        num_classes: outputs of the model.
        seed: the run's seed.
        adjust: changes each net before the method gets it.
        init: initial values of what is not shared: the same for all clients, or different for each.
        device: torch device, "cpu" or "cuda:0".
        gpu_share: a host's share of the GPU's memory, including what CUDA takes.
        threads: number of torch's threads.
        eval_batch_size: examples per forward pass in evaluation; None: depends on the device.
        metrics: metrics to compute besides the accuracy of classification.
        stacks: groups of clients that train in lockstep. All clients of a stack have the same host and the same
            variant. Clients in no stack train alone.
        groups: clients that are evaluated together, on one host; each stack is in one group.
        augment: how the images of local training are varied.
        constants: buffers that do not travel, see `ClientModule.shared_buffers`.
        common: (input_shape, num_classes) → common net, if the client has one, see `ClientModule.common_net`; else ().
        uplink: what happens to the weights that clients send after local training; None: nothing.
        attackers: the malicious clients; None: there are none.
        private_steps: how clients train with privacy=example; None: as they do without it.
        on_nonfinite: what happens if a client's losses or uplink are not finite: abort, drop or keep.
    """

    client: Callable[..., ClientModule]
    models: tuple[Callable[[tuple[int, ...], int], Net], ...]
    training: Training
    input_shape: tuple[int, ...]
    num_classes: int
    seed: int
    adjust: Adjustments = Adjustments()
    init: Literal["same", "per_client"] = "same"
    device: str = "cpu"
    gpu_share: float = 1.0
    threads: int = 1
    eval_batch_size: int | None = None
    metrics: tuple[Metric, ...] = ()
    stacks: tuple[tuple[int, ...], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    augment: Literal["none", "crop_flip"] = "none"
    on_nonfinite: Literal["abort", "drop", "keep"] = "abort"
    constants: frozenset[str] = frozenset()
    common: tuple[Callable[[tuple[int, ...], int], Net], ...] = ()
    uplink: Transform | None = None
    attackers: Attackers | None = None
    private_steps: PrivateSteps | None = None

    def with_gpus(self, gpus: float) -> ClientFactory:
        """Return the factory for a host with this share of a GPU; 0 means that the host computes on the CPU."""
        return replace(self, gpu_share=min(gpus, 1.0)) if gpus else replace(self, device="cpu")

    def variant_of(self, client: int) -> int:
        """Return the index of a client's variant of the model."""
        return client % len(self.models)

    def build(self, variant: int = 0, client: int = -1) -> ClientModule:
        """Return a new module on the CPU; its values depend on (seed, variant, client), with -1 for the common ones."""
        with seeded_global(self.seed, "init", client):
            net = self.models[variant](self.input_shape, self.num_classes)
            self.adjust(net)
            with seeded_global(self.seed, "common"):  # equal for all clients, and no copy of their nets
                nets = [make(self.input_shape, self.num_classes) for make in self.common]
            for common in nets:
                Adjustments()(common)  # what the model itself fixes
            with default_dtype(dtype_of(net.head)):
                module = self.client(net, self.training, **({"common": nets[0]} if nets else {}))
        for kind in {type(part) for part in net.modules() if is_parametrized(part)}:
            if "__getstate__" in vars(kind):  # raises an error, although Ray can pickle these classes of torch
                del kind.__getstate__  # type: ignore[attr-defined]
        module.constant_buffers, module.second_names = self.constants, second_names(module)
        module.keep_optimizers()
        if self.uplink is not None:
            parameters = {name: module.get_parameter(name).detach() for name in module.shared_parameters()}
            module.uplink_memory = nn.Module()
            for name, value in self.uplink.memory(parameters).items():
                module.uplink_memory.register_buffer(name.replace(".", "/"), value)
        return module

    def nets(self) -> Iterator[Net]:
        """Build a net of each variant, one after another."""
        return (self.build(variant).net for variant in range(len(self.models)))

    def task_groups(self, task: ClientTask | EvalRequest, clients: Collection[int]) -> list[tuple[int, ...]]:
        """Return which of these clients do a task together: a stack trains together, a group is evaluated together."""
        together = {TrainTask: self.stacks, EvalRequest: self.groups}.get(type(task), ())
        chosen = set(clients)
        found = [tuple(client for client in some if client in chosen) for some in together]
        groups = [group for group in found if group]
        return groups + [(client,) for client in sorted(chosen.difference(*groups))]


class InitialStates(dict[int, Tensors]):
    """Private states by client; a client's initial state is computed when it is first read.

    Args:
        factory: how to build the modules.
        modules: one of each variant, as `ClientFactory.build(variant)` returns it; its values are copied.
    """

    def __init__(self, factory: ClientFactory, modules: Mapping[int, ClientModule]):
        self._factory, self._modules = factory, modules
        self.common = {variant: snapshot(module.state_dict()) for variant, module in modules.items()}
        """By variant the initial state, from which clients begin unless `init` is per_client."""

    def __missing__(self, client: int) -> Tensors:
        variant = self._factory.variant_of(client)
        state = self.common[variant]
        if self._factory.init == "per_client":
            own, module = snapshot(self._factory.build(variant, client).state_dict()), self._modules[variant]
            for chosen in (module.shared, module.equal_start):
                own |= {key: state[key] for key in (*chosen.parameters(module), *chosen.buffers(module))}
            self[client] = state = own
        return state
