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
    """Trains clients as stacks, each client with its own examples, order of examples and number of batches.

    Results equal those of `loop.train` up to rounding. The full batches of a stack are one traced step; a smaller batch
    is trained by its client alone.

    Args:
        module: of the clients' architecture; computes for all of them.
    """

    def __init__(self, module: ClientModule):
        self.module = module
        self.traces = Traces(module)

    def train(self, clients: Sequence[ClientTraining]) -> None:
        """Train clients for a round; clients with equal stages and shapes form a stack."""
        stacks: dict[object, list[ClientTraining]] = {}
        for client in clients:
            stacks.setdefault(client.stack_key, []).append(client)
        for stack in stacks.values():
            bind_state(self.module, stack[0].values)
            self.module.train()
            for stage in stack[0].stages:
                self._train_stage(stage, stack)
            self.module.zero_grad(set_to_none=True)

    def _train_stage(self, stage: Stage, clients: Sequence[ClientTraining]) -> None:
        size, smallest = self.module.training_settings.batch_size, self.module.smallest_batch
        schedules = [schedule_batches(client, stage, size, smallest) for client in clients]
        rows = sorted(range(len(clients)), key=lambda k: (-len(schedules[k].full), k))
        Stack(self.module, self.traces, stage, [clients[k] for k in rows], [schedules[k] for k in rows]).run()
