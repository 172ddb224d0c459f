"""A run folder kept the same at a URL."""
