"""Server optimisers in runs: where they step, what they leave, their names, and who refuses them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from support import METHODS, World, normed, prepared, refusing, same, states, uplinks_of, world

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.feddbe import FedDBE
from lightning_modules.training import Training
from pflsim.config.components import resolve
from pflsim.config.compose import CONFIGS
from pflsim.engine.execution import ReplyTask, Sent, TrainTask
from pflsim.fusion import ServerOptimizer
from pflsim.servers.base import MeanRule
from pflsim.servers.fedavg import FedAvg as Server
from pflsim.servers.feddbe import FedDBE as FedDBEServer

COHORTS = ((0, 1, 2, 3), (0, 2), (1, 2, 3))
STATISTICS = {"net.body.2.running_mean", "net.body.2.running_var"}


def optimised(client: Any = FedAvg, rule: MeanRule[Any] | None = None, **settings: Any) -> World:
    made = world(client, rule or Server(), model=normed, training=Training(lr=0.2, batch_size=5))
    made.rule.optimizer = ServerOptimizer(**settings)  # type: ignore[attr-defined]
    made.rule.parameters = made.factory.build().shared_parameters()  # type: ignore[attr-defined]
    return made


def run_round(executor: InlineExecutor, t: int, cohort: Any) -> dict[str, np.ndarray]:
    """Run a round; return the mean of what the clients have sent, in float64."""
    trained = executor.run(TrainTask(t), executor.send(cohort))
    ups = uplinks_of(executor, trained).values()
    shares = np.array([up.num_examples for up in ups]) / sum(up.num_examples for up in ups)
    keys = executor.server.state.weights
    means = {k: sum(p * u.weights[k].double().numpy() for p, u in zip(shares, ups, strict=True)) for k in keys}
    executor.fuse(trained)
    return means


def test_rounds_of_fedadam_by_numpy() -> None:
    """x ← x + η·m/(√v + τ) of the parameters, with the correction of the bias; running statistics are the mean."""
    executor = optimised(name="fedadam", lr=0.05, beta1=0.8, beta2=0.9, tau=0.01, bias_correction=True).inline()
    m, v = ({k: np.zeros(w.shape) for k, w in executor.server.state.weights.items()} for _ in range(2))
    for t, cohort in enumerate(COHORTS, 1):
        x = {k: w.double().numpy() for k, w in executor.server.state.weights.items()}
        means, found = run_round(executor, t, cohort), executor.server.state.weights
        assert {*STATISTICS} < {*found}
        rate = 0.05 * np.sqrt(1 - 0.9**t) / (1 - 0.8**t)
        for key, mean in means.items():
            change = mean - x[key]
            m[key], v[key] = 0.8 * m[key] + 0.2 * change, 0.9 * v[key] + 0.1 * change**2
            step = change if key in STATISTICS else rate * m[key] / (np.sqrt(v[key]) + 0.01)
            np.testing.assert_allclose(found[key].numpy(), x[key] + step, rtol=1e-5, atol=1e-6)
    assert executor.server.state.moments.keys() == {*found} - STATISTICS and executor.server.state.steps == 3


def test_fedavgm_without_momentum_is_fedavg() -> None:
    one, other = optimised(name="fedavgm", beta1=0.0).inline(), optimised().inline()
    for t, cohort in enumerate(COHORTS, 1):
        for executor in (one, other):
            run_round(executor, t, cohort)
        assert same({0: one.server.state.weights}, {0: other.server.state.weights})
    assert same(states(one), states(other)) and one.server.state.moments and not other.server.state.moments


def test_a_round_without_a_mean_takes_no_step() -> None:
    """Without uplinks, and in an initial round."""
    executor = optimised(name="fedadam").inline()
    run_round(executor, 1, (0, 1))
    before = executor.server.state
    executor.server.fuse([])
    assert executor.server.state is before
    opening = optimised(FedDBE, FedDBEServer(), name="fedadam").inline()
    opening.fuse(opening.run(ReplyTask(), Sent.nothing(range(4))))
    assert opening.server.state.extra and not opening.server.state.moments
    run_round(opening, 1, (0, 1))
    assert opening.server.state.extra and opening.server.state.moments and opening.server.state.steps == 1


TAKE_A_MEAN = {
    *("apfl", "ditto", "fedala", "fedas", "fedavg", "fedbabu", "fedbn", "fedcp", "feddbe", "feddecomp", "fedem"),
    *("fedmrl", "fedper", "fedphp", "fedprox", "fedrep", "fedrod", "fedselect", "fml", "gpfl", "knn_per"),
    *("lg_fedavg", "moon", "per_fedavg", "pfedme", "scaffold"),
}
NAMES = ("fedadagrad", "fedadam", "fedavgm", "fedyogi")


def test_methods_without_a_mean_refuse_them() -> None:
    nodes = {method: yaml.safe_load((CONFIGS / "method" / f"{method}.yaml").read_text()) for method in METHODS}
    rules: dict[str, Any] = {method: resolve(node["server"]["_target_"]) for method, node in nodes.items()}
    assert {method for method, rule in rules.items() if issubclass(rule, MeanRule)} == {"fedavg", *NAMES, *TAKE_A_MEAN}
    with refusing("method=local ", "server_optimizer=fedyogi"):
        prepared("method=local", "server_optimizer=fedyogi")
    made = prepared("method=ditto", "server_optimizer=fedyogi")
    assert made.meta.method == "ditto+fedyogi"
    assert made.rule.optimizer.name == "fedyogi" and made.rule.parameters  # type: ignore[attr-defined]
    guide = (Path(__file__).parents[2] / "docs/guide.md").read_text("utf-8").partition("take one:")[2]
    assert {*re.findall(r"`(\w+)`", guide.partition("Others refuse it")[0])} == TAKE_A_MEAN | {
        "fedavg",
        "feddpa_lora",
        "fedsa_lora",
        "ffa_lora",
    }
