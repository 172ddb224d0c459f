"""What every method must fulfil, as checks, and the command that runs them on one method."""
