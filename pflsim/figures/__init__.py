"""Pictures of runs, as matplotlib figures. What they show is worked out elsewhere."""
