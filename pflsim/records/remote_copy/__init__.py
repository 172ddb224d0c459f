"""A copy of a run folder at a URL: uploaded after each checkpoint, downloaded to resume the run."""
