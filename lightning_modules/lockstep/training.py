"""Training clients in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_modules.base import ClientModule
from lightning_modules.lockstep.plan import plan
from lightning_modules.lockstep.stack import Stack
from lightning_modules.lockstep.traces import Traces
from lightning_modules.lockstep.trainee import Trainee
from lightning_modules.lockstep.values import wear
from lightning_modules.phases import Stage


class Lockstep:
    """Trains stacks of clients, each with its own examples, order of examples and number of batches.

    Equal to `loop.train` for each of them but for rounding. The clients with the most batches come first in a stack, so
    that those which have finished leave at its end. The full batches of a stack are one traced step; a batch of another
    size is the client's own affair.

    Args:
        module: of the architecture; works for all clients.
    """

    def __init__(self, module: ClientModule):
        self.module = module
        self.traces = Traces(module)

    def train(self, trainees: Sequence[Trainee]) -> None:
        """Train clients for a round; those that are alike go together."""
        kinds: dict[object, list[Trainee]] = {}
        for trainee in trainees:
            kinds.setdefault(trainee.kind, []).append(trainee)
        for alike in kinds.values():
            wear(self.module, alike[0].values)
            self.module.train()
            for stage in alike[0].stages:
                self._stage(stage, alike)
            self.module.zero_grad(set_to_none=True)

    def _stage(self, stage: Stage, trainees: Sequence[Trainee]) -> None:
        size, smallest = self.module.training_settings.batch_size, self.module.smallest_batch
        plans = [plan(trainee, stage, size, smallest) for trainee in trainees]
        rows = sorted(range(len(trainees)), key=lambda k: (-len(plans[k].full), k))
        Stack(self.module, self.traces, stage, [trainees[k] for k in rows], [plans[k] for k in rows]).run()
