"""Measures the speed of pflsim, of two baselines, and of the machine. See `python -m benchmarks --help`."""
