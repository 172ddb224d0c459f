"""Random values for every setting: the run works, or is refused with a message that names the key.

Found on disk and in the signatures, so a new part, and a new setting, is held to it at once.
"""

import copy
import random
import re
import types
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from support import Records, inline

from lightning_modules.prepare import PreparedRun, prepare
from pflsim.config.checks import check, settings_from
from pflsim.config.components import COMPONENTS, settings_of, targets_of
from pflsim.config.compose import CONFIGS, composed, parse, to_settings
from pflsim.config.settings import Settings
from pflsim.engine.simulation import Simulation
from pflsim.errors import RunError, SettingsError

pytestmark = pytest.mark.slow

TAME = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
COUNTS = [0, 1, -1, 2, 3, 5, 100, 10**5, 10**6, 10**9, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, 10**18, 10**25]
NUMBERS = [0.0, -0.0, 0.5, 0.999999, 1.0, 1.5, -0.5, 1e-8, 1e-45, 5e-324, 100.0, 1e10, 1e38, 3.5e38, 1e300, -1e308]
NUMBERS += [float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "abc", "all", "auto", "body", "none", "ünïcödé", "a\0b", "..", "os.abort", "0.5", "x" * 5000, "${lr}"]
ANYTHING = [*COUNTS, *NUMBERS, *TEXTS, None, True, False, [], {}, [None], [[]], {"a": 1}, [1, "a"], [[0], [1]]]

# What there is to set ------------------------------------------------------------------------------------------------


def own_keys(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The run's own settings by dotted key, with their types."""
    hints = typing.get_type_hints(schema)
    for f in fields(schema):
        if is_dataclass(hints[f.name]):
            yield from own_keys(hints[f.name], f"{prefix}{f.name}.")
        elif f.name not in (*COMPONENTS, "names"):
            yield prefix + f.name, hints[f.name]


OWN = dict(own_keys(Settings))
NODES = {part: {p.stem: yaml.safe_load(p.read_text()) for p in (CONFIGS / part).glob("*.yaml")} for part in COMPONENTS}
for node in NODES["method"].values():
    node.pop("search", None)  # for `pflsim tune`
    node.pop("defaults", None)  # of the run
KNOWN = {
    (part, option): {key: p.annotation for key, p in settings_of(targets_of(node, part), part).items()}
    for part, nodes in NODES.items()
    for option, node in sorted(nodes.items())
}
CNN = {"channels": [2, 3], "kernel": 3, "padding": 1}
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mlp", "dnn", "mnist_nn"), {"hidden": [6]}),
    **dict.fromkeys(("cnn", "cnn_bn", "mnist_cnn", "cifar10_cnn"), {**CNN, "hidden": 6}),
    **dict.fromkeys(("lenet", "lenet_bn"), {**CNN, "hidden": [6, 5]}),
    "client": {"delta": 0.01},
    "example": {"delta": 0.001},
    "pfedpm_cnn": {"hidden_channels": 3, "channels": 2, "kernel": 3, "padding": 1, "hidden": 5},
    "label_lognormal": {"smallest": 4, "largest": 20, "median": 10.0},
    "n_way_k_shot": {"n": 2, "k": 5},
    "dirichlet": {"min_examples": 3},
    "listed_classes": {"held": [[0], [1], [2], [3]]},
    "counts": {"train": 12, "test": 6},
}
"""What makes a part small enough for the made-up data; of the others only the settings are tried."""
SLOW = ("feddecomp", "fedrep", "pfedme")
"""Methods with settings that multiply the work."""
BIG = ("alexnet", "resnet18", "resnet18_mh", "pfedpm_cnn_mh")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> str:
    """160 grey images of 12×12 pixels in four classes."""
    rng, labels = np.random.default_rng(0), np.arange(160) % 4
    x = (rng.integers(0, 120, (160, 12, 12)) + (labels * 30)[:, None, None]).astype(np.uint8)
    path = tmp_path_factory.mktemp("data") / "made_up.npz"
    np.savez(path, x_train=x[:120], y_train=labels[:120], x_test=x[120:], y_test=labels[120:])
    return str(path)


def wild(kind: Any, choose: random.Random) -> Any:
    """A value of a type, as nasty as the type allows; now and then of another."""
    outer, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or choose.random() < 0.1:
        return copy.deepcopy(choose.choice(ANYTHING))
    if outer is typing.Annotated:
        return wild(inner[0], choose)
    if outer is typing.Literal or outer in (typing.Union, types.UnionType):
        picked = choose.choice(inner)
        return picked if outer is typing.Literal else wild(picked, choose)
    if outer in (list, tuple, Sequence):
        return [wild(inner[0], choose) for _ in range(choose.choice((0, 1, 1, 2, 4)))]
    if outer is dict:
        names = ("hidden", "norm", "channels", "_target_", "variants", "nope")
        return {choose.choice(names): choose.choice(ANYTHING) for _ in range(choose.randint(0, 2))}
    values = {int: COUNTS, float: NUMBERS + COUNTS, str: TEXTS, bool: [True, False], type(None): [None]}
    return choose.choice(values[kind])


def is_heavy(key: str, value: Any) -> bool:
    """What this machine can do, but not in a moment: wide layers that fit, many threads, a hundred thousand classes."""
    numbers = value if isinstance(value, list) else [value]
    large = any(isinstance(n, int | float) and 10**4 < abs(n) <= 10**6 for n in numbers)
    return key == "placement.threads" or large


def config_of(chosen: Mapping[str, str], path: str) -> dict[str, Any]:
    config: dict[str, Any] = {"clients": 4, "rounds": 2, "executor": "inline", "batch_size": 16, "lr": 0.05}
    for part, option in chosen.items():
        config[part] = copy.deepcopy({**NODES[part][option], **SIZES.get(option, {})})
    config["data"] |= {"path": path} if chosen["data"] == "npz" else {}
    config["data"] |= {"clients": 4} if chosen["data"] == "domains" else {}  # which the file takes from the run
    return {**config, "names": dict(chosen)}


def put(config: dict[str, Any], key: str, value: Any) -> None:
    *groups, last = key.split(".")
    for group in groups:
        config = config.setdefault(group, {})
    config[last] = value


def refusal(config: Mapping[str, Any]) -> str | PreparedRun:
    """The error of a config, or the prepared run."""
    try:
        made = settings_from(config)
        check(made)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numpy and torch, about the values that are tried
            return prepare(made)
    except SettingsError as error:
        assert str(error).strip()
        return str(error)


def run(job: PreparedRun, folder: Path) -> None:
    """A round, which may fail with a message."""
    plan, clients_done = replace(job.plan, cohorts=job.plan.cohorts[:1]), Records()
    try:
        Simulation(inline(job), plan, folder, clients_done).run()
    except RunError as error:
        assert str(error)
    for row in (row for record in clients_done.records for row in record.evaluations):
        assert 0 <= row.correct <= row.total


# One setting at a time, then several together ------------------------------------------------------------------------

EVERY = [(None, None, key, kind) for key, kind in OWN.items()] + [
    (part, option, f"{part}.{key}", kind) for (part, option), known in KNOWN.items() for key, kind in known.items()
]


@pytest.mark.parametrize("wanted", [int, float, str, bool], ids=lambda kind: kind.__name__)
def test_a_value_of_another_type_is_refused_by_name(made_up: str, wanted: type) -> None:
    """For every key that takes one of the types and none of the others."""
    wrong = {int: [2.5, "a", True, [1], {}], float: ["a", True, [1.0]], str: [3, True, ["a"]], bool: [2, 1.0, "a"]}
    tried = 0
    for part, option, key, kind in EVERY:
        if kind is not wanted or option in (*BIG, "synthetic"):  # which needs another partition
            continue
        config = config_of({**CHOSEN, **({part: option} if part and option else {})}, made_up)
        for value in wrong[wanted]:
            put(config, key, value)
            said = refusal(config)
            assert isinstance(said, str) and f"{key}=" in said and "expected" in said, (key, value)
            tried += 1
    assert tried > 20


CHOSEN = {"method": "fedavg", "data": "npz", "partition": "iid", "split": "official", "model": "mlp"}


@settings(TAME, max_examples=250)
@example(12)
@given(seed=st.integers(0, 2**32))
def test_nonsense_is_run_or_refused(made_up: str, tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    choose = random.Random(seed)
    chosen = dict(CHOSEN, method=choose.choice(sorted(NODES["method"])))
    for part, share in (("partition", 0.4), ("split", 0.4), ("model", 0.3), ("data", 0.03)):
        if choose.random() < share:
            chosen[part] = choose.choice(sorted(set(NODES[part]) - set(BIG)))
    config, named = config_of(chosen, made_up), []
    keys = [(f"{part}.{key}", kind) for part, o in chosen.items() for key, kind in KNOWN[part, o].items()]
    for _ in range(choose.choice((1, 1, 2, 3))):
        key, kind = choose.choice(keys if choose.random() < 0.6 else list(OWN.items()))
        value = wild(kind, choose)
        assume(not is_heavy(key, value))
        put(config, key, value)
        named.append(key)
    ready = refusal(config)
    if isinstance(ready, str):
        plainly = refusal(config_of(chosen, made_up))  # these parts may not go together whatever is set
        names = {word for key in named for word in (key, key.partition(".")[0], key.rpartition(".")[2])}
        names |= {f"{part}.{key}" for part, o in chosen.items() for key in KNOWN[part, o]}  # or another to change
        assert isinstance(plainly, str) or any(name in ready for name in names), (named, ready)
    elif choose.random() < 0.3 and max(ready.batches_per_round) <= 100 and chosen["method"] not in SLOW:
        run(ready, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("clients", 10**9, "clients=1000000000: expected .* 1000000"),
        ("clients", 10**6, "clients=1000000 exceeds the 120 examples"),
        ("rounds", 10**9, "rounds=1000000000: expected .* 100000"),
        ("local_epochs", 10**9, "local_epochs=1000000000: expected .* 1000000"),
        ("batch_size", 10**18, "batch_size=1000000000000000000: expected"),
        ("seed", 2**63, "seed=9223372036854775808: expected"),
        ("seed", "0", "seed='0': expected a whole number"),
        ("model.hidden", [10**9], r"model.hidden=\[1000000000\]: expected a number .* 1000000"),
        ("partition", {"_target_": "pflsim.data.partitions.n_way_k_shot", "std": -1e-9}, "std=-1e-09: expected"),
        ("lr_decay", 1e300, "lr_decay=1e.300"),
        ("weight_decay", 1e100, "weight_decay=1e.100: expected a number"),
        ("data.num_classes", 10**18, "num_classes=1000000000000000000: expected"),
        ("model.variants", [{"hidden": [0]}], r"model.hidden=\[0\]: expected"),
        ("model.variants", [{"hidden": 3}], r"model.variants\[0\]: model.hidden=3: expected a list"),
        ("model.variants", [{"_target_": "os.abort"}], r"model.variants\[0\].*_target_=os.abort"),
        ("partition._target_", "pflsim.data.splits.official", "partition._target_=.* -> list"),
        ("data._target_", "pflsim.records.files.os.abort", "data._target_=pflsim.records.files.os.abort"),
    ],
)
def test_what_would_take_the_machine_down(made_up: str, key: str, value: Any, says: str) -> None:
    config = config_of(CHOSEN, made_up)
    put(config, key, value)
    said = refusal(config)
    assert isinstance(said, str) and re.search(says, said)


# The command line -----------------------------------------------------------------------------------------------------

WRITTEN = r"""1 -1 0.5 1e400 nan true null '' abc [1,2] [ {a:1} { ' " \ ${lr} ${nope} ${ ${oc.env:NOPE} ${method}
${rounds}${seed} ??? ünïcödé a=b 1,2 range(3) choice(1,2) interval(0,1) glob(*) int(x) sort(3,1) # % @ ~ yes 0x10 1_000
.inf ${oc.decode:'['} ${lr:1}"""
ODD = ["[" * 300 + "]" * 300, "[" * 3000, "{a:" * 300 + "1" + "}" * 300, "9" * 5000, "x" * 5000]
ODD += ["'a b'", "\n", "\t", "\x00"]


@cache
def command_keys() -> list[str]:
    other = ["method", "data", "placement", "experiment", "quick", "names.method", "schema", "a.b.c", "method.", "@x"]
    return ["", *other, *OWN, *(f"{part}.{key}" for part, option in CHOSEN.items() for key in KNOWN[part, option])]


@settings(TAME, max_examples=60)
@given(
    st.lists(
        st.builds(
            "{}{}{}{}".format,
            st.sampled_from(["", "", "", "+", "++", "~", "+~"]),
            st.deferred(lambda: st.sampled_from(command_keys())),
            st.sampled_from(["=", "=", "=", "", "=="]),
            st.one_of(st.sampled_from([*WRITTEN.split(), *ODD]), st.text(max_size=8)),
        ),
        min_size=1,
        max_size=2,
    )
)
def test_any_command_line_is_composed_or_refused(overrides: list[str]) -> None:
    try:
        check(to_settings(composed(parse(["method=fedavg", *overrides]), [CONFIGS])))
    except SettingsError as error:
        assert str(error).strip()
