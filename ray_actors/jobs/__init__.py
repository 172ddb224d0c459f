"""Runs on a cluster through Ray Jobs: `python launch.py submit`, `status`, `logs`, `stop`, `fetch`."""
