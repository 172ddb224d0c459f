"""Runs side by side: `python -m pflsim.compare RUNS…`."""
