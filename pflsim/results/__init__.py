"""Runs read back from their folders, for whoever looks at them afterwards."""

from pflsim.results.find import find_runs
from pflsim.results.run import CHOICES, ClientCounts, Run, read_run

__all__ = ["CHOICES", "ClientCounts", "Run", "find_runs", "read_run"]
