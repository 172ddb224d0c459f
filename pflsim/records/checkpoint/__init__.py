"""Checkpoints: the state of a run after a round, in a folder that is created atomically."""
