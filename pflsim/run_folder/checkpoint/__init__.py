"""Checkpoints: the state of a run after a round, in a folder that is created atomically."""

from pflsim.run_folder.checkpoint.meta import FORMAT, BadCheckpoint
from pflsim.run_folder.checkpoint.read import Checkpoint, check_header, choose_checkpoint, newest_checkpoint, read_state
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
