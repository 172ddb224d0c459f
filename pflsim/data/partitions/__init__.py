"""Partition rules: which client gets which examples.

Every rule is `rule(labels, num_classes, clients, rng, writers, *, settings)` and returns one ascending array of row
numbers per client, disjoint. Positions in `labels` are all a rule sees; the caller passes them in content order (see
`pflsim.data.content`), which makes the result independent of the order of the stored rows.
"""

from pflsim.data.partitions.basic import by_writer, iid
from pflsim.data.partitions.by_class import classes_per_client, dominant_classes, listed_classes, one_class
from pflsim.data.partitions.by_client import dirichlet_by_client
from pflsim.data.partitions.dirichlet_rule import dirichlet
from pflsim.data.partitions.lognormal import label_lognormal
from pflsim.data.partitions.shots import n_way_k_shot

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
