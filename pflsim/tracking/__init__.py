"""What a run leaves on the disk: its folder, and the tracker that writes everything in it."""

from pflsim.tracking.records import read_records
from pflsim.tracking.run_folder import create_run_folder, incomplete_runs, last_run, run_lock, write_config
from pflsim.tracking.tracker import Tracker

__all__ = [
    "Tracker",
    "create_run_folder",
    "incomplete_runs",
    "last_run",
    "read_records",
    "run_lock",
    "write_config",
]
