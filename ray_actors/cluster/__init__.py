"""Ray on this machine, and clusters that a run joins."""
