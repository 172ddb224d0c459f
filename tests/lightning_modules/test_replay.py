"""Replayed steps on a CPU: a tape of operations at fixed addresses stands in for a CUDA graph."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PLAIN_SGD, STACKED, Records, prepared, slow_except, states
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_modules.contract.checks import inline
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.lockstep import replay
from lightning_modules.lockstep.stack_training import Lockstep
from pflsim.engine.simulation import Simulation

SMALL = ["data=digits", "clients=6", "lockstep_clients=6", "rounds=3", "batch_size=8", "lr=0.05", "lockstep=true"]
MLP = "model.hidden=[8] local_steps=6"
MOMENTUM = "model.hidden=[8] momentum=0.5 lr_decay=0.9"
CNN = "model=cnn_bn model.padding=2 model.channels=[2,3] model.hidden=6 fraction=0.7 local_steps=6"
WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default, torch.ops.aten.nonzero.default}
"""Operations that would wait for a GPU, or copy to or from it."""


class Tape(TorchDispatchMode):
    """Records operations with their tensors. A replay runs them at the same addresses, without the Python code."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        casts = func is torch.ops.aten._to_copy.default and "device" not in (kwargs or {})
        assert casts or func not in WAITS, func
        given = views((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if torch.Tag.inplace_view not in func.tags:  # changes the shape of a tensor, not its values
            self.operations.append((func, *given, views(result)))
        return result

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, before in self.operations:
                given = {leaf.untyped_storage().data_ptr() for leaf in tensors((args, kwargs))}
                for old, new in zip(tensors(before), tensors(func(*args, **kwargs)), strict=True):
                    if old.untyped_storage().data_ptr() not in given:
                        old.copy_(new)


def views(values: Any) -> Any:
    return tree_map(lambda leaf: leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf, values)


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


tapes: list[Tape] = []


def taped(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    with replay._unchanged(state), Tape() as tape:
        step()
    tapes.append(tape)
    return tape.replay


def trained(folder: Path, replays: bool, *overrides: str) -> tuple[InlineExecutor, list[Any]]:
    made = prepared(*SMALL, *overrides)
    executor, records = inline(made), Records()
    executor.host.locksteps = {v: Lockstep(m, replays) for v, m in executor.host.modules.items()}
    Simulation(executor, made.plan, folder, records).run()
    return executor, [[dict(report.losses) for report in record.reports] for record in records.records]


def refused(method: str, setting: str) -> bool:
    return method in PLAIN_SGD and setting.startswith("momentum=")


@pytest.mark.parametrize(
    ("method", "extra"),
    slow_except(
        [("fedavg", CNN), ("fedrep", MOMENTUM), ("gpfl", MLP)],
        [
            *product(STACKED, [MLP]),
            *product(["ditto", "fedrep", "per_fedavg", "pfedme"], [MOMENTUM]),
            *product(["fedavg", "fedfomo", "fedrep", "r_pfedpm"], [CNN]),
        ],
    ),
)
def test_equal_to_steps_in_turn(method: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, over rounds in which the clients, the learning rate and the width of the stack change.

    Convolutions of stacks of one depend on where the memory begins, so the last bits of CNNs may differ.
    """
    monkeypatch.setattr(replay, "captured", taped)
    tapes.clear()
    given = [f"method={method}", *(setting for setting in extra.split() if not refused(method, setting))]
    (one, losses), (other, replayed_losses) = (trained(tmp_path / str(r), r, *given) for r in (False, True))
    assert tapes or not any(lockstep.traces for lockstep in other.host.locksteps.values())
    exact = {"rtol": 0, "atol": 0} if extra != CNN else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(states(other), states(one), **exact)
    torch.testing.assert_close(replayed_losses, losses, **exact)


def test_two_stacks_are_captured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in turn in every round: a captured step reads the examples of its own stack."""
    monkeypatch.setattr(replay, "captured", taped)
    captures = []
    for rounds in (1, 3):
        tapes.clear()
        trained(tmp_path / str(rounds), True, *MLP.split(), "partition=iid", "lockstep_clients=3", f"rounds={rounds}")
        captures.append(len(tapes))
    assert captures[0] == captures[1] > 0
