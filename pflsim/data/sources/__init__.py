"""Data sets: one file per source, each with a function `load(*, settings) -> Dataset`."""
