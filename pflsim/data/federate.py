"""Loads a data set and partitions it over clients, with a partition rule and a split rule or with given rows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
from numpy.random import Generator

from pflsim.config.components import bind, component_name, settings_of, targets_of
from pflsim.config.names import nearest, written
from pflsim.config.settings import Settings
from pflsim.data.content import copied_rows
from pflsim.data.dataset import BINS, Dataset, Loader, check_dataset, described, named_classes
from pflsim.data.federated import Partition, names_of
from pflsim.data.partitions.deal import apportion, deal
from pflsim.data.shifts import Shift
from pflsim.data.splits import Assign
from pflsim.data.targets import about_targets, as_task
from pflsim.errors import SettingsError, own_errors, reading
from pflsim.progress import doing
from pflsim.seeding import numpy_generator, seeded_global
from pflsim.types import SPLITS


class PartitionRule(Protocol):
    """A partition rule `rule(labels, num_classes, clients, rng, client_ids)` with its settings filled in."""

    def __call__(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: Generator, client_ids: np.ndarray | None, /
    ) -> list[np.ndarray]:
        """Return one array of row numbers per client, disjoint."""
        ...


class ExplicitPartition(Protocol):
    """A target of the component `partition` that returns all rows itself: `explicit(dataset, clients)`."""

    def __call__(self, dataset: Dataset, clients: int, /) -> Partition:
        """Return the rows of all clients. If `test` is (), the split rule draws test and validation rows."""
        ...


class SplitRule(Protocol):
    """A split rule `split(dataset, assign, rng)` with its settings filled in."""

    def __call__(self, dataset: Dataset, assign: Assign, rng: Generator, /) -> Partition:
        """Return the training, validation and test rows of all clients."""
        ...


class ShiftRule(Protocol):
    """A shift rule `rule(dataset, clients, rng)` with its settings filled in."""

    def __call__(self, dataset: Dataset, clients: int, rng: Generator, /) -> Shift:
        """Return how the examples of each client are shifted."""
        ...


def load_federation(settings: Settings, kept: dict[str, Dataset] | None = None) -> tuple[Dataset, Partition]:
    """Load the data set of a run, partition it over the clients, and shift their examples.

    Args:
        settings: of the run.
        kept: the data set of the last call, by its settings, which is not loaded again; None: it is not kept.

    Raises:
        SettingsError: a component does not exist, the data cannot be read, or they cannot be partitioned or shifted so.
    """
    load, clients, rule = _loader(settings), settings.clients, None
    try:
        explicit = bind(settings.partition, field="partition", kind=ExplicitPartition)
    except SettingsError:
        explicit, rule = None, bind(settings.partition, field="partition", kind=PartitionRule)
    if changed := settings.eval.holdout_partition:
        if rule is None:
            raise SettingsError(f"eval.holdout_partition={written(changed)}: the partition lists rows; leave it out")
        other = bind({**settings.partition, **changed}, field="partition", kind=PartitionRule)
        rule = _apart(rule, other, settings.eval.newcomers, settings.seed)
    split_rule = bind(settings.split, field="split", kind=SplitRule)
    shift_rule = bind(settings.shift, field="shift", kind=ShiftRule)
    kept, key = {} if kept is None else kept, f"{settings.data}{settings.task.name == 'language_model'}"
    if key not in kept:
        kept.clear()  # before another one takes memory
        doing(f"reading data={component_name(settings, 'data')}")
        kept[key] = load()
        if not isinstance(kept[key], Dataset):
            check_dataset(kept[key], f"data={component_name(settings, 'data')}")
        doing("preparing the clients")
    dataset = as_task(kept[key], settings.task.name)
    if dataset.task != kept[key].task:
        lines = [
            (what, about_targets(dataset) if what.startswith("label") else text) for what, text in dataset.card.lines
        ]
        dataset = replace(dataset, card=replace(dataset.card, lines=tuple(lines)))
    check_dataset(dataset, f"data={component_name(settings, 'data')}")
    if component_name(settings, "split") == "official":  # the other rules join the official parts
        _check_classes(dataset)
    given = explicit(dataset, clients) if explicit else Partition((), (), ())
    if given.test:
        for key, parameter in settings_of(targets_of(settings.split, "split")).items():
            if (value := settings.split.get(key, parameter.default)) != parameter.default:
                raise SettingsError(f"split.{key}={value} has no effect: the partition lists test rows; leave it out")
        partition = _check_partition(given, clients, len(dataset.y))
    else:
        dealt = dataset.by_class(settings.partition.get("bins", BINS), _decides(dataset, settings))
        if dealt.domains and changed:
            raise SettingsError(f"eval.holdout_partition={written(changed)}: the clients are of domains; leave it out")
        if dealt.domains and rule:
            partition = _within_domains(dealt, rule, split_rule, clients, settings.seed)
        else:
            partition = federate(dealt, rule or (lambda *_: list(given.train)), split_rule, clients, settings.seed)
    copied, tested = copied_rows(dataset, partition), sum(map(len, partition.test))
    if copied:
        said = f"{copied:,} of {tested:,} test rows ({copied / tested:.1%}) equal a training or validation row"
        dataset = replace(dataset, notes=(*dataset.notes, f"{dataset.name}: {said}"))
    partition = replace(partition, names=given.names or names_of(dataset, partition))
    order = _held_last(settings.eval.holdout_clients, partition)
    fitted = settings.trained if settings.eval.fit == "training" else None
    partition = replace(partition.ordered(order), fitted=fitted)
    if dataset.fit:
        made = dataset.fit(dataset, partition)
        dataset, partition = made if isinstance(made, tuple) else (made, partition)
        dataset = replace(dataset, fit=None)
    shift = shift_rule(dataset, clients, numpy_generator(settings.seed, "shift"))
    groups = tuple(shift.groups[client] for client in order if shift.groups)
    return dataset, replace(partition, shift=replace(shift, groups=groups))


def _loader(settings: Settings) -> Callable[[], Dataset]:
    """Return what loads the data of a run: with task=language_model, documents in place of labelled texts.

    Raises:
        SettingsError: the data do not exist, or are no texts.
    """
    load: Any = bind(settings.data, field="data", kind=Loader)
    if settings.task.name != "language_model":
        return cast(Callable[[], Dataset], load)
    documents = getattr(load.func, "language_model", None)
    if documents is None:
        name = component_name(settings, "data")
        raise SettingsError(f"task=language_model predicts the next tokens of texts: use data=text, not data={name}")
    return partial(documents, load)


def _decides(dataset: Dataset, settings: Settings) -> np.ndarray | slice:
    """Return which rows decide the quantiles of a target: those of the clients in the data that train."""
    held, ids = settings.eval.holdout_clients, dataset.clients
    if settings.eval.fit == "all" or not held or ids is None:
        return slice(None)
    numbers, names = np.unique(ids), dataset.client_names
    last = [*map(str, held)] if isinstance(held, list) else [names[n] if names else str(n) for n in numbers[-held:]]
    trains = ~np.isin(ids, [n for n in numbers if (names[n] if names else str(n)) in last])
    return trains if trains.any() else slice(None)


def _held_last(asked: int | list[str | int], partition: Partition) -> list[int]:
    """Return the order of the clients, in which those that are held out by name are last."""
    held, names = [] if isinstance(asked, int) else [*map(str, asked)], partition.names
    if unknown := [name for name in held if name not in names]:
        known = nearest(unknown[0], names) if names else "the clients have no names; give their number"
        raise SettingsError(f"eval.holdout_clients: there is no client {unknown[0]!r}; {known}")
    return sorted(range(partition.clients), key=lambda client: bool(held) and names[client] in held)


def _check_classes(dataset: Dataset) -> None:
    """Raise a `SettingsError` if the test part has only classes that the training part lacks."""
    train, test = np.split(dataset.y, [dataset.train_size])
    if dataset.task == "classification" and len(test) and not np.isin(test, train).any():
        test, train = (named_classes(dataset, np.unique(y)) for y in (test, train))
        raise SettingsError(f"{dataset.name}: the training part has no class of the test part ({test}), but {train}")


def _apart(rule: PartitionRule, other: PartitionRule, held: int, seed: int) -> PartitionRule:
    """Return a rule that divides the rows by class between the last clients, which are held out, and those before.

    Args:
        rule: for the clients that train.
        other: for the others, with random streams of its own.
        held: the number of the others.
        seed: the run's seed.
    """

    def both(
        labels: np.ndarray, num_classes: int, clients: int, rng: Generator, client_ids: np.ndarray | None
    ) -> list[np.ndarray]:
        drawn, sizes = numpy_generator(seed, "holdout"), np.bincount(labels, minlength=num_classes)
        (chosen,) = deal(labels, apportion(sizes, int(len(labels) * held / clients + 0.5), drawn)[None], drawn)
        kept = np.delete(np.arange(len(labels)), chosen)

        def part(rule: PartitionRule, rows: np.ndarray, number: int, rng: Generator) -> list[np.ndarray]:
            own = rule(labels[rows], num_classes, number, rng, None if client_ids is None else client_ids[rows])
            return [rows[each] for each in own]

        found = part(rule, kept, clients - held, rng)
        with seeded_global(seed, stream := "holdout partition"):
            return found + part(other, chosen, held, numpy_generator(seed, stream))

    vars(both)["in_content_order"] = _in_content_order(rule)
    return both


def _in_content_order(rule: PartitionRule) -> bool:
    """Return whether a rule gets the rows in the order of their content."""
    return getattr(getattr(rule, "func", rule), "in_content_order", False)


def _within_domains(dataset: Dataset, rule: PartitionRule, split: SplitRule, clients: int, seed: int) -> Partition:
    """Partition each domain over its clients, with random streams of its own."""
    ids = dataset.clients
    size = sum(dataset.domains)
    if ids is None or size != clients:
        raise SettingsError(f"clients={clients}: the domains have {size} clients; expected equal numbers")
    found = list[Partition]()
    places = [np.flatnonzero(ids == number) for number in range(len(dataset.domains))]
    for number, (rows, size) in enumerate(zip(places, dataset.domains, strict=True)):
        name = dataset.client_names[number] if dataset.client_names else dataset.name
        own = dataset.taken(rows, int((rows < dataset.train_size).sum()))
        found.append(federate(replace(own, name=name), rule, split, size, seed, number))
    each = [*zip(places, found, strict=True)]
    train, val, test = (tuple(rows[part] for rows, own in each for part in getattr(own, name)) for name in SPLITS)
    return Partition(train, val, test)


def federate(
    dataset: Dataset, partition_rule: PartitionRule, split_rule: SplitRule, clients: int, seed: int, domain: int = -1
) -> Partition:
    """Partition a data set over clients. The result depends on the examples, the two rules and the seed only.

    Args:
        dataset: the data set.
        partition_rule: assigns examples to clients, e.g. `functools.partial(dirichlet, alpha=0.1)`.
        split_rule: selects the test and validation examples, e.g. `functools.partial(merged, fraction=0.75)`.
        clients: N.
        seed: the run's seed. Partition and split use separate random streams.
        domain: the number of the domain, which has random streams of its own; -1: there are none.

    Raises:
        SettingsError: clients is above the number of examples, or a rule rejects its settings or returns
            an invalid result.
    """
    marked = _in_content_order(partition_rule)

    def assign(rows: np.ndarray) -> list[np.ndarray]:
        if clients > len(rows):
            raise SettingsError(
                f"clients={clients} exceeds the {len(rows)} examples of {dataset.name}; "
                f"set clients to at most {len(rows)}"
            )
        rows = rows if marked else np.sort(rows)
        client_ids = None if dataset.clients is None else dataset.clients[rows]
        rng = numpy_generator(seed, "partition", domain)
        with own_errors("the partition rule"), seeded_global(seed, "partition", domain):
            drawn = partition_rule(dataset.y[rows], dataset.num_classes, clients, rng, client_ids)
        parts = valid_rows(drawn, clients, len(rows), "rows of the partition rule", 1)
        if len(np.unique(np.concatenate(parts))) < sum(map(len, parts)):
            raise SettingsError("the partition rule assigned an example more than once; expected disjoint arrays")
        return [rows[part] for part in parts]

    partition = split_rule(dataset, assign, numpy_generator(seed, "split", domain))
    return _check_partition(partition, clients, len(dataset.y))


def _check_partition(partition: Partition, clients: int, examples: int) -> Partition:
    """Return a split rule's partition if it has valid rows for N clients and training examples for each of them."""
    if not isinstance(partition, Partition):
        raise SettingsError(f"the split rule returned a {type(partition).__name__}, expected a Partition")
    for name, least in (("train", 1), ("val", 0), ("test", 0)):
        valid_rows(getattr(partition, name), clients, examples, f"{name} rows of the split rule", least)
    return partition


def valid_rows(given: Any, clients: int, examples: int, what: str, least: int) -> tuple[np.ndarray, ...]:
    """Return the row numbers of each client, ascending.

    Args:
        given: a list of numbers or an array for each client.
        clients: N.
        examples: the number of rows.
        what: the rows, for the message.
        least: how many rows a client has at least.

    Raises:
        SettingsError: there are not N lists of row numbers, or a list is too short.
    """
    if not isinstance(given, list | tuple) or len(given) != clients:
        found = type(given).__name__ + (f" of {len(given)}" if isinstance(given, list | tuple) else "")
        raise SettingsError(f"{what}: expected a list for each of clients={clients}, found a {found}")
    found = []
    for client, each in enumerate(given):
        with reading(f"{what} of client {client}", "a list of integers"):
            rows = np.sort(each)
            if len(rows) and (rows.ndim > 1 or rows.dtype.kind not in "iu"):
                raise TypeError(described(rows))
        if len(rows) < least:
            raise SettingsError(f"{what}: client {client} is left without examples; use fewer clients")
        if len(rows) and not 0 <= rows[0] <= rows[-1] < examples:
            raise SettingsError(f"{what} of client {client} are {rows[0]}..{rows[-1]}, expected 0..{examples - 1}")
        found.append(rows.astype(np.int64))
    return tuple(found)
