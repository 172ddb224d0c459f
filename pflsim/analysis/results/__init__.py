"""Runs read back from their folders, for whoever looks at them afterwards."""

from pflsim.analysis.results.find import find_runs
from pflsim.analysis.results.groups import Group, check_comparable, group_runs
from pflsim.analysis.results.run import CHOICES, ClientCounts, Run, read_run

__all__ = ["CHOICES", "ClientCounts", "Group", "Run", "check_comparable", "find_runs", "group_runs", "read_run"]
