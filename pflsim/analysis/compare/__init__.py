"""Runs side by side: `python launch.py compare RUNS…`."""
