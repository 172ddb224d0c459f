"""Shows a run's progress and result on the terminal."""
