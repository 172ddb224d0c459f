"""Data sets, partitions over clients, splits, and the federated view of them."""
