"""Models exported from a checkpoint, with a script that loads them."""
