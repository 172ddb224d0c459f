"""What a client was sent and pulls towards."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from pflsim.types import Tensors


class Anchor(nn.Module):
    """Fixed tensors by parameter name, held for one round.

    They are buffers, so that they follow the module to its device and stack with it, but not persistent ones: they are
    no part of a client's private state.
    """

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
