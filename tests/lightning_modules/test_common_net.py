"""The common net of a method: where it comes from, what it shares, and what a newcomer does with it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ALL, BATCH_NORM, check_loaded, normed, play, prepared, refusing, run_cohorts, same, states, world
from torch import Tensor, nn

import pflsim
from lightning_modules.base import Batch, Terms
from lightning_modules.common_net import CommonNet
from lightning_modules.contract.checks import inline
from lightning_modules.nets.mlp import Mlp
from lightning_modules.nets.net import Net, choose_memory_format
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.settings import Eval, Settings
from pflsim.params import Selector
from pflsim.records.evaluation import Scope
from pflsim.servers.fedavg import FedAvg as FedAvgServer

SMALL = ("data=digits", "clients=4", "rounds=2", "batch_size=50", "model.hidden=[8]")
NARROW = "model.common={hidden: [3]}"


class Beside(CommonNet):
    """Trains both nets by cross-entropy, each alone."""

    lockstep = True

    def schedule(self) -> Schedule:
        """Return one phase for both."""
        return (Phase(trainable=Selector(("net", "common"))),)

    def objective(self, batch: Batch) -> Terms:
        """Return both losses."""
        inputs, labels = batch
        return {"ce": self.task_loss(self.net(inputs), labels), "common": self.task_loss(self.common(inputs), labels)}


def part(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


def test_the_common_net_is_equal_for_all_variants_and_clients_and_no_copy() -> None:
    """Also with `init=per_client`; and the client's own net is what it is without a common one."""
    shapes = "model.variants=[{hidden: [7, 5]}, {hidden: [5]}, {}]"
    made, plain = (prepared(*SMALL, "init=per_client", shapes, method=method) for method in (Beside, "local"))
    found, without = (states(inline(each)) for each in (made, plain))
    assert same({c: part(found[c], "net") for c in ALL}, {c: part(without[c], "net") for c in ALL})
    common = {c: part(found[c], "common") for c in ALL}
    assert same(common, dict.fromkeys(ALL, common[0])) and common[0]["body.fc1.weight"].shape == (8, 64)
    own = part(found[2], "net")  # of the same shapes
    assert own.keys() == common[2].keys() and not any(torch.equal(own[key], common[2][key]) for key in own)
    module = made.factory.build(2)  # of the common initial values
    for other in (
        module.net,
        made.factory.build(2, 3).net,
        prepared(*SMALL, "seed=1", method=Beside).factory.build().common,
    ):
        assert not torch.equal(other.get_parameter("body.fc1.weight"), module.common.get_parameter("body.fc1.weight"))
    assert torch.equal(made.factory.build(1, 3).common.head.weight, module.common.head.weight)


@pytest.mark.parametrize("lockstep", ["lockstep=false", "lockstep=true"])
def test_rounds_of_several_architectures(lockstep: str) -> None:
    """The common net is averaged, and is all that travels."""
    executor = inline(prepared(*SMALL, "model.variants=[{hidden: [7, 5]}, {}]", NARROW, lockstep, method=Beside))
    _, sent = play(executor, 1)
    sizes = {client: executor.host.shards[client].num_examples for client in ALL}
    for key, value in executor.server.state.weights.items():
        mean = sum(sent[c].weights[key].double() * sizes[c] for c in ALL) / sum(sizes.values())
        assert key.startswith("common.") and torch.allclose(value.double(), mean, atol=1e-7)
    assert executor.server.state.weights["common.body.fc1.weight"].shape == (3, 64)
    assert all(up.weights.keys() == executor.server.state.weights.keys() for up in sent.values())


@pytest.mark.parametrize(
    ("common", "hidden"),
    [("{hidden: [3]}", [3]), ("{_target_: lightning_modules.nets.mlp.Mlp, hidden: [4]}", [4]), ("{}", [8])],
)
def test_its_architecture(common: str, hidden: list[int]) -> None:
    made = prepared(*SMALL, f"model.common={common}", method=Beside)
    (make,) = made.factory.common
    assert made.factory.build().common.feature_width == hidden[-1] and make.keywords["hidden"] == hidden
    without = prepared(*SMALL, f"model.common={common}", "method=fedavg")  # as one run of a sweep over methods
    said = [warning for warning in without.warnings if "model.common" in warning]
    assert not without.factory.common and len(said) == (common != "{}")
    assert not [warning for warning in made.warnings if "model.common" in warning]


def test_what_is_refused() -> None:
    with refusing("model.common: model.hiden", "model.hidden?"):
        prepared(*SMALL, "model.common={hiden: [3]}", method=Beside)
    with refusing("model.common=3"):
        prepared(*SMALL, "model.common=3", method=Beside)
    with refusing("method.common"):  # filled in, and no setting
        prepared(*SMALL, method={"name": Beside, "common": 3})


def test_adapters_and_frozen_layers_are_those_of_the_own_net() -> None:
    module = prepared(*SMALL, "freeze=[body]", method=Beside).factory.build()
    assert [*dict(module.net.named_parameters())] == ["head.weight", "head.bias"]
    assert len([*module.common.parameters()]) == 4


class Half(Mlp):
    """A net whose first layer is fixed."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, hidden: list[int]):
        super().__init__(input_shape, num_classes, hidden=hidden)
        self.body[1].requires_grad_(False)  # type: ignore[index]


def test_what_a_model_fixes_stays_fixed_in_the_common_net() -> None:
    executor = inline(prepared(*SMALL[:4], "executor=inline", method=Beside, model={"name": Half, "hidden": [8]}))
    common: Any = executor.host.module.common
    fixed = common.body[1].weight.clone()
    _, sent = play(executor, 1)
    assert torch.equal(common.body[1].weight, fixed) and "common.body.fc1.weight" not in sent[0].weights
    assert "common.head.weight" in sent[0].weights


def common_world(**more: Any) -> Any:
    return world(Beside, FedAvgServer(), **{"common": (partial(Mlp, hidden=[5]),), **more})


@pytest.mark.parametrize("hidden", [[5], [4]])
def test_a_newcomer_starts_with_the_common_net_if_it_fits(hidden: list[int]) -> None:
    made = common_world(common=(partial(Mlp, hidden=hidden),))
    executor = run_cohorts(made, ((0, 1), (0, 1)))
    module = made.factory.build()
    initial = {key: value.clone() for key, value in part(module.state_dict(), "net").items()}
    module.join(executor.server.downlinks([3], joining=True)[3])
    own, common = part(module.state_dict(), "net"), part(module.state_dict(), "common")
    expected = common if hidden == [5] else initial
    assert all(torch.equal(own[key], expected[key]) for key in own)
    assert not all(torch.equal(own[key], initial[key]) for key in own) or hidden == [4]
    message = executor.server.downlinks([3])[3]
    assert [module.replaces_body(message) for _ in range(2)] == [hidden == [5], False]  # its statistics are measured


def test_statistics_of_both_nets_are_measured_again() -> None:
    """Before the global model predicts, those of the common net alone."""
    made = common_world(model=BATCH_NORM, common=(normed,), training=Training(batch_size=4, buffers="recalibrate"))
    executor = made.inline()
    module, shard = executor.host.module, executor.host.shards[0]

    def means() -> list[Tensor]:
        found = {name: value.clone() for name, value in module.named_buffers() if name.endswith("running_mean")}
        return [next(value for name, value in found.items() if name.startswith(net)) for net in ("net.", "common.")]

    before = means()
    module.recalibrate(shard.train, "global")
    after = means()
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    inputs = shard.train.batch(slice(None))[0]
    torch.testing.assert_close(after[1], module.common.body[:2](inputs).mean(0))
    module.recalibrate(shard.train)
    assert not torch.equal(before[0], means()[0])


def test_batches_are_large_enough_for_the_common_net() -> None:
    assert common_world().factory.build().smallest_batch == 1
    assert common_world(common=(normed,)).factory.build().smallest_batch == 2


def test_training_settings_that_a_method_may_need() -> None:
    """The share of the clients that take part, and the number of clients with those that join later."""
    settings = Settings(clients=7, fraction=0.25, eval=Eval(holdout_clients=2))
    training = Training.of(settings)
    assert (training.fraction, training.clients) == (0.25, 7)


def test_its_convolutions_decide_the_memory_format() -> None:
    net = Net(nn.Conv2d(16, 8, 3), nn.Linear(8, 2), (8,), 2)
    strided = Net(nn.Conv2d(4, 8, 1, 2), nn.Linear(8, 2), (8,), 2)
    module = Beside(net, Training(), common=strided)
    choose_memory_format(module)
    assert net.get_parameter("body.weight").is_contiguous()


@pytest.mark.slow
def test_saved_models(tmp_path: Path) -> None:
    """The global model needs no client, whatever the architecture of the clients is."""
    shapes = ["model.variants=[{hidden: [7, 5]}, {hidden: [5]}]", NARROW]
    run = pflsim.run(overrides=[*SMALL, *shapes, "executor=inline", "progress=none"], method=Beside)
    check_loaded(run, 0, 1)
    check_loaded(run, 0, scope=Scope("global", "test", "received"), export=False)
    inputs = torch.rand(3, 1, 8, 8)
    alone = pflsim.load_model(run, model="global")
    assert torch.equal(alone(inputs), pflsim.load_model(run, 1, model="global")(inputs))
