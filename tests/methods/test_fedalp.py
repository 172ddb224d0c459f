"""FedALP: special cases, wrong settings, and its server by NumPy in float64."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import started, uplinks
from support import World, play, prepared, rounds, world

from lightning_modules.base import ClientModule
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedalp import FedALP
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.training import Training
from pflsim.errors import ServerError
from pflsim.messages import Uplink
from pflsim.servers.base import Federation, ServerRule
from pflsim.servers.fedalp import FedALP as Server
from pflsim.servers.fedalp import State
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.types import ClientInfo, Tensors, Unit

TRAINING = Training(lr=0.1, batch_size=4, local_epochs=2)
AVERAGE = FedAvgServer()
WARMUP = 5
"""T_pre of the small federation: half of its ten rounds."""


@cache
def global_models(kind: type[ClientModule], rule: ServerRule[Any], fraction: float) -> list[Tensors]:
    """The server's model after each of the five rounds that follow the warm-up."""
    found = []
    with started(world(kind, rule, training=TRAINING)) as executor:
        rounds(executor, WARMUP, 4)
        for t in range(WARMUP + 1, 11):
            cohort = range(4) if fraction == 1 else [(t + i) % 4 for i in range(2)]
            play(executor, t, sorted(cohort))
            found.append(dict(executor.server.rule.global_weights(executor.server.state)))
    return found


@pytest.mark.parametrize(
    ("settings", "fraction"),
    [
        ({"groups": 3, "beta": 0}, 1.0),
        ({"groups": 3, "beta": 0, "onto": "group"}, 1.0),
        ({"groups": 3, "beta": 0, "unit": "module", "delta": "norm"}, 1.0),
        ({"groups": 1, "beta": 0.6}, 1.0),
        ({"groups": 1, "beta": 1.0}, 0.5),
    ],
)
def test_beta_0_and_one_group_follow_fedavg(settings: Any, fraction: float) -> None:
    ours = global_models(FedALP, Server(**settings), fraction)
    torch.testing.assert_close(ours, global_models(FedAvg, AVERAGE, fraction), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("warmup", "planned", "expected"),
    [(0.5, 20, 10), (0.4, 100, 40), (0.5, 2, 1), (0.01, 5, 1), (0.99, 5, 4), (0.5, 3, 2)],
)
def test_length_of_the_warm_up(warmup: float, planned: int, expected: int) -> None:
    rule = Server(warmup=warmup)
    assert [t for t in range(1, planned + 1) if rule.full_participation(t, planned)] == [expected]


def fused(**settings: Any) -> tuple[World, InlineExecutor]:
    """A federation after the warm-up and two more rounds."""
    w = world(FedALP, Server(**settings), training=TRAINING)
    executor = w.inline()
    rounds(executor, WARMUP + 2, w.clients)
    return w, executor


def test_running_variances_stay_positive() -> None:
    """A group with hardly any variance, beside one with much: an added-up difference would fall below zero."""
    model = ["model=cnn_bn", "model.padding=2", "model.channels=[2,2]", "model.hidden=4", "clients=2", "rounds=6"]
    job = prepared("method=fedalp", *model, "method.groups=2", "method.warmup=0.2", "partition=one_class")
    state, rule = job.rule.init(job.federation), job.rule
    (key,) = [k for k in state.weights if k.endswith("running_var")][:1]
    for t in range(1, 7):
        sent = [{k: v + 0.1 * (i + 1) for k, v in rule.downlink(state, i).weights.items()} for i in range(2)]
        for i, variance in enumerate((0.01, 50.0 if t < 4 else 0.02)):
            sent[i][key] = torch.full_like(sent[i][key], variance)
        state = rule.fuse(state, [Uplink(w, client=i, num_examples=9) for i, w in enumerate(sent)])
        for i in range(2):
            found = rule.downlink(state, i).weights[key]
            assert 0.01 <= float(found.min()) <= float(found.max()) <= 50


def test_a_diverged_run_says_so() -> None:
    w = world(partial(FedALP), Server(groups=2), training=Training(lr=1e30, batch_size=4), on_nonfinite="keep")
    executor = w.inline()
    with pytest.raises(ServerError, match="finite.*lower lr"):
        rounds(executor, WARMUP, 4)


SHAPES = {"a.weight": (3, 2), "a.bias": (3,), "bn.weight": (3,), "bn.running_var": (3,), "head.weight": (2, 3)}
UNITS = (
    Unit("a", ("a.weight", "a.bias")),
    Unit("bn", ("bn.weight",), ("bn.running_var",)),
    Unit("head", ("head.weight",)),
)
TENSORS = (
    *(Unit(key, (key,)) for key in ("a.weight", "a.bias")),
    Unit("bn.weight", ("bn.weight",), ("bn.running_var",)),
    Unit("head.weight", ("head.weight",)),
)
SIZES = (5, 9, 2, 7, 4, 3)
BETA, GROUPS = 0.7, 3
Arrays = dict[str, np.ndarray]


def values(rng: np.random.Generator, near: Arrays | None = None, scale: float = 1.0) -> Arrays:
    return {k: (0.0 if near is None else near[k]) + scale * rng.normal(size=s) for k, s in SHAPES.items()}


def federation(initial: Arrays, rounds: int = 4) -> Federation:
    clients = tuple(ClientInfo(i, n) for i, n in enumerate(SIZES))
    tensors = {k: torch.from_numpy(v) for k, v in initial.items()}
    return Federation(clients, tensors, {"module": UNITS, "tensor": TENSORS}, rounds=rounds)


def mean(sent: dict[int, Arrays], key: str) -> np.ndarray:
    """Σ γ_k·w_k with γ_k = n_k / Σ n over the clients given."""
    total = sum(SIZES[i] for i in sent)
    return np.sum([SIZES[i] / total * w[key] for i, w in sent.items()], axis=0)


def psi_of(updates: dict[int, Arrays], units: tuple[Unit, ...] = TENSORS, per_entry: bool = True) -> np.ndarray:
    """Eqs. 5 to 8 for one group."""
    delta = []
    for unit in units:
        flat = np.concatenate([mean(updates, k).ravel() for k in unit.parameters])
        delta.append(np.sqrt((flat**2).sum()) / (len(flat) if per_entry else 1))
    return BETA * np.array(delta) / max(delta)


def check(found: dict[str, torch.Tensor], expected: Arrays) -> None:
    for key, value in expected.items():
        np.testing.assert_allclose(found[key].numpy(), value, rtol=1e-11, atol=1e-13, err_msg=key)


def updated(own: Arrays, mixed: Arrays, sent: dict[int, Arrays], gamma: str, onto: str) -> Arrays:
    """base + Σ γ_k·(w_k − W_m) (line 10); the base of running statistics is the mixture; unchanged without uplinks."""
    if not sent:
        return own
    total = sum(SIZES) if gamma == "all" else sum(SIZES[i] for i in sent)
    found = {}
    for k in SHAPES:
        base = own if onto == "group" and k != "bn.running_var" else mixed
        found[k] = base[k] + np.sum([SIZES[i] / total * (w[k] - mixed[k]) for i, w in sent.items()], axis=0)
    return found


@pytest.mark.parametrize("gamma", ["all", "group"])
@pytest.mark.parametrize("onto", ["group", "mixture"])
@pytest.mark.parametrize(
    ("delta", "unit", "seed"), [("norm", "module", 0), ("norm", "tensor", 1), ("per_entry", "module", 2)]
)
def test_server(gamma: Any, onto: Any, delta: Any, unit: Any, seed: int) -> None:
    """Two rounds of warm-up, the grouping, a round with all clients, and one in which a group is absent."""
    rng, units = np.random.default_rng(seed), {"module": UNITS, "tensor": TENSORS}[unit]
    initial = values(rng)
    rule = Server(groups=GROUPS, beta=BETA, delta=delta, gamma=gamma, onto=onto, unit=unit)
    state: State = rule.init(federation(initial))
    assert rule.numbers(state) == {}

    # Round 1: FedAvg over some of the clients.
    sent = {i: values(rng, initial) for i in (0, 2, 3)}
    state = rule.fuse(state, uplinks(sent, SIZES))
    common = {k: mean(sent, k) for k in SHAPES}
    check(rule.downlink(state, 5).weights, common)  # type: ignore[arg-type]

    # Round 2 = T_pre: all clients. Three directions, of which clients 0 and 3, 1 and 5, 2 and 4 have one each.
    pulls = [values(rng) for _ in range(3)]
    groups = [0, 1, 2, 0, 2, 1]
    updates = {
        i: {k: 3 * pulls[g][k] * SIZES[i] + values(rng, scale=0.3)[k] for k in SHAPES} for i, g in enumerate(groups)
    }
    sent = {i: {k: common[k] + u[k] for k in SHAPES} for i, u in updates.items()}
    state = rule.fuse(state, uplinks(sent, SIZES))
    common = {k: mean(sent, k) for k in SHAPES}
    numbers = rule.numbers(state)
    assert numbers["groups"].tolist() == groups
    members = [[i for i, g in enumerate(groups) if g == m] for m in range(GROUPS)]
    psi = np.stack([psi_of({i: updates[i] for i in who}, units, delta == "per_entry") for who in members])
    np.testing.assert_allclose(numbers["psi"].numpy(), psi, rtol=1e-11)
    check(rule.global_weights(state), common)  # type: ignore[arg-type]
    own = [common] * GROUPS
    mixed = own

    # Round 3: all clients. Round 4: none of group 1, one client of group 2.
    layer = {k: number for number, unit in enumerate(units) for k in unit.keys}
    for cohort in (range(6), (0, 3, 4)):
        for i in range(6):
            check(rule.downlink(state, i).weights, mixed[groups[i]])  # type: ignore[arg-type]
        sent = {i: values(rng, mixed[groups[i]]) for i in cohort}
        own = [
            updated(own[m], mixed[m], {i: w for i, w in sent.items() if groups[i] == m}, gamma, onto)
            for m in range(GROUPS)
        ]
        state = rule.fuse(state, uplinks(sent, SIZES))
        weight = [sum(SIZES[i] for i in who) / sum(SIZES) for who in members]
        common = {k: np.sum([weight[m] * own[m][k] for m in range(GROUPS)], axis=0) for k in SHAPES}
        mixed = [
            {k: psi[m, layer[k]] * own[m][k] + (1 - psi[m, layer[k]]) * common[k] for k in SHAPES}
            for m in range(GROUPS)
        ]
        check(rule.global_weights(state), common)  # type: ignore[arg-type]
        for m in range(GROUPS):
            found = rule.numbers(state)
            check({k: found[f"group/{k}"][m] for k in SHAPES}, own[m])
    for i in range(6):
        check(rule.downlink(state, i).weights, mixed[groups[i]])  # type: ignore[arg-type]


def test_clients_that_are_missing_when_groups_are_made() -> None:
    """By default settings: in no group and sent w_g until they report, which puts them where their update points."""
    rng = np.random.default_rng(3)
    initial = values(rng)
    rule = Server(groups=2, beta=BETA, warmup=0.2)
    state = rule.init(federation(initial, rounds=5))
    updates = {i: values(rng) for i in (0, 3)}
    updates[3] = {k: 0.5 * v - updates[0][k] for k, v in updates[3].items()}  # so that directions are clear
    updates[1] = {k: 2 * v for k, v in updates[0].items()}
    sent = {i: {k: initial[k] + u[k] for k in SHAPES} for i, u in sorted(updates.items())}
    state = rule.fuse(state, uplinks(sent, SIZES))
    assert rule.numbers(state)["groups"].tolist() == [0, 0, -1, 1, -1, -1]
    common = {k: mean(sent, k) for k in SHAPES}
    members = {0: [0, 1], 1: [3]}
    psi = [psi_of({i: updates[i] for i in who}) for who in members.values()]
    np.testing.assert_allclose(state.psi.numpy(), np.stack(psi), rtol=1e-11)
    layer = {k: number for number, unit in enumerate(TENSORS) for k in unit.keys}
    own, mixed = [common, common], [common, common]

    # Client 4 goes the way of client 3 and client 2 that of client 0, as seen from what they were sent: w_g.
    for cohort, placed in (((0, 3, 4), {4: 1}), ((2, 3), {2: 0}), ((4,), {}), ((), {})):
        for i in range(6):
            m = next((m for m, who in members.items() if i in who), None)
            check(rule.downlink(state, i).weights, common if m is None else mixed[m])  # type: ignore[arg-type]
        step = {i: {k: 0.01 * v for k, v in values(rng).items()} for i in cohort}
        for i, m in placed.items():
            step[i] = {k: step[i][k] + 3 * updates[0 if m == 0 else 3][k] for k in SHAPES}
        for i in set(cohort) - set(placed):
            step[i] = {k: step[i][k] + updates[0 if i in members[0] else 3][k] for k in SHAPES}
        at = {i: m for m, who in members.items() for i in who}
        sent = {i: {k: (mixed[at[i]] if i in at else common)[k] + u[k] for k in SHAPES} for i, u in step.items()}
        state = rule.fuse(state, uplinks(sent, SIZES))
        if cohort:
            own = [
                updated(own[m], mixed[m], {i: w for i, w in sent.items() if i in members[m]}, "group", "mixture")
                for m in (0, 1)
            ]
            weight = [sum(SIZES[i] for i in who) for who in members.values()]  # of those that had a group
            common = {k: sum(weight[m] * own[m][k] for m in (0, 1)) / sum(weight) for k in SHAPES}
            mixed = [
                {k: psi[m][layer[k]] * own[m][k] + (1 - psi[m][layer[k]]) * common[k] for k in SHAPES} for m in (0, 1)
            ]
        for i, m in placed.items():
            members[m].append(i)
        found = rule.numbers(state)["groups"].tolist()
        assert found == [next((m for m, who in members.items() if i in who), -1) for i in range(6)]
        check(rule.global_weights(state), common)  # type: ignore[arg-type]
    assert found == [0, 0, 0, 1, 1, -1]


def test_too_few_for_the_groups() -> None:
    """The warm-up is FedAvg and goes on until a round in which there are as many clients as groups."""
    rng = np.random.default_rng(6)
    initial = values(rng)
    rule = Server(groups=3, beta=BETA, warmup=0.4)
    state = rule.init(federation(initial, rounds=5))
    common = initial
    for cohort in ((0, 1, 2, 3), (), (1, 4), (5,)):
        sent = {i: values(rng, common) for i in cohort}
        state = rule.fuse(state, uplinks(sent, SIZES))
        common = {k: mean(sent, k) for k in SHAPES} if sent else common
        assert rule.numbers(state) == {} and state.fused <= 4
        check(rule.downlink(state, 3).weights, common)  # type: ignore[arg-type]
    state = rule.fuse(state, uplinks({i: values(rng, common) for i in (0, 3, 4)}, SIZES))
    assert rule.numbers(state)["groups"].tolist() == [0, -1, -1, 1, 2, -1]
