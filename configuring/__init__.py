"""Settings of a run, composed with Hydra from the config files and the command line."""
