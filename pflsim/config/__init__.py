"""The settings of a run: their dataclasses, schemas read from signatures, composition with Hydra, checks, and help."""
