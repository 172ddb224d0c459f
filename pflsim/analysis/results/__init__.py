"""Finds, reads, and groups run folders."""

from pflsim.analysis.results.groups import Group, check_comparable, group_runs
from pflsim.analysis.results.run import ClientCounts, Run, find_runs, read_run

__all__ = ["ClientCounts", "Group", "Run", "check_comparable", "find_runs", "group_runs", "read_run"]
