"""Partition rules: assign examples to clients.

A rule is `rule(labels, num_classes, clients, rng, client_ids, *, settings)` and returns one array of row numbers per
client, disjoint. The rules here get labels in content order (`pflsim.data.partitions.deal.partition_rule`), so their
results do not depend on the stored order of rows; others get them in stored order.
"""

from pflsim.data.partitions.basic import by_client, classes_per_client, dominant_classes, iid, listed_classes, one_class
from pflsim.data.partitions.dirichlet_rule import dirichlet, dirichlet_by_client
from pflsim.data.partitions.lognormal import label_lognormal, n_way_k_shot
