"""For actors on pretended GPUs: numbers in place of a memory, and what they are shown. Loads nothing that is large."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass
class Pretended:
    """Returns given numbers and counts the measurements.

    Args:
        held: bytes at the end of each trial, in turn.
        size: bytes of the GPU.
    """

    held: list[int]
    size: int
    begun: int = field(default=0)

    def begin(self) -> None:
        self.begun += 1

    def peak(self) -> int:
        return self.held[self.begun - 1]

    def total(self) -> int:
        return self.size


class Shown:
    """Returns the GPUs that Ray shows to an actor."""

    def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]
