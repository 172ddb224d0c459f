"""Data sets, partitions over clients, and splits into training, validation and test examples."""
