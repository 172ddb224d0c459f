"""Everything that a run writes to its folder and reads back to resume."""
