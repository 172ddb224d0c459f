"""Compares runs: `pflsim compare RUNS…`."""
