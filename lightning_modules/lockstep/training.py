"""Training clients in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_modules.base import ClientModule
from lightning_modules.lockstep.batch_schedule import schedule_batches
from lightning_modules.lockstep.client_training import ClientTraining
from lightning_modules.lockstep.stack import Stack
from lightning_modules.lockstep.traces import Traces
from lightning_modules.lockstep.values import bind_state
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

    def train(self, members: Sequence[ClientTraining]) -> None:
        """Train clients for a round; those that are alike go together."""
        kinds: dict[object, list[ClientTraining]] = {}
        for member in members:
            kinds.setdefault(member.kind, []).append(member)
        for alike in kinds.values():
            bind_state(self.module, alike[0].values)
            self.module.train()
            for stage in alike[0].stages:
                self._stage(stage, alike)
            self.module.zero_grad(set_to_none=True)

    def _stage(self, stage: Stage, members: Sequence[ClientTraining]) -> None:
        size, smallest = self.module.training_settings.batch_size, self.module.smallest_batch
        schedules = [schedule_batches(member, stage, size, smallest) for member in members]
        rows = sorted(range(len(members)), key=lambda k: (-len(schedules[k].full), k))
        Stack(self.module, self.traces, stage, [members[k] for k in rows], [schedules[k] for k in rows]).run()
