"""Starts Ray on this machine or joins a running cluster, and decides where the actors of a run go."""
