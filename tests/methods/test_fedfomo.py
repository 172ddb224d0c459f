"""FedFomo: weights and update by independent NumPy, whom the server sends to whom, and what it costs."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import NAMES, losses, scores
from support import World, normed, play, rounds, same, states, world

from lightning_modules.hosts import client_host
from lightning_modules.losses import mean_loss
from lightning_modules.methods.fedfomo import FedFomo
from lightning_modules.methods.local import Local
from lightning_modules.model_checks import check_validation
from lightning_modules.nets.cnn import Cnn
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.data.federated import FORWARD_BATCH, Shard
from pflsim.engine.execution import TrainTask
from pflsim.errors import SettingsError
from pflsim.messages import Message
from pflsim.servers.fedfomo import FedFomo as Server
from pflsim.servers.fedfomo import State, candidates
from pflsim.servers.local import Local as LocalServer

Arrays = dict[str, np.ndarray]


def fomo(client: Any = FedFomo, model: Any = None, training: Training | None = None, **rule: Any) -> World:
    return world(client, Server(**rule), model=model, training=training)


def noisy(initial: Any, seed: int, scale: float = 0.3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: v + scale * torch.randn(v.shape, generator=generator) for k, v in initial.items()}


def message(models: dict[int, Any]) -> Message:
    return Message(extra={f"candidate/{n}/{k}": v for n, model in models.items() for k, v in model.items()})


def own(module: FedFomo) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in module.state_dict().items() if k.startswith("net.")}


def weighed(module: FedFomo, shard: Shard, models: dict[int, Any]) -> dict[str, torch.Tensor]:
    """The model with which the client begins to train, having received these candidates."""
    module.receive(message(models))
    module.before_training(shard)
    return own(module)


def began(trained: Any, start: Any) -> dict[str, torch.Tensor]:
    """The state of a client whose last training led from one model to another."""
    return {**trained, **{f"previous.{k}": v for k, v in start.items()}, "started": torch.tensor(True)}


# By NumPy -------------------------------------------------------------------------------------------------------------


def arrays(model: Any) -> Arrays:
    return {k: v.double().numpy() for k, v in model.items()}


def loss_of(model: Arrays, shard: Shard) -> float:
    """Mean cross-entropy on the validation examples."""
    x = shard.val.x.numpy().astype(float).reshape(len(shard.val), -1) / 255
    return float(losses(scores([model[f"net.{name}"] for name in NAMES], x), shard.val.y.numpy()).mean())


def usefulness(start: Arrays, model: Arrays, shard: Shard) -> float:
    distance = np.sqrt(sum(((model[k] - start[k]) ** 2).sum() for k in start))
    return (loss_of(start, shard) - loss_of(model, shard)) / distance if distance else 0.0


@pytest.mark.parametrize("baseline", ["previous", "own"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_update(baseline: str, seed: int) -> None:
    w = fomo(partial(FedFomo, baseline=baseline))
    module, shard, initial = w.factory.build(), w.inline().host.shards[1], w.federation.initial
    by_loss = sorted((noisy(initial, 100 * seed + n, 1.0) for n in range(6)), key=lambda m: loss_of(arrays(m), shard))
    worst, start, trained, good, better, best = by_loss[::-1]
    if baseline == "own":
        start, trained = trained, start
    module.load_state_dict(began(trained, start))
    models = {0: good, 2: worst, 3: best, 5: better}
    mixed = weighed(module, shard, models)
    base = arrays(start if baseline == "previous" else trained)
    all_models = {**models, 1: trained}
    u = {n: usefulness(base, arrays(m), shard) for n, m in all_models.items()}
    positive = {n: max(0.0, v) for n, v in u.items()}
    total = sum(positive.values())
    assert {n for n, v in positive.items() if v} == ({0, 1, 3, 5} if baseline == "previous" else {0, 3, 5})
    for key, value in mixed.items():
        expected = base[key] + sum(positive[n] / total * (arrays(m)[key] - base[key]) for n, m in all_models.items())
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(module.state_dict()[f"previous.{key}"], value), "local training begins here"
    numbers = module.reply(shard).numbers
    assert set(numbers) == {f"usefulness/{n}" for n in models}
    for n in models:
        assert numbers[f"usefulness/{n}"] == pytest.approx(u[n], rel=1e-4, abs=1e-6)


def setting(baseline: str = "previous") -> tuple[FedFomo, Shard, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A client whose last training made its model better; and a much worse model."""
    w = fomo(partial(FedFomo, baseline=baseline))
    executor = w.inline()
    rounds(executor, 1, 4)
    module, shard = executor.host.module, executor.host.shards[1]
    models = sorted((noisy(own(module), n, 1.0) for n in range(20)), key=lambda m: loss_of(arrays(m), shard))
    best, middle, worst = models[0], models[5], models[-1]
    module.load_state_dict(began(best, middle))
    module.clear_anchors()
    return module, shard, best, worst


@pytest.mark.parametrize("baseline", ["previous", "own"])
def test_candidates_that_do_not_help_leave_the_client_its_own(baseline: str) -> None:
    module, shard, trained, bad = setting(baseline)
    found = weighed(module, shard, {0: bad, 2: bad})
    assert all(torch.allclose(v, trained[k], atol=1e-6) for k, v in found.items())
    assert all(value < 0 for value in module.reply(shard).numbers.values())


def test_where_training_did_not_help_either_the_client_goes_back() -> None:
    module, shard, trained, bad = setting()
    module.load_state_dict(began(bad, trained))
    assert same({0: weighed(module, shard, {0: bad})}, {0: trained})


def test_without_candidates_the_client_keeps_its_model() -> None:
    module, shard, _, bad = setting()
    module.load_state_dict({**module.state_dict(), **bad})
    assert same({0: weighed(module, shard, {})}, {0: bad})
    assert not module.reply(shard).numbers


def test_models_that_have_diverged_and_equal_ones_have_no_weight() -> None:
    module, shard, trained, _ = setting("own")
    broken = {k: torch.full_like(v, float("nan")) for k, v in trained.items()}
    huge = {k: torch.full_like(v, 1e30) for k, v in trained.items()}
    assert same({0: weighed(module, shard, {0: broken, 2: trained, 3: huge})}, {0: trained})
    assert set(module.reply(shard).numbers.values()) == {0.0}


@pytest.mark.parametrize("baseline", ["previous", "own"])
def test_previous_is_where_the_last_local_training_began(baseline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over rounds: not what came out of it. The next round's candidates are compared with it."""
    begun: dict[int, dict[str, torch.Tensor]] = {}
    real = client_host.train

    def watched(module: FedFomo, examples: Any, order: Any, work: float, steps: Any) -> Any:
        begun[next(i for i, s in executor.host.shards.items() if s.train is examples)] = own(module)
        return real(module, examples, order, work, steps)

    monkeypatch.setattr(client_host, "train", watched)
    w = fomo(partial(FedFomo, baseline=baseline), models=10, training=Training(lr=0.2, batch_size=4))
    executor = w.inline()
    rounds(executor, 2, 4)
    for client, state in states(executor).items():
        for key, value in begun[client].items():
            assert torch.equal(state[f"previous.{key}"], value) and not torch.equal(state[key], value)
    before, sent = states(executor)[1], executor.send([1])
    (handle,) = executor.run(TrainTask(3), sent).uplinks
    (up,) = executor.uplinks(handle)
    start = began_at(before, "previous.") if baseline == "previous" else began_at(before, "")
    shard, offered = executor.host.shards[1], candidates(executor.downlink(sent.downlinks[1]))
    assert len(up.numbers) == len(offered) == 3
    for n, model in offered.items():
        expected = usefulness(start, arrays(model), shard)
        assert up.numbers[f"usefulness/{n}"] == pytest.approx(expected, rel=1e-3, abs=1e-6)


def began_at(state: dict[str, torch.Tensor], prefix: str) -> Arrays:
    start = f"{prefix}net."
    return arrays({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(start)})


def noisily_normed(shape: tuple[int, ...], classes: int) -> Net:
    """A net that gives something else while it trains."""
    net = normed(shape, classes)
    net.body.append(torch.nn.Dropout(0.5))  # type: ignore[operator]
    return net


def test_distances_are_over_parameters_alone() -> None:
    """Running statistics change a candidate's loss, but not how far away it is."""
    w = world(partial(FedFomo, baseline="own"), Server(), model=noisily_normed)
    executor = w.inline()
    module, shard = executor.host.module, executor.host.shards[1]
    start = {k: v for k, v in own(module).items() if k in w.federation.initial}
    far = {k: v + 0.1 if k in module.shared_parameters() else v + 3.0 for k, v in start.items()}
    assert any(torch.equal(far[k], v + 3.0) for k, v in start.items())
    found_losses = []
    for model in (start, far):
        module.load_state_dict({**module.state_dict(), **model})
        x, y = shard.val.batch(slice(None))
        found_losses.append(float(torch.nn.functional.cross_entropy(module.net.eval()(x), y).detach()))
    module.load_state_dict({**module.state_dict(), **start})
    module.train()  # losses are those in evaluation mode all the same
    weighed(module, shard, {0: far})
    distance = 0.1 * np.sqrt(sum(start[k].numel() for k in module.shared_parameters()))
    found = module.reply(shard).numbers["usefulness/0"]
    assert found == pytest.approx((found_losses[0] - found_losses[1]) / distance, rel=1e-4)


@pytest.mark.parametrize("buffers", ["aggregate", "local", "recalibrate"])
def test_running_statistics(buffers: Any) -> None:
    """Aggregated: mixed with the weights of their model. Local: the client's own. Recalibrated: measured anew."""
    model = partial(Cnn, channels=[2], kernel=3, hidden=4, norm="batch")
    w = fomo(partial(FedFomo, baseline="own"), model=model, training=Training(lr=0.1, batch_size=4, buffers=buffers))
    executor = w.inline()
    rounds(executor, 2, 4)
    module, shard = executor.host.module, executor.host.shards[0]
    stats = [k for k in own(module) if "running" in k]
    weights = {k: v for k, v in own(module).items() if k in module.shared_parameters()}

    def request(values: Any) -> float:
        module.load_state_dict({**module.state_dict(), **values})
        if buffers == "recalibrate":
            module.recalibrate(shard.train)
        return mean_loss(module.net, shard.val)

    better, worse = sorted(({**own(module), **noisy(weights, n, 1.0)} for n in range(2)), key=request)
    sent = {k: v + 0.01 * ("running_mean" in k) for k, v in better.items() if k in w.federation.initial}
    assert any(k in sent for k in stats) == (buffers == "aggregate")
    module.load_state_dict({**module.state_dict(), **worse})
    mixed = weighed(module, shard, {1: sent})
    assert all(torch.allclose(mixed[k], v, atol=1e-5) for k, v in sent.items())
    if buffers == "local":
        assert all(torch.equal(mixed[k], worse[k]) for k in stats)
    if buffers == "recalibrate":
        module.recalibrate(shard.train)
        assert all(torch.allclose(own(module)[k], mixed[k], atol=1e-6) for k in stats)


def test_validation_loss_takes_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    module, shard, trained, _ = setting()
    whole = mean_loss(module.net, shard.train)
    with monkeypatch.context() as some:
        some.setitem(FORWARD_BATCH, "cpu", 3)
        assert mean_loss(module.net, shard.train) == pytest.approx(whole, rel=1e-5)
    assert mean_loss(module.net, shard.val) == pytest.approx(loss_of(arrays(trained), shard), rel=1e-5)


# The server -----------------------------------------------------------------------------------------------------------


def server(affinity: Any = None, n: int = 6, done: int = 100, **rule: Any) -> tuple[Server, State]:
    made = Server(**rule)
    p = torch.zeros(n, n, dtype=torch.float64) if affinity is None else torch.tensor(affinity, dtype=torch.float64)
    return made, State({i: {"w": torch.tensor([float(i)])} for i in range(n)}, p, done, 0)


def test_the_best_by_affinity_are_sent() -> None:
    p = np.zeros((6, 6))
    p[2] = [0.5, -1, 9, 0.7, 0.1, 0.6]
    rule, state = server(p, models=3)
    assert rule.choose(state, 2) == [0, 3, 5]
    assert set(candidates(rule.downlink(state, 2))) == {0, 3, 5}
    later = [rule.choose(replace(state, rounds=r), 2) for r in range(101, 120)]
    assert later == [[0, 3, 5]] * 19, "no exploration left"


def test_exploration_decays() -> None:
    """With ε_t = max(0, ε − d·t) a place goes to a random other one; measured over many clients' worth of draws."""
    p = np.zeros((50, 50))
    p[:, 7] = 1.0
    rule, state = server(p, n=50, models=1, epsilon=0.8, epsilon_decay=0.1)
    for done, epsilon in ((0, 0.8), (4, 0.4), (8, 0.0), (20, 0.0)):
        now = [replace(state, rounds=done, seed=s) for s in range(20)]
        best = np.mean([rule.choose(s, c) == [7] for s in now for c in range(50) if c != 7])
        assert best == pytest.approx(1 - epsilon * 48 / 49, abs=0.05)


def test_ties_are_broken_at_random_and_a_choice_is_a_function_of_state_and_client() -> None:
    rule, state = server(models=2, epsilon=0.0)
    chosen = {tuple(rule.choose(replace(state, rounds=r), 0)) for r in range(60)}
    assert chosen == {(a, b) for a in range(1, 6) for b in range(a + 1, 6)}
    assert all(rule.choose(state, c) == rule.choose(state, c) for c in range(6))


def test_a_newcomer_is_sent_candidates_at_random() -> None:
    p = np.zeros((6, 6))
    p[:, 0] = 10
    rule, state = server(p, models=2)
    found = [set(candidates(rule.join(replace(state, rounds=r), 6))) for r in range(100, 200)]
    assert all(len(f) == 2 for f in found) and set().union(*found) == set(range(6))
    assert 10 < sum(0 in f for f in found) < 60


def test_affinity_grows_by_what_clients_report() -> None:
    w = fomo(models=2)
    executor = w.inline()
    expected = np.eye(4)
    for t in range(1, 5):
        trained = executor.run(TrainTask(t), executor.send((0, 1, 3) if t % 2 else (0, 2, 3)))
        (handle,) = trained.uplinks
        for up in executor.uplinks(handle):
            for name, value in up.numbers.items():
                expected[up.client, int(name.removeprefix("usefulness/"))] += value
        executor.fuse(trained)
        np.testing.assert_array_equal(executor.server_numbers()["affinity"].numpy(), expected)
    assert (expected != np.eye(4)).any()


def test_the_last_model_of_every_client_that_has_reported_is_on_offer() -> None:
    w = fomo(models=10)
    executor = w.inline()
    play(executor, 1, [0, 2])
    first = states(executor)
    assert set(candidates(executor.server.downlinks([3])[3])) == {0, 2}
    play(executor, 2, [1, 2])
    second = states(executor)
    found = candidates(executor.server.downlinks([3])[3])
    assert set(found) == {0, 1, 2}
    for n, source in ((0, first), (1, second), (2, second)):
        assert all(torch.equal(v, source[n][k]) for k, v in found[n].items())


def test_a_client_that_first_takes_part_late_starts_from_its_own_model() -> None:
    """Also where what is private starts differently on every client: what it was before training is its model."""
    w = world(FedFomo, Server(models=10), init="per_client")
    executor = w.inline()
    play(executor, 1, [0, 2])
    module, shard = executor.host.module, executor.host.shards[1]
    module.load_state_dict(dict(executor.host.states[1]))
    assert all(torch.equal(v, w.federation.initial[k]) for k, v in own(module).items())  # type: ignore[arg-type]
    models = candidates(executor.server.downlinks([1])[1])
    weighed(module, shard, models)
    base = arrays(w.federation.initial)
    for n, value in models.items():
        found = module.reply(shard).numbers[f"usefulness/{n}"]
        assert found == pytest.approx(usefulness(base, arrays(value), shard), rel=1e-4, abs=1e-6)


# What is refused ------------------------------------------------------------------------------------------------------


def test_clients_without_validation_examples_are_refused() -> None:
    w = fomo()
    module, none = w.factory.build(), np.arange(0)
    check_validation("fedfomo", module, w.partition)
    without = replace(w.partition, val=(*w.partition.val[:2], none, w.partition.val[3]))
    with pytest.raises(SettingsError, match=r"fedfomo needs validation .* client 2 .*1 of 4.*split.validation"):
        check_validation("fedfomo", module, without)
    check_validation("local", world(Local, LocalServer()).factory.build(), without)
