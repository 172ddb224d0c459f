"""Uplinks that pass a transform: what arrives, what a client keeps, and which methods refuse it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import METHODS, inline, prepared, refusing, same, slow_except

import pflsim
from lightning_modules.contract import checks
from lightning_modules.contract.command import maker
from pflsim.config.compose import CONFIGS
from pflsim.config.validate import Share
from pflsim.engine.execution import ReplyTask, Sent, TrainTask
from pflsim.messages import payload_bytes
from pflsim.records.trace import tensors_of
from pflsim.transforms.base import Sender, Size, Transform
from pflsim.types import Tensors

REFUSED = {
    *("fedas", "fedcac", "fedfcd", "fedfomo", "fedgh", "fedpac", "fedproto", "fedselect", "fedtgp", "heurpfedla"),
    *("fd", "ifca", "l2gd", "pfedfda", "pfedpm", "r_pfedpm", "scaffold"),
}
"""Methods whose clients send other content than weights that they have received."""
SMALL = ["data=digits", "clients=4", "batch_size=50", "model.hidden=[8]"]
LORA = {"fedsa_lora", "ffa_lora"}


@pytest.mark.parametrize("method", slow_except({"ditto", "fedas", "fedproto", "l2gd", "scaffold"}, METHODS))
def test_a_method_takes_a_transform_or_refuses_it_before_round_1(method: str) -> None:
    adapters = ["lora={r: 2}"] if method in LORA else []
    if method in REFUSED:
        with refusing(f"method={method}", "uplink"):
            prepared(f"method={method}", *SMALL, *adapters, "uplink=topk")
    else:
        prepared(f"method={method}", *SMALL, *adapters, "uplink=topk")


@pytest.mark.parametrize("lockstep", ["true", "false"])
@pytest.mark.parametrize("method", ["ditto", "fedper"])
def test_the_server_gets_what_was_sent_and_the_client_keeps_the_rest(method: str, lockstep: str) -> None:
    """In float64, of a model with running statistics, which are sent as they are."""
    settings = [f"method={method}", f"lockstep={lockstep}", "lockstep_clients=2"][: 3 if lockstep == "true" else 2]
    made = prepared(*SMALL[:3], *checks.BATCH_NORM, *settings, "uplink=topk", "uplink.share=0.1")
    plain = inline(prepared(*SMALL[:3], *checks.BATCH_NORM, *settings))
    executor, module = inline(made), made.factory.build()
    names, statistics = module.shared_parameters(), module.shared_buffers()
    down: Any = executor.send([0, 2]).downlinks
    trained, raw = (each.run(TrainTask(1), each.send([0, 2])) for each in (executor, plain))
    for report, up, whole in zip(trained.reports, trained.uplinks[0], raw.uplinks[0], strict=True):
        state: Any = trained.states[up.client]
        known = down[up.client].weights
        for name in names:
            left, change = state[f"uplink_memory.{name.replace('.', '/')}"], whole.weights[name] - known[name]
            assert torch.allclose(up.weights[name] - known[name] + left, change.double(), atol=1e-6)
            assert ((left == 0) | (up.weights[name] == known[name])).all()
        moved = sum(int((up.weights[name] != known[name]).sum()) for name in names)
        total = sum(known[name].numel() for name in names)
        k = -(-total // 10)
        assert 0 < moved <= k and statistics
        assert all(torch.equal(up.weights[name], whole.weights[name]) for name in statistics)
        raw_bytes = sum(whole.weights[name].nbytes for name in statistics)
        assert report.up_bytes == payload_bytes(up) == 4 * k + min(4 * k, -(-total // 8)) + raw_bytes


def test_replies_outside_of_training_are_not_transformed() -> None:
    executors = [inline(prepared("method=feddbe", *SMALL, uplink)) for uplink in ("uplink=none", "uplink=sign")]
    task, clients = ReplyTask(), Sent.nothing(range(4))
    found = [[tensors_of(up) for up in each.run(task, clients).uplinks[0]] for each in executors]
    assert same(*[dict(enumerate(some)) for some in found])


@pytest.mark.parametrize("uplink", ["chain", "random_k"])
@pytest.mark.parametrize(
    "check",
    [checks.absent_clients_keep_their_state, checks.resumed_equals_straight, checks.clients_are_independent,
     checks.evaluation_changes_nothing, checks.newcomers_join, checks.only_shared_tensors_are_sent],
)  # fmt: skip
def test_the_contract_holds_with_a_transform(check: Callable[[checks.Make], None], uplink: str) -> None:
    check(partial(maker("ditto", [f"uplink={uplink}"], [CONFIGS])))


class Half(Transform):
    """Sends the first share of every tensor."""

    def __init__(self, *, share: Share = 0.5, feedback: bool = True):
        super().__init__(feedback=feedback)
        self.share = share

    def encode(self, change: Tensors, sender: Sender, size: Size) -> tuple[Tensors, Size]:
        first = {k: torch.arange(v.numel()).view(v.shape) < self.share * v.numel() for k, v in change.items()}
        return {k: v.where(first[k], 0.0) for k, v in change.items()}, Size(sum(int(v.sum()) for v in first.values()))


def broken(change: Tensors, sender: Sender, size: Size) -> Any:
    return {name: value[:2] for name, value in change.items()}, size


def test_a_transform_of_ones_own(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"data": "digits", "method": "fedavg", "clients": 3, "rounds": 2, "executor": "inline"}
    run = pflsim.run(**settings, progress="none", uplink={"name": Half, "share": 0.1}, trace={"rounds": [2]})
    sizes = [4 * (640 + 10 + 100 + 1) * 3] * 2
    assert [line.traffic.up_bytes for line in run.history] == sizes and run.config["uplink"]["share"] == 0.1
    assert len(pflsim.load_model(run, 0).client.state_dict()) == 4
    plain = pflsim.run(**settings, progress="none")
    lines = repr(pflsim.compare([run, plain]))
    assert "uplink=Half" in lines and "uplink=none" in lines
    monkeypatch.setattr(Half, "encode", staticmethod(broken))
    with refusing("uplink=Half"):
        pflsim.run(**settings, progress="none", uplink=Half)
