"""Partition rules: assign examples to clients.

A rule is `rule(labels, num_classes, clients, rng, writers, *, settings)` and returns one ascending array of row numbers
per client, disjoint. The caller passes labels in content order (see `pflsim.data.content`), so that the result does not
depend on the stored order of rows.
"""

from pflsim.data.partitions.basic import by_writer, iid
from pflsim.data.partitions.by_class import classes_per_client, dominant_classes, listed_classes, one_class
from pflsim.data.partitions.dirichlet_rule import dirichlet, dirichlet_by_client
from pflsim.data.partitions.lognormal import label_lognormal, n_way_k_shot

__all__ = [
    "by_writer",
    "classes_per_client",
    "dirichlet",
    "dirichlet_by_client",
    "dominant_classes",
    "iid",
    "label_lognormal",
    "listed_classes",
    "n_way_k_shot",
    "one_class",
]
