"""What is held for one round: no part of the state, but with the module wherever it goes."""

import pytest
import torch
from torch import Tensor, nn

from lightning_modules.anchor import Anchor, Memory
from lightning_modules.losses import proximal


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.scale = nn.Parameter(torch.ones(()))
        self.anchor = Anchor()

    def forward(self) -> Tensor:
        return proximal(self.anchor.pairs(self), 3.0)


def held(module: Module, value: float) -> Module:
    module.anchor.store({name: torch.full_like(p, value) for name, p in module.named_parameters()})
    return module


def test_not_in_the_state() -> None:
    module = Module()
    before = list(module.state_dict())
    held(module, 1.0)
    assert list(module.state_dict()) == before
    module.load_state_dict(Module().state_dict())
    assert all(not a.requires_grad for _, a in module.anchor.pairs(module))


def test_holds_copies_and_forgets_what_was_held() -> None:
    module, sent = Module(), torch.zeros(1)
    module.anchor.store({"net.0.bias": torch.zeros(3)})
    module.anchor.store({"net.1.bias": sent})
    sent.fill_(9)
    ((parameter, anchor),) = module.anchor.pairs(module)
    assert parameter is module.net[1].bias and anchor.item() == 0
    module.anchor.clear()
    assert list(module.anchor.pairs(module)) == []
    assert list(module.anchor.buffers()) == []


def test_holds_what_it_is_for_as_it_is_received() -> None:
    """By the same name or by another one; a missing name is an error, and an anchor without one keeps its value."""
    module, sent = Module(), {"net.1.bias": torch.tensor([7.0]), "other.1.bias": torch.tensor([8.0])}
    for anchor, value in ((Anchor(["net.1.bias"]), 7), (Anchor({"net.1.bias": "other.1.bias"}), 8)):
        anchor.store_received(sent)
        ((parameter, held_value),) = anchor.pairs(module)
        assert parameter is module.net[1].bias and held_value.tolist() == [value]
        with pytest.raises(KeyError, match="1.bias"):
            anchor.store_received({})
    held(module, 2.0).anchor.store_received(sent)
    assert len(list(module.anchor.pairs(module))) == 5


def test_memory_is_part_of_the_state_and_starts_at_zero() -> None:
    module = Module()
    module.memory = Memory(module, ["net.0.weight", "scale"])
    kept = {name for name in module.state_dict() if name.startswith("memory.")}
    assert kept == {"memory.net/0/weight", "memory.scale"} and "memory.scale" not in dict(module.named_parameters())
    assert all(not value.any() for value in module.memory.tensors.values())
    given = torch.full((3, 2), 2.0)
    module.memory.update({"net.0.weight": given})
    given.zero_()
    assert module.memory.tensors["net.0.weight"].eq(2).all() and not module.memory.tensors["scale"].any()
    (first, second) = module.memory.pairs(module)
    assert first[0] is module.net[0].weight and second[0] is module.scale
    other = Module()
    other.memory = Memory(other, ["net.0.weight", "scale"])
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.memory.tensors["net.0.weight"], module.memory.tensors["net.0.weight"])
