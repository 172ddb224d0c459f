"""Compares runs: `python launch.py compare RUNS…`."""
