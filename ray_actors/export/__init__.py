"""Exports the models of a checkpoint, with a script that loads them."""
