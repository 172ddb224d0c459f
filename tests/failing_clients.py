"""Clients and servers that die, raise errors or diverge when a test has set a trap; importable in actors."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_modules.methods.fedprox import FedProx
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.fedavg import State
from pflsim.types import Tensors

ONCE, ALWAYS = "once", "always"


def set_trap(folder: Path, name: str, kind: str = ONCE) -> None:
    """Whoever comes by `name` is caught, once or always."""
    (folder / name).write_text(kind)


def caught(folder: Path, name: str) -> bool:
    """Whether there is a trap; one that is for once is gone then."""
    try:
        kind = (folder / name).read_text()
    except FileNotFoundError:
        return False
    if kind == ONCE:
        (folder / name).unlink()
    return True


def die_in(folder: Path, name: str, signum: int = signal.SIGKILL) -> None:
    """Be killed, where the trap says so."""
    if caught(folder, name):
        os.kill(os.getpid(), signum)


class Endangered(FedProx):
    """A client with a number of its own (its head's bias holds its labels' counts), and traps on its way."""

    def __init__(self, *arguments: Any, traps: str, **settings: Any):
        super().__init__(*arguments, mu=0.1, **settings)
        self.traps = Path(traps)

    def _meets(self, trap: str, shard: Shard) -> bool:
        """Whether this trap is on its way in this round; be killed by one that says so."""
        name = f"{trap}_{shard.client}_{self.round_number}"
        if trap.startswith("die"):
            die_in(self.traps, name)
        if trap.startswith("crash"):
            die_in(self.traps, name, signal.SIGSEGV)
        return caught(self.traps, name)

    def before_training(self, shard: Shard) -> None:
        self._meets("die_train", shard)
        self._meets("crash_train", shard)
        if self._meets("raise_train", shard):
            raise ValueError("a trap in training")
        if self._meets("gpu_train", shard):
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        super().before_training(shard)

    def reply(self, shard: Shard) -> Uplink:
        self._meets("die_reply", shard)
        up = super().reply(shard)
        if self._meets("nan", shard):
            return replace(up, weights={k: torch.full_like(v, float("nan")) for k, v in up.weights.items()})
        return up

    def before_evaluation(self, shard: Shard) -> None:
        self._meets("die_evaluate", shard)
        if self._meets("raise_evaluate", shard):
            raise ValueError("a trap in evaluation")
        super().before_evaluation(shard)


class EndangeredServer(FedAvgServer):
    """A server with traps; counts its fusions by the mean that it sends."""

    def __init__(self, *, traps: str):
        self.traps = Path(traps)

    def downlinks(self, state: State, clients: Sequence[int]) -> dict[int, Message]:
        die_in(self.traps, "die_send")
        return super().downlinks(state, clients)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        die_in(self.traps, "die_fuse")
        if caught(self.traps, "raise_fuse"):
            raise ValueError("a trap in the fusion")
        fused = super().fuse(state, uplinks)
        die_in(self.traps, "die_fused")
        return fused

    def global_weights(self, state: State) -> Tensors | None:
        die_in(self.traps, "die_global")
        return super().global_weights(state)
