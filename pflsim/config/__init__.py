"""The settings of a run: their dataclasses, composition with Hydra, components, checks, and help."""
