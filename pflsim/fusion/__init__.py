"""Fusion as pure functions on stacked tensors: nothing is changed in place, nothing but the arguments has a say."""
