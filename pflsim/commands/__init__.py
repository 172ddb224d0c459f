"""What `pflsim.cli` and the Python API call: runs of a sweep, and partitions without a run."""
