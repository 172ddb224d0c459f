"""The tracker, which writes the results of a run to its folder."""
