"""Reference tensors that a client holds for one round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from pflsim.types import Tensors


class Anchor(nn.Module):
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

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name; empty after `clear`."""
        return {key.replace("/", "."): value for key, value in self.named_buffers(recurse=False)}

    def pairs(self, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter of `module`, stored tensor) for each stored name."""
        for name, value in self.tensors.items():
            owner, _, attribute = name.rpartition(".")
            # not get_parameter: torch.func.functional_call replaces parameters by plain tensors
            yield getattr(module.get_submodule(owner), attribute), value
