"""Tensors that a client holds by the names of parameters: for one round, or from round to round."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from pflsim.types import Tensors


class NamedTensors(nn.Module):
    """Buffers by names that may contain dots, such as those of parameters."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {key.replace("/", "."): value for key, value in self.named_buffers(recurse=False)}

    def pairs(self, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter of `module`, tensor) for each name."""
        for name, value in self.tensors.items():
            owner, _, attribute = name.rpartition(".")
            # not get_parameter: torch.func.functional_call replaces parameters by plain tensors
            yield getattr(module.get_submodule(owner), attribute), value


class Memory(NamedTensors):
    """Keeps a private tensor for each of some parameters from round to round, for example a control variate.

    The tensors are persistent buffers, so they are part of the client's state. They start at zero.

    Args:
        module: the client module.
        names: its parameters.

    Example:
        >>> self.control = Memory(self, self.shared_parameters())  # in __init__
        >>> self.control.update(changed)  # in reply
    """

    def __init__(self, module: nn.Module, names: Sequence[str]):
        super().__init__()
        for name in names:
            self.register_buffer(name.replace(".", "/"), torch.zeros_like(module.get_parameter(name)).detach())

    def update(self, tensors: Tensors) -> None:
        """Copy new values into the tensors of these names."""
        for name, value in tensors.items():
            self.get_buffer(name.replace(".", "/")).copy_(value.detach())


class Anchor(NamedTensors):
    """Stores reference tensors for one round, for example the received model of a proximal term.

    The tensors are non-persistent buffers: they follow the module to its device and are stacked with it, but are not
    part of the state_dict. They are cleared before each client.

    Args:
        names: parameters of the client module whose received values `ClientModule.receive` stores here. Where the
            message uses other names, a mapping from the module's name to the message's. Empty: the method calls
            `store` itself.

    Example:
        >>> self.received = Anchor(self.shared_parameters())  # in __init__
        >>> proximal(self.received.pairs(self), self.mu)  # in objective
    """

    def __init__(self, names: Sequence[str] | Mapping[str, str] = ()):
        super().__init__()
        self.names = dict(names) if isinstance(names, Mapping) else {name: name for name in names}

    def store_received(self, weights: Tensors) -> None:
        """Store the received values of the parameters in `names`; does nothing if `names` is empty.

        Raises:
            KeyError: the message lacks one of them.
        """
        if self.names:
            self.store({name: weights[sent] for name, sent in self.names.items()})

    def store(self, tensors: Tensors) -> None:
        """Replace the stored tensors by copies of these."""
        self.clear()
        for name, value in tensors.items():
            # buffer names may not contain dots
            self.register_buffer(name.replace(".", "/"), value.detach().clone(), persistent=False)

    def clear(self) -> None:
        """Remove all stored tensors."""
        self._buffers.clear()
        self._non_persistent_buffers_set.clear()
