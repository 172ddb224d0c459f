"""What a client was sent and pulls towards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from pflsim.types import Tensors


class Anchor(nn.Module):
    """Fixed tensors by parameter name, held for one round.

    They are buffers, so that they follow the module to its device and stack with it, but not persistent ones: they are
    no part of a client's private state.

    Args:
        received: parameters of the module to hold as they are received, which `ClientModule.receive` sees to; where the
            message has them under other names, a mapping to those. Without any, the method says what is held.
    """

    def __init__(self, received: Sequence[str] | Mapping[str, str] = ()):
        super().__init__()
        self.received = dict(received) if isinstance(received, Mapping) else {name: name for name in received}

    def take(self, weights: Tensors) -> None:
        """Hold what was received of the parameters that it is for; one that is missing is a KeyError."""
        if self.received:
            self.hold({name: weights[sent] for name, sent in self.received.items()})

    def hold(self, tensors: Tensors) -> None:
        """Forget what was held and keep copies of these."""
        self.clear()
        for name, value in tensors.items():
            self.register_buffer(_key(name), value.detach().clone(), persistent=False)

    def clear(self) -> None:
        """Forget everything."""
        self._buffers.clear()
        self._non_persistent_buffers_set.clear()

    def pairs(self, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Each held tensor beside the module's parameter of the same name: (parameter, anchor)."""
        for key, value in self.named_buffers(recurse=False):
            owner, _, name = key.rpartition("/")
            # not get_parameter: under torch.func.functional_call a parameter is stood in for by a plain tensor
            yield getattr(module.get_submodule(owner.replace("/", ".")), name), value


def _key(name: str) -> str:
    """Buffer names may not contain dots."""
    return name.replace(".", "/")
