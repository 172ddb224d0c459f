"""Where data sets come from: one file per source, each with a function `load(*, settings) -> Dataset`."""
