"""Other simulators on the same data, partition, model and number of steps: `python -m benchmarks.peers`."""
