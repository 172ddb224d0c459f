"""A small federation to test on: made-up data, a tiny net, any method."""

import json
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.fx import GraphModule

import pflsim
from lightning_modules.base import ClientModule
from lightning_modules.contract import checks
from lightning_modules.contract.checks import states, survey
from lightning_modules.export import export_program
from lightning_modules.hosts.client_factory import ClientFactory
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.loop import train
from lightning_modules.methods.pfedcfr import PFedCFR
from lightning_modules.nets.cnn import Cnn
from lightning_modules.nets.mlp import Mlp
from lightning_modules.nets.net import Net
from lightning_modules.prepare import PreparedRun, prepare
from lightning_modules.training import Training
from pflsim.analysis.runs import Run
from pflsim.commands.overrides import values_of
from pflsim.commands.tune import finish
from pflsim.config.compose import CONFIGS, composed, parse, to_settings
from pflsim.config.settings import Settings
from pflsim.data.dataset import Dataset
from pflsim.data.federate import load_federation
from pflsim.data.federated import Examples, Partition, shard
from pflsim.engine.execution import Trained, TrainTask
from pflsim.engine.plan import RunPlan
from pflsim.errors import SettingsError
from pflsim.messages import Uplink
from pflsim.records.evaluation import Scope
from pflsim.records.saved_settings import saved_settings
from pflsim.records.summary import RunMeta
from pflsim.seeding import cohort, torch_generator
from pflsim.servers.base import Federation, ServerRule
from pflsim.servers.pfedcfr import PFedCFR as PFedCFRServer
from pflsim.types import ClientInfo, NewcomerRecord, RoundRecord

METHODS = sorted(path.stem for path in (CONFIGS / "method").glob("*.yaml") if not path.stem.endswith("lora"))
"""All method files, found on disk; those that need adapters have the contract in tests/methods/test_lora.py."""
OF_TOKENS = (
    "local", "fedavg", "fedprox", "ditto", "fedper", "fedrep", "fedala", "apfl", "scaffold", "fedsa_lora", "ffa_lora",
    "hetlora", "flexlora", "feddpa_lora",
)  # fmt: skip
"""Those that predict next tokens."""
STACKED = [method for method in METHODS if method not in ("apple", "floco")]
"""Those that train in lockstep."""
IN_BOTH_TIERS = {"fedalp", "fedavg", "fedfcd", "pfedcfr", "pfedla", "pfedpm"}


PLAIN_SGD = {"scaffold"}
"""Methods that refuse momentum and weight decay."""


REFUSALS = json.loads((CONFIGS.parent / "docs" / "refusals.json").read_text(encoding="utf-8"))
"""What each method refuses, and why, as the reference shows it."""
TRIED = {
    checks.takes_uplink: "uplink",
    checks.takes_attack: "attack",
    checks.takes_aggregator: "aggregator",
    checks.takes_privacy_of_clients: "privacy=client",
    checks.takes_privacy_of_examples: "privacy=example",
}


def check_contract(method: str, check: Callable[[checks.Make], None], make: checks.Make) -> None:
    """Run a check, and compare what the method refuses with `REFUSALS`."""
    refusal = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the Trainer
        try:
            check(make)
        except checks.Refused as refused:
            refusal = str(refused)
        except checks.Skipped:
            pass
    if what := TRIED.get(check):
        assert refusal == REFUSALS.get(method, {}).get(what, ""), "run: python docs/make_reference.py --refusals"


class FxProgram:
    """Runs a traced step by torch.fx, with the interface of `lockstep.program.Program`."""

    def __init__(self, traced: GraphModule, state: int):
        del state
        traced.recompile()
        self.traced = traced

    def bind(self, state: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
        return lambda *inputs: self.traced(*state, *inputs)


def slow_except(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: these in both tiers, the other values in `make test-slow` only."""
    return [
        value
        if value in fast
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]


METHOD_PARAMS = slow_except(IN_BOTH_TIERS, METHODS)
"""For tests over all methods: six in `make test`, the others in `make test-slow`."""
KINDS = ("ditto", "fedavg", "fedfcd", "fedfomo", "l2gd", "pfedhn", "pfedme", "r_pfedpm", "scaffold")
"""One method of each kind of state, schedule and step, for tests of what is not a method's own."""
RUN_PARAMS = slow_except({"fedfcd", "pfedcfr"}, METHODS)
"""For tests of whole runs through the command line, which take seconds each."""


ALL = (0, 1, 2, 3)
"""The clients of `world`."""


@dataclass(frozen=True)
class World:
    """Data, recipe, server rule and federation, as `lightning_modules.prepare` makes them of settings."""

    dataset: Dataset
    partition: Partition
    factory: ClientFactory
    rule: ServerRule[Any]
    federation: Federation
    settings: Settings = Settings()
    meta: RunMeta = RunMeta("made", "made_up", "iid", "", "mlp", 4, 3, 0)

    def inline(self) -> InlineExecutor:
        return inline(self)

    @property
    def clients(self) -> int:
        return self.partition.clients

    def on_error(self, rule: str) -> Any:
        return replace(self, settings=Settings(on_client_error=rule))


def in_this_process(runs: Iterable[Settings], parallel: int, table: object = None) -> Iterator[tuple[int, str]]:
    """In the place of `side_by_side`: the imports of other processes take longer than small runs."""
    yield from ((number, finish(run)) for number, run in enumerate(runs))


def inline(made: Any) -> InlineExecutor:
    """A started executor."""
    executor = InlineExecutor(made)
    executor.start()
    return executor


def pfedcfr(**more: Any) -> World:
    """Clients of pFedCFR, each of which has a model of its own from the start."""
    client = partial(PFedCFR, alpha=100.0, r="body", unit="module")
    return world(client, PFedCFRServer(alpha=100.0, sigma=1e3), init="per_client", model=dropout_mlp, **more)


def dataset(classes: int = 3, per_class: int = 40, shape: tuple[int, ...] = (1, 4, 4), seed: int = 0) -> Dataset:
    """Noisy images of a few classes, uint8."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(40, 200, size=(classes, *shape))
    y = np.tile(np.arange(classes), per_class)
    x = np.clip(centres[y] + rng.normal(0, 30, size=(len(y), *shape)), 0, 255).astype(np.uint8)
    return Dataset("made_up", x, y.astype(np.int64), classes, train_size=len(y) * 3 // 4)


def exact(data: Dataset) -> Dataset:
    """The same in float64, scaled."""
    return replace(data, x=data.x.astype(np.float64) / data.scale)


def partition(data: Dataset, sizes: tuple[int, ...]) -> Partition:
    """Consecutive training rows of these sizes; a third as many test rows each, and two for validation."""
    edges = np.cumsum((0, *sizes))
    train = tuple(np.arange(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True))
    val = tuple(np.arange(data.train_size - 2 * (i + 1), data.train_size - 2 * i) for i in range(len(sizes)))
    test = tuple(np.arange(data.train_size + 5 * i, data.train_size + 5 * i + 5) for i in range(len(sizes)))
    return Partition(train, val, test)


def world(
    client: Callable[..., ClientModule],
    rule: ServerRule[Any],
    *,
    sizes: tuple[int, ...] = (12, 7, 20, 9),
    training: Training | None = None,
    model: Callable[..., Any] | None = None,
    data: Dataset | None = None,
    **factory: Any,
) -> World:
    data = data or dataset()
    rows = partition(data, sizes)
    made = ClientFactory(
        client=client,
        models=(model or partial(Mlp, hidden=[5]),),
        training=training or Training(lr=0.1, batch_size=4),
        input_shape=data.input_shape,
        num_classes=data.num_classes,
        **{"seed": 0, **factory},
    )
    module = made.build()
    federation = Federation(
        clients=tuple(ClientInfo(i, n) for i, n in enumerate(sizes)),
        initial=module.shared_tensors(),
        layouts={by: module.layout(by) for by in ("module", "tensor", "model")},
        seed=made.seed,
        rounds=10,
        num_classes=data.num_classes,
        feature_width=module.net.feature_width,
        head=deepcopy(module.net.head),
    )
    return World(data, rows, made, rule, federation)


def rounds(executor: Any, count: int, clients: int, fraction: float = 1.0) -> list[Any]:
    """Run rounds by hand; returns the training reports."""
    reports = []
    for t in range(1, count + 1):
        survey(executor, t)
        sent = executor.send(cohort(0, t, clients, fraction))
        trained = executor.run(TrainTask(t), sent)
        executor.fuse(trained)
        reports.extend(trained.reports)
    return reports


PLANNED = RunMeta("test", "test", "iid", "", "mlp", 4, 5, 0, classes=10)


def plan(clients: int, count: int, **settings: Any) -> RunPlan:
    """A plan in which all clients take part."""
    return planned(RunPlan(PLANNED, tuple(tuple(range(clients)) for _ in range(count)), clients), **settings)


def planned(drawn: RunPlan, **changes: Any) -> RunPlan:
    """The plan with other values of its fields, and of settings: `eval_every` is `eval.every`."""
    for key, value in changes.items():
        if key in RunPlan.__match_args__:
            drawn = replace(drawn, **{key: value})
        elif key in RunMeta.__match_args__:
            drawn = replace(drawn, meta=replace(drawn.meta, **{key: value}))
        else:
            group, _, name = key.partition("_")
            section = replace(getattr(drawn.settings, group), **{name: value})
            drawn = replace(drawn, settings=replace(drawn.settings, **{group: section}))
    return drawn


def trained_states(executor: InlineExecutor, trained: Trained[Any]) -> dict[int, dict[str, torch.Tensor]]:
    """Every client's private state after a training that is not fused yet."""
    new: Any = trained.states
    return {**states(executor), **{client: dict(state) for client, state in new.items()}}


def dropout_mlp(shape: tuple[int, ...], classes: int) -> Mlp:
    """A net that also draws random numbers while it trains."""
    net = Mlp(shape, classes, hidden=[6])
    net.body.append(torch.nn.Dropout(0.3))  # type: ignore[operator]
    return net


class Double(torch.nn.Module):
    """An own model in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(6), torch.nn.ReLU())
        self.head = torch.nn.Linear(6, 10)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [B, 10] of float32 inputs."""
        return self.head(self.body(x.double()))


class Records:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []
        self.joined: list[NewcomerRecord] = []
        self.phases: list[tuple[int, str, int] | int] = []
        """What went on: a phase with those due in it, or how many are through with it."""

    def round(self, record: RoundRecord) -> None:
        self.records.append(record)

    def phase(self, round_number: int, name: str, due: int = 0) -> None:
        self.phases.append((round_number, name, due))

    def clients_done(self, clients: int) -> None:
        self.phases.append(clients)

    def newcomers(self, record: NewcomerRecord) -> None:
        self.joined.append(record)

    def sync(self) -> None: ...


def softmax(scores: np.ndarray) -> np.ndarray:
    """Row by row, [n, C]."""
    p = np.exp(scores - scores.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def same(a: dict[int, dict[str, torch.Tensor]], b: dict[int, dict[str, torch.Tensor]]) -> bool:
    """Equal to the bit."""
    return a.keys() == b.keys() and all(
        a[c].keys() == b[c].keys() and all(torch.equal(a[c][k], b[c][k]) for k in a[c]) for c in a
    )


def agree(one: Any, other: Any) -> None:
    """Assert that both are equal, to the bit and in the strides of tensors, at any depth."""
    assert type(one) is type(other)
    if is_dataclass(one):
        agree(*({field.name: getattr(side, field.name) for field in fields(side)} for side in (one, other)))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            agree(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            agree(a, b)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, check_stride=True)
    else:
        assert one == other


def check_loaded(
    run: Run, *clients: int, scope: Scope | None = None, tests: Sequence[Examples] = (), export: bool = True
) -> None:
    """A loaded model gets as much right of the test examples as the last round's record says; so does its export.

    Args:
        run: the run.
        clients: which clients.
        scope: of which model; None: the reported one.
        tests: the test examples of all clients; empty: they are loaded again.
        export: whether the model is exported, which takes most of the time.
    """
    tests = tests or examples_of(run)
    recorded = run.counts(saved_settings(run.folder).rounds, scope)
    for client in clients:
        model, test = pflsim.load_model(run, client, "last", scope and scope.model), tests[client]
        program = export_program(model).module() if export else model
        with torch.inference_mode():
            scores, exported = model(test.x), program(test.x)
        assert not model.training and torch.equal(scores.argmax(1), exported.argmax(1))
        assert (scores.argmax(1) == test.y).sum() == recorded["correct"][client]
        loss = torch.nn.functional.cross_entropy(scores.float(), test.y, reduction="sum")
        assert float(loss) == pytest.approx(recorded["loss"][client], rel=1e-4)  # as much right by chance is not enough


@contextmanager
def refusing(*words: str, match: str = "", lines: int = 1, kind: type[Exception] = SettingsError) -> Iterator[None]:
    """Assert that what is inside is refused in so many lines, which have these words and match the pattern."""
    with pytest.raises(kind, match=match or None) as caught:
        yield
    said = str(caught.value)
    assert said.count("\n") == lines - 1 and all(word in said for word in words), said


def events(folder: Path) -> EventAccumulator:
    """The events of a run, as TensorBoard reads them."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0}).Reload()


def examples_of(run: Run) -> list[Examples]:
    """The test examples of all clients of a run."""
    data, rows = load_federation(saved_settings(run.folder))
    return [shard(data, rows, client).test for client in range(rows.clients)]


BATCH_NORM = partial(Cnn, channels=[2, 3], kernel=3, padding=1, hidden=6, norm="batch")


class Pooled(Net):
    """A head that needs maps."""

    def __init__(self, shape: tuple[int, ...], classes: int):
        head = torch.nn.Sequential(torch.nn.Conv2d(2, classes, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        super().__init__(torch.nn.Conv2d(shape[0], 2, 1), head, (2, *shape[1:]), classes)


def normed(shape: tuple[int, ...], classes: int) -> Net:
    """A net with batch normalisation, `net.body.2`."""
    width = int(np.prod(shape))
    body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(width, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU())
    return Net(body, torch.nn.Linear(6, classes), (6,), classes)


def settings_of(*overrides: str, **settings: Any) -> Settings:
    """Settings, as the command line and Python compose them."""
    return to_settings(composed(parse(overrides) | values_of(settings), [CONFIGS]))


def prepared(*overrides: str, **settings: Any) -> PreparedRun:
    """A run, as the command line and Python prepare it."""
    return prepare(settings_of("executor=inline", *overrides, **settings))


def after(made: World, count: int = 3, fraction: float = 1.0) -> dict[int, dict[str, torch.Tensor]]:
    """Every client's private state after some rounds."""
    executor = made.inline()
    rounds(executor, count, made.clients, fraction)
    return states(executor)


def run_cohorts(made: World, cohorts: Iterable[Sequence[int]]) -> InlineExecutor:
    """The executor after a round with each of these cohorts."""
    executor = made.inline()
    for t, clients in enumerate(cohorts, start=1):
        play(executor, t, clients)
    return executor


def uplinks_of(executor: InlineExecutor, trained: Any) -> dict[int, Uplink]:
    """What clients have sent."""
    return {up.client: up for handle in trained.uplinks for up in executor.uplinks(handle)}


def play(executor: InlineExecutor, t: int, cohort: Sequence[int] = ALL) -> tuple[Trained[Any], dict[int, Uplink]]:
    """Run round t of these clients; returns their training and what they have sent."""
    trained = executor.run(TrainTask(t), executor.send(cohort))
    sent = uplinks_of(executor, trained)
    executor.fuse(trained)
    return trained, sent


def nets(found: dict[int, dict[str, Tensor]], name: str = "net") -> dict[int, dict[str, Tensor]]:
    """A network of every client, of their private states."""
    return {c: {k: v for k, v in state.items() if k.startswith(f"{name}.")} for c, state in found.items()}


def steps_of(executor: InlineExecutor) -> list[tuple[str, set[str]]]:
    """Client 0's next steps: the phase of each, and the values that it changes."""
    module = executor.factory.build()
    module.receive(executor.downlink(executor.send([0]).downlinks[0]))
    seen: list[tuple[str, set[str]]] = []
    real = module.optimise

    def optimise(batch: Any, step: Any) -> Any:
        before = {k: v.clone() for k, v in module.state_dict().items()}
        terms = real(batch, step)
        seen.append((step.phase.name, {k for k, v in module.state_dict().items() if not torch.equal(v, before[k])}))
        return terms

    module.optimise = optimise  # type: ignore[method-assign]
    train(module, executor.host.shards[0].train, torch_generator(0, "batches", 0, 1))
    return seen
