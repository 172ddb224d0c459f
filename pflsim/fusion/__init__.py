"""Fusion as pure functions on stacked tensors."""
