"""Every partition rule: what it promises, what it refuses, and that it depends on nothing but its arguments."""

import inspect
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import refusing, settings_of

from pflsim.config.components import TARGET, bind, check_component
from pflsim.data import partitions
from pflsim.data.federate import load_federation
from pflsim.data.partitions import deal
from pflsim.errors import SettingsError


def in_a_ring(labels, num_classes, clients, *rest):
    """`listed_classes` for any number of clients: neighbours have a class in common."""
    held = [[i % num_classes, (i + 1) % num_classes] for i in range(clients)]
    return partitions.listed_classes(labels, num_classes, clients, *rest, held=held)


in_a_ring.func = partitions.listed_classes

RULES = {
    "iid": partitions.iid,
    "dirichlet": partial(partitions.dirichlet, alpha=0.3, min_examples=2),
    "classes_per_client": partitions.classes_per_client,
    "classes_unbalanced": partial(partitions.classes_per_client, classes=3, balanced=False),
    "label_lognormal": partitions.label_lognormal,
    "one_class": partitions.one_class,
    "dominant_classes": partitions.dominant_classes,
    "listed_classes": in_a_ring,
    "dirichlet_by_client": partial(partitions.dirichlet_by_client, alpha=0.3),
    "n_way_k_shot": partial(partitions.n_way_k_shot, n=3, k=2, std=1.0),
    "n_way_k_shot_even": partial(partitions.n_way_k_shot, n=3, k=4, std=1.0, even=True),
    "classes_consecutive": partial(partitions.classes_per_client, classes=3, assign="consecutive"),
    "by_client": partitions.by_client,
}


def rng(seed=0):
    return np.random.default_rng(seed)


def even_labels(classes=10, each=60):
    return np.tile(np.arange(classes), each)


def table(labels, parts, classes=10):
    """Class counts [N, C], counted one by one."""
    return np.array([[int((labels[p] == c).sum()) for c in range(classes)] for p in parts])


def test_every_exported_rule_is_covered_and_takes_settings_by_keyword_only():
    exported = {name for name, rule in vars(partitions).items() if hasattr(rule, "in_content_order")}
    assert exported == {getattr(r, "func", r).__name__ for r in RULES.values()}
    for name in exported:
        kinds = [(p.name, p.kind) for p in inspect.signature(getattr(partitions, name)).parameters.values()]
        assert [n for n, _ in kinds[:5]] == ["labels", "num_classes", "clients", "rng", "client_ids"]
        assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind in kinds[5:])


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
@settings(max_examples=25)
def test_parts_are_disjoint_sorted_in_range_nonempty_and_a_function_of_the_seed(name, data):
    clients = data.draw(st.integers(1, 25))
    seed = data.draw(st.integers(0, 2**32))
    extra = data.draw(st.lists(st.integers(0, 9), max_size=200))
    labels = np.concatenate([even_labels(), np.array(extra, dtype=np.int64)])
    labels = rng(seed + 1).permutation(labels)
    client_ids = rng(seed + 2).permutation(np.arange(len(labels)) % 30)
    parts = RULES[name](labels, 10, clients, rng(seed), client_ids)
    assert len(parts) == clients
    assert all(len(p) and p.dtype == np.int64 and (np.diff(p) > 0).all() for p in parts)
    every = np.concatenate(parts)
    assert len(set(every.tolist())) == len(every)
    assert every.min() >= 0 and every.max() < len(labels)
    again = RULES[name](labels.copy(), 10, clients, rng(seed), client_ids.copy())
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("name", RULES)
def test_another_seed_is_another_partition(name):
    labels, client_ids = even_labels(), np.arange(600) % 40
    one, two = (RULES[name](labels, 10, 12, rng(s), client_ids) for s in (1, 2))
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_iid_deals_everything_in_even_parts():
    parts = partitions.iid(even_labels(), 10, 7, rng(), None)
    assert sorted(len(p) for p in parts) == [85, 85, 86, 86, 86, 86, 86]


@given(alpha=st.floats(1e-4, 1e3), minimum=st.integers(0, 12), clients=st.integers(1, 50), seed=st.integers(0, 999))
@settings(max_examples=60)
def test_dirichlet_uses_everything_and_keeps_the_minimum(alpha, minimum, clients, seed):
    parts = partitions.dirichlet(even_labels(), 10, clients, rng(seed), None, alpha=alpha, min_examples=minimum)
    assert sum(len(p) for p in parts) == 600
    assert min(len(p) for p in parts) >= max(minimum, 1)


def test_dirichlet_alpha_sets_the_skew():
    labels = even_labels(each=600)

    def top_share(alpha):
        counts = table(labels, partitions.dirichlet(labels, 10, 10, rng(3), None, alpha=alpha))
        return (counts.max(axis=1) / counts.sum(axis=1)).mean()

    assert top_share(0.01) > 0.6 > top_share(1.0) > top_share(1000.0)
    assert top_share(1000.0) < 0.13


def test_dirichlet_without_balance_follows_its_proportions():
    """Mean over many draws of p_ic is 1/N and its variance that of Dirichlet(α): (1/N)(1−1/N)/(Nα+1)."""
    labels, clients, alpha = even_labels(each=1000), 5, 0.5
    shares = []
    for seed in range(60):
        parts = partitions.dirichlet(labels, 10, clients, rng(seed), None, alpha=alpha, min_examples=0, balance=False)
        shares.append(table(labels, parts) / 1000)
    values = np.concatenate(shares).ravel()
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert values.var() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("clients", "classes"), [(5, 2), (20, 2), (100, 2), (7, 3), (3, 2), (1, 10), (13, 9)])
@pytest.mark.parametrize("balanced", [True, False])
def test_classes_per_client_gives_exactly_that_many_and_every_class_a_home(clients, classes, balanced):
    labels = even_labels(each=200)
    parts = partitions.classes_per_client(labels, 10, clients, rng(5), None, classes=classes, balanced=balanced)
    counts = table(labels, parts)
    assert ((counts > 0).sum(axis=1) == classes).all()
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    if clients * classes >= 10:
        assert (counts.sum(axis=0) == 200).all()


def test_classes_per_client_sizes():
    labels = even_labels(each=200)
    even = partitions.classes_per_client(labels, 10, 20, rng(), None)
    assert {len(p) for p in even} == {100}
    uneven = [len(p) for p in partitions.classes_per_client(labels, 10, 20, rng(), None, balanced=False)]
    assert max(uneven) > 1.5 * min(uneven)


def test_label_lognormal_on_mnist_sized_data():
    labels = even_labels(each=6000)
    counts = table(labels, partitions.label_lognormal(labels, 10, 20, rng(), None))
    for client, row in enumerate(counts):
        assert set(np.flatnonzero(row)) == {client % 10, (client + 1) % 10}
        assert np.ptp(row[row > 0]) <= 1
    sizes = counts.sum(axis=1)
    assert sizes.min() >= 100 and sizes.max() <= 1600 and sizes.max() > 3 * sizes.min()


def test_label_lognormal_has_the_median_and_spread_it_is_given():
    labels = even_labels(each=100_000)
    settings = {"median": 300, "sigma": 0.5, "smallest": 2, "largest": 100_000}
    parts = partitions.label_lognormal(labels, 10, 1000, rng(), None, **settings)
    logs = np.log([len(p) for p in parts])
    assert np.median(logs) == pytest.approx(np.log(300), abs=0.06)
    assert logs.std() == pytest.approx(0.5, rel=0.08)


def test_label_lognormal_scales_to_small_data():
    labels = even_labels(each=140)
    small = table(labels, partitions.label_lognormal(labels, 10, 20, rng(), None))
    large = table(even_labels(each=6000), partitions.label_lognormal(even_labels(each=6000), 10, 20, rng(), None))
    assert ((small > 0) == (large > 0)).all()
    assert (small.sum(axis=0) <= 140).all() and small.sum(axis=0).max() > 125
    assert np.corrcoef(small.sum(axis=1), large.sum(axis=1))[0, 1] > 0.99


def test_one_class_is_fedalps_hundred_clients():
    labels = even_labels(each=700)
    counts = table(labels, partitions.one_class(labels, 10, 100, rng(), None))
    assert ((counts > 0).sum(axis=1) == 1).all()
    assert ((counts > 0).sum(axis=0) == 10).all()
    assert (counts.sum(axis=1) == 70).all()


def test_dominant_classes_shares():
    labels = even_labels(each=1000)
    counts = table(labels, partitions.dominant_classes(labels, 10, 10, rng(), None))
    assert (counts.sum(axis=1) == 1000).all()
    for row in counts:
        assert sorted(row.tolist()) == [50] * 8 + [300] * 2
    assert ((counts == 300).sum(axis=0) == 2).all()


def test_dominant_classes_uses_what_the_scarcest_class_allows():
    labels = np.concatenate([even_labels(each=500), np.arange(9).repeat(500)])
    counts = table(labels, partitions.dominant_classes(labels, 10, 10, rng(), None))
    assert len(set(counts.sum(axis=1).tolist())) == 1
    assert 480 <= counts.sum(axis=0)[9] <= 500


def test_listed_classes_gives_what_is_listed_and_the_same_amount_everywhere():
    labels = np.concatenate([even_labels(each=60), np.arange(9).repeat(100)])  # class 9 is the scarcest
    held = [[0, 1, 2], [1, 2, 3], [9], [9], [3]]
    counts = table(labels, partitions.listed_classes(labels, 10, 5, rng(), None, held=held))
    assert [np.flatnonzero(row).tolist() for row in counts] == held
    assert set(counts[counts > 0].tolist()) == {30}  # 60 of class 9 for two


def test_n_way_k_shot_scatters_around_n_and_k():
    labels = even_labels(20, each=40_000)
    parts = partitions.n_way_k_shot(labels, 20, 1000, rng(), None, n=10, k=50, std=2.0)
    counts = table(labels, parts, 20)
    ways = (counts > 0).sum(axis=1)
    shots = np.array([row[row > 0][0] for row in counts])
    assert all(len(set(row[row > 0].tolist())) == 1 for row in counts)
    assert ways.mean() == pytest.approx(10, abs=0.3) and ways.std() == pytest.approx(2, rel=0.12)
    assert shots.mean() == pytest.approx(50, abs=0.3) and shots.std() == pytest.approx(2, rel=0.12)


def test_classes_of_n_way_k_shot_are_shared_unless_they_are_even():
    """20 clients with 3 of 62 classes each: evenly, no class is held twice; independently, some are."""
    labels = even_labels(62, each=400)
    held = {}
    for even in (True, False):
        parts = partitions.n_way_k_shot(labels, 62, 20, rng(), None, n=3, k=20, std=0.0, even=even)
        held[even] = (table(labels, parts, 62) > 0).sum(axis=0)
    assert held[True].max() == 1 and held[False].max() > 1
    assert held[True].sum() == held[False].sum() == 60


def test_independent_classes_are_uniform():
    labels = even_labels(10, each=4000)
    parts = partitions.n_way_k_shot(labels, 10, 2000, rng(), None, n=3, k=2, std=0.0)
    assert (table(labels, parts) > 0).sum(axis=0) == pytest.approx(600, abs=80)  # 4 standard deviations


def test_consecutive_classes():
    labels = even_labels()
    parts = partitions.classes_per_client(labels, 10, 20, rng(), None, classes=2, assign="consecutive")
    counts = table(labels, parts)
    assert [np.flatnonzero(row).tolist() for row in counts] == [[c, c + 1] for c in (0, 2, 4, 6, 8)] * 4
    assert set(counts[counts > 0].tolist()) == {15}
    wrapped = partitions.classes_per_client(labels, 10, 5, rng(), None, classes=3, assign="consecutive")
    held = [np.flatnonzero(row).tolist() for row in table(labels, wrapped)]
    assert held == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 9], [2, 3, 4]]


def test_by_client_keeps_clients_whole():
    labels, client_ids = even_labels(), np.arange(600) % 23
    parts = partitions.by_client(labels, 10, 5, rng(), client_ids)
    groups = [set(client_ids[p].tolist()) for p in parts]
    assert sum(len(g) for g in groups) == 23 == len(set.union(*groups))
    assert sorted(len(g) for g in groups) == [4, 4, 5, 5, 5]
    assert sum(len(p) for p in parts) == 600
    single = partitions.by_client(labels, 10, 5, rng(), client_ids, ids_per_client=1)
    held = [set(client_ids[p].tolist()) for p in single]
    assert [len(each) for each in held] == [1] * 5 and held == sorted(held, key=min), "in the order of the client_ids"
    for each in (1, None):
        everyone = partitions.by_client(labels, 10, 23, rng(), client_ids, ids_per_client=each)
        assert [set(client_ids[p].tolist()) for p in everyone] == [{own} for own in range(23)]


REFUSED = """
dirichlet 5: alpha=0.0 alpha=-1.0 alpha=float('nan') alpha=float('inf') min_examples=-1
dirichlet 61: min_examples=10
dirichlet_by_client 5: alpha=0.0 alpha=float('nan') used=0.0 used=1.1
classes_per_client 5: classes=11 classes=0
label_lognormal 5: classes=11 sigma=-0.1 median=0.0 largest=9 smallest=1
dominant_classes 5: dominant=10 dominant=11 share=0.2 share=1.0
n_way_k_shot 20: n=11 k=0 std=-1.0
"""


@pytest.mark.parametrize("line", REFUSED.split("\n")[1:-1])
def test_settings_that_are_refused(line: str) -> None:
    rule, clients, *settings = line.replace(":", "").split()
    for setting in settings:
        name, _, value = setting.partition("=")
        with pytest.raises(SettingsError, match=name):
            node = check_component({TARGET: f"pflsim.data.partitions.{rule}", name: eval(value)}, "partition")
            bind(node, "partition")(even_labels(), 10, int(clients), rng(), None)


@pytest.mark.parametrize(
    ("rule", "clients", "options", "says"),
    [
        ("classes_per_client", 400, {}, "class 0 has 60 .*80 clients"),
        ("one_class", 601, {}, "class 0"),
        ("label_lognormal", 400, {}, "class 0 has 60 .*80 clients"),
        ("n_way_k_shot", 20, {"k": 100}, "class 0 has 60"),
        ("dominant_classes", 300, {}, "10 classes"),
        ("listed_classes", 3, {"held": [[0], [1]]}, "clients=3"),
        ("listed_classes", 2, {"held": [[0], []]}, r"client 1 .*\[\]"),
        ("listed_classes", 2, {"held": [[0, 10], [1]]}, r"client 0 .*\[0, 10\]"),
        ("by_client", 3, {}, "data=femnist"),
        ("by_client", 24, {"client_ids": np.arange(600) % 23}, "at most 23"),
        ("by_client", 12, {"client_ids": np.arange(600) % 23, "ids_per_client": 2}, "at most 11"),
    ],
)
def test_what_cannot_be_done_is_said(rule, clients, options, says):
    own = {name: value for name, value in options.items() if name != "client_ids"}
    with pytest.raises(SettingsError, match=says):
        getattr(partitions, rule)(even_labels(), 10, clients, rng(), options.get("client_ids"), **own)


def test_classes_without_examples_are_passed_over():
    labels = even_labels(5)  # num_classes 10, of which 5..9 never occur
    for name in ("classes_per_client", "one_class", "dominant_classes", "label_lognormal", "dirichlet"):
        parts = getattr(partitions, name)(labels, 10, 10, rng(), None)
        assert min(len(p) for p in parts) > 0, name
    with pytest.raises(SettingsError, match="1 to 5 classes"):
        partitions.classes_per_client(labels, 10, 5, rng(), None, classes=6)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_apportion_is_within_one_of_the_quota_and_never_beyond_the_weight(weights, data):
    whole = sum(weights)
    total = data.draw(st.integers(0, whole))
    parts = deal.apportion(np.array(weights), total)
    assert parts.sum() == total
    for part, weight in zip(parts.tolist(), weights, strict=True):
        assert part <= weight
        assert whole == 0 or abs(part * whole - weight * total) < whole


@pytest.mark.parametrize("alpha", [0.001, 0.1, 10.0])
def test_sizes_of_dirichlet_by_client_are_those_of_the_paper(alpha):
    labels = even_labels(each=6000)
    sizes = table(labels, partitions.dirichlet_by_client(labels, 10, 100, rng(), None, alpha=alpha)).sum(axis=1)
    assert sizes.tolist() == [120] * 10 + [300] * 30 + [600] * 30 + [900] * 20 + [1200] * 10


def test_dirichlet_by_client_uses_everything_and_its_skew_falls_with_alpha():
    labels, largest = even_labels(each=600), []
    for alpha in (1e-4, 0.1, 1.0, 100.0):
        every = {"alpha": alpha, "used": 1.0, "balanced": True}
        counts = table(labels, partitions.dirichlet_by_client(labels, 10, 100, rng(), None, **every))
        assert (counts.sum(axis=0) == 600).all() and (counts.sum(axis=1) == 60).all()
        largest.append((counts.max(axis=1) / counts.sum(axis=1)).mean())
    assert largest == sorted(largest, reverse=True) and largest[0] > 0.9 and largest[-1] < 0.3
    few = np.repeat([0, 3, 7], 50)
    for clients in (1, 2, 3, 7):
        found = table(few, partitions.dirichlet_by_client(few, 10, clients, rng(), None, used=1.0))
        assert (found.sum(axis=1) > 0).all() and found.sum() == 150


HELD = ("data=digits", "split=merged", "clients=10", "partition=dirichlet", "partition.alpha=0.1", "method=fedavg")


def test_held_out_clients_have_a_partition_of_their_own():
    """They share as much of each class as they are, dealt with other settings; neither part depends on the other's."""
    found = []
    for alpha, trained in ((1000.0, 0.1), (0.5, 0.1), (0.5, 5.0)):
        more = f"partition.alpha={trained}", f"eval.holdout_partition={{alpha: {alpha}}}"
        asked = settings_of(*HELD, "eval.holdout_clients=4", *more)
        data, own = load_federation(asked)
        rows = [np.concatenate(parts) for parts in zip(own.train, own.val, own.test, strict=True)]
        assert sorted(np.concatenate(rows)) == list(range(len(data.y)))
        found.append([np.bincount(data.y[each], minlength=10) for each in rows])
    even, uneven, other = found
    assert np.array_equal(uneven[6:], other[6:]) and not np.array_equal(uneven[:6], other[:6])
    assert np.array_equal(even[:6], uneven[:6]) and not np.array_equal(even[6:], uneven[6:])
    np.testing.assert_allclose(sum(even[6:]), 0.4 * np.bincount(data.y), atol=1)
    assert all((own > 0).all() for own in even[6:]) and not any((own > 0).all() for own in even[:6])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["eval.holdout_clients=0"], "eval.holdout_clients=N"),
        (["eval.holdout_clients=[1]"], "eval.holdout_clients=N"),
        (["eval.holdout_clients=1", "partition=by_client"], "partition=by_client"),
        (["eval.holdout_clients=1", "partition=explicit", "partition.path=x.json"], "partition=explicit"),
        (["eval.holdout_clients=1", "eval.holdout_partition={alpah: 1.0}"], "partition.alpha"),
        (["eval.holdout_clients=1", "eval.holdout_partition={alpha: -1}"], "partition.alpha=-1"),
    ],
)
def test_partitions_that_are_not_drawn_apart(more, said):
    with refusing("eval.holdout_partition=", said):
        settings_of(*HELD[:4], HELD[-1], "eval.holdout_partition={bins: 3}", *more)
