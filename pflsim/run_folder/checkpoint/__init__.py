"""The state of a run between two rounds, as one folder that appears whole or not at all."""

from pflsim.run_folder.checkpoint.choose import choose_checkpoint
from pflsim.run_folder.checkpoint.meta import FORMAT, BadCheckpoint
from pflsim.run_folder.checkpoint.read import Checkpoint, check_header, newest_checkpoint, read_state
from pflsim.run_folder.checkpoint.state import plain, restored
from pflsim.run_folder.checkpoint.write import CheckpointError, Staged, stage_checkpoint, write_checkpoint

__all__ = [
    "FORMAT",
    "BadCheckpoint",
    "Checkpoint",
    "CheckpointError",
    "Staged",
    "check_header",
    "choose_checkpoint",
    "newest_checkpoint",
    "plain",
    "read_state",
    "restored",
    "stage_checkpoint",
    "write_checkpoint",
]
