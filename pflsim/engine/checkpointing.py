"""When checkpoints are due, and writing them without ending a run whose disk is full."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pflsim.engine.execution import EvalRequest, Executor
from pflsim.engine.plan import RunPlan
from pflsim.records.checkpoint_write import Staged, stage_checkpoint
from pflsim.records.predictions import Predictions, to_bytes, write_predictions

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves the states of an executor in two steps, so that a checkpoint is visible only after its rounds' records.

    Args:
        executor: has the states.
        plan: when checkpoints are due, and how many are kept.
        folder: the run folder.
        sync: called before a checkpoint becomes visible; writes the records to the disk.
        saved: the round of the checkpoint from which the run resumed; None: none.
    """

    def __init__(
        self, executor: Executor[Any], plan: RunPlan, folder: Path, sync: Callable[[], None], saved: int | None
    ):
        self._executor, self._plan, self._folder, self._sync = executor, plan, folder / "checkpoints", sync
        self.saved, self._staged_at = saved, time.monotonic()

    def is_due(self, round_number: int) -> bool:
        """Return whether a checkpoint is due after this round, by the number of rounds or by the time."""
        elapsed, when = time.monotonic() - self._staged_at, self._plan.settings.checkpoint
        due = self._plan.is_due(round_number, when.every) or 0 < 60 * when.minutes <= elapsed
        return round_number > 0 and due

    def stage(
        self, round_number: int, score: float | None, predictions: Predictions, adapted: bool = False
    ) -> Staged | None:
        """Write the states after a round aside; returns None if the disk refuses it.

        Args:
            round_number: the round.
            score: see `stage_checkpoint`.
            predictions: of the rounds so far.
            adapted: also write the reported models of methods that adapt them to the clients' examples.
        """
        self._staged_at = time.monotonic()
        plan, executor = self._plan, self._executor
        header = {"method": plan.meta.method, **plan.header}
        model, _, phase = plan.meta.reported
        request = EvalRequest(model, phase, tuple(range(plan.clients)), (), round_number)
        try:
            server, clients = executor.server_state(), executor.client_states()
            models = executor.adapted_states(request) if adapted and plan.adapts else ()
            content = to_bytes(predictions)
            return stage_checkpoint(self._folder, round_number, server, clients, header, score, models, content)
        except OSError as error:
            _log_error(round_number, error)
            return None

    def publish(self, staged: Staged) -> None:
        """Make a staged checkpoint visible, and remove older ones that are not kept."""
        try:
            self._sync()
            write_predictions(self._folder.parent, staged.predictions)
            staged.publish(self._plan.settings.checkpoint.keep)
        except OSError as error:
            _log_error(staged.round, error)
        else:
            self.saved = staged.round


def _log_error(round_number: int, error: OSError) -> None:
    reason = error.strerror or error
    logger.warning(f"no checkpoint after round {round_number}: {reason}; the run goes on, older checkpoints are kept")
