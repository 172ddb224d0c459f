"""Blocks of columns: all of what they are read from, once; and fusion makes nothing larger than they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pflsim.fusion.blocks import COLUMNS, Workspace, blocks
from pflsim.messages import Uplink
from pflsim.servers.base import Federation, ServerRule
from pflsim.servers.fedalp import FedALP
from pflsim.servers.fedamp import FedAMP
from pflsim.servers.fedavg import FedAvg
from pflsim.servers.fesem import FeSEM
from pflsim.servers.l2gd import L2GD
from pflsim.servers.pfedcfr import PFedCFR
from pflsim.servers.pfedhn import PFedHN
from pflsim.servers.pfedla import PFedLA
from pflsim.servers.pfedme import PFedMe
from pflsim.types import ClientInfo, Unit


@pytest.mark.parametrize("width", [0, 1, COLUMNS - 1, COLUMNS, COLUMNS + 1, 3 * COLUMNS + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_blocks_are_the_rows_from_left_to_right(width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(3, width).to(dtype)
    for given in (rows, list(rows), rows.T.contiguous().T):
        found = [block.clone() for block in blocks(given)]
        assert all(block.dtype == torch.float64 and 0 < block.shape[1] <= COLUMNS for block in found)
        assert torch.equal(torch.cat([torch.zeros(3, 0), *found], dim=1), rows.double())


def test_blocks_lie_in_the_same_memory_and_are_contiguous() -> None:
    seen = [(block.data_ptr(), block.is_contiguous()) for block in blocks(torch.rand(2, 2 * COLUMNS + 7))]
    assert len(seen) == 3 and len(set(seen)) == 1 and seen[0][1]
    work = Workspace(2, 10, torch.float32, torch.device("cpu"))
    assert work.columns(7).shape == (2, 7) and work.columns(7).data_ptr() == work.columns(10).data_ptr()


# Whole rules ----------------------------------------------------------------------------------------------------------

CLIENTS = 8
INITIAL = {"a.weight": torch.zeros(5, COLUMNS), "a.bias": torch.zeros(3), "b.weight": torch.zeros(4, 2)}
UNITS = (Unit("a", ("a.weight", "a.bias")), Unit("b", ("b.weight",)))
LAYOUTS = {
    "module": UNITS,
    "tensor": tuple(Unit(key, (key,)) for key in INITIAL),
    "model": (Unit("model", tuple(INITIAL)),),
}
RULES = [
    PFedLA(embedding=3, hidden=(4,)),
    PFedLA(embedding=3, hidden=(4,), k=1),
    FedAMP(),
    PFedCFR(r=1),
    FeSEM(groups=1),
    L2GD(),
    FedAvg(),
    PFedHN(hidden=(1,)),
    PFedMe(),
    FedALP(groups=1),
]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that comes of any operation."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            # A part of something larger is no new memory, and columns of a workspace are such parts.
            if isinstance(tensor, Tensor) and tensor._base is None:
                self.size = max(self.size, tensor.numel())
        return out


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_no_stack_of_models_is_ever_made(rule: ServerRule[Any]) -> None:
    """Neither a hundred models nor one unit of theirs lie beside the models themselves."""
    federation = Federation(tuple(ClientInfo(i, i + 1) for i in range(CLIENTS)), INITIAL, LAYOUTS, rounds=2)  # type: ignore[arg-type]
    state = rule.init(federation)
    uplinks = [
        Uplink({key: torch.randn(value.shape) for key, value in INITIAL.items()}, client=i, num_examples=i + 1)
        for i in range(CLIENTS)
    ]
    with Largest() as largest:
        state = rule.fuse(state, uplinks)
        rule.downlinks(state, range(CLIENTS))
        rule.fuse(state, uplinks)
    assert 0 < largest.size <= CLIENTS * COLUMNS
