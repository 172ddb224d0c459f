"""The display of a run on the terminal."""
