"""Actors on GPUs, all of which are pretended here: what they ask for, what they are shown, and on what they work."""

import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from support import rounds, same, settings_of, states, world

from lightning_modules import prepare
from lightning_modules.base import Batch, Terms
from lightning_modules.hosts import devices
from lightning_modules.hosts.client_host import ClientHost
from lightning_modules.hosts.devices import claim_device, with_server_device
from lightning_modules.methods.fedavg import FedAvg
from pflsim.config.settings import Placement
from pflsim.engine.execution import TrainTask
from pflsim.errors import ClientError, RunError, SettingsError
from pflsim.messages import Message
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from ray_actors.client_actor import ClientActor, Setup
from ray_actors.executor import RayExecutor
from ray_actors.layout import Node, lay_out
from ray_actors.resources import ActorPool

GIB = 2**30


@pytest.mark.slow
@pytest.mark.parametrize("per_gpu", [1, 3])
def test_actors_share_gpus_evenly_and_compute_the_same(per_gpu: int, pool: ActorPool) -> None:
    """Two pretended GPUs; every actor is shown one of them, and has its share of the memory."""
    layout = lay_out([1] * 6, Placement(gpus=2, actors_per_gpu=per_gpu, device="cpu"), [Node("here", 8, 2, 1e6)])
    w = world(FedAvg, FedAvgServer(), sizes=(5, 8, 9, 6, 7, 8))
    executor = RayExecutor(w, layout, pool)
    executor.start()
    shown = ray.get([actor.__ray_call__.remote(lambda _: ray.get_gpu_ids()) for actor in executor.actors])
    shares = ray.get([actor.__ray_call__.remote(lambda self: self.host.factory.gpu_share) for actor in executor.actors])
    assert Counter(ids[0] for ids in shown) == {0: per_gpu, 1: per_gpu} and all(len(ids) == 1 for ids in shown)
    assert set(shares) == {layout.gpus} == {int(10_000 / per_gpu) / 10_000}
    inline = w.inline()
    for e in (executor, inline):
        rounds(e, 2, 6)
    assert same(states(executor), states(inline))
    with pytest.raises(RunError, match="client actor 0 cannot start"):  # there is no silent way back to the CPU
        RayExecutor(replace(w, factory=replace(w.factory, device="cuda:0")), layout, pool).start()


@pytest.mark.slow
def test_a_package_that_the_workers_lack(pool: ActorPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "only_here", module := ModuleType("only_here"))
    lacking = type("Client", (FedAvg,), {"__module__": "only_here"})
    monkeypatch.setattr(module, "Client", lacking, raising=False)
    w, layout = world(FedAvg, FedAvgServer(), sizes=(5,)), lay_out([1], Placement(), [Node("here", 8, 2, 1e6)])
    with pytest.raises(RunError, match="client actor 0 cannot start: .*No module named 'only_here'$"):
        RayExecutor(replace(w, factory=replace(w.factory, client=lacking)), layout, pool).start()


# A share of the memory


def test_a_host_takes_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[float, torch.device]] = []
    fake = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(total_memory=10 * GIB),
        set_per_process_memory_fraction=lambda part, device: held.append((part, device)),
        reset_peak_memory_stats=lambda device: None,
    )
    monkeypatch.setattr(devices.torch, "cuda", fake)
    assert claim_device("cuda:0", 0.5) == torch.device("cuda:0")
    assert held == [(pytest.approx(0.5 - 500 / 10240), torch.device("cuda:0"))]
    assert claim_device("cuda:0", 1.0) and held[1][0] == 1.0
    assert claim_device("cpu", 0.5) == torch.device("cpu") and len(held) == 2
    with pytest.raises(RuntimeError, match=r"10\.0 GiB .*placement\.actors_per_gpu"):
        claim_device("cuda:0", 0.04)


FULL = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.2 GiB is free. "
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)


class Greedy(FedAvg):
    """Takes more than there is."""

    def objective(self, batch: Batch) -> Terms:
        raise torch.cuda.OutOfMemoryError(FULL)


def test_out_of_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(Greedy, FedAvgServer())
    home = ClientHost(made.factory, made.dataset, made.partition, [1])
    with pytest.raises(ClientError, match="^client 1 .*round 1 .*2.50 GiB.*placement.actors_per_gpu") as caught:
        home.run(TrainTask(1), {1: Message(weights=made.federation.initial)})
    assert "PYTORCH" not in str(caught.value)

    def full(*parts: Any) -> None:
        raise torch.cuda.OutOfMemoryError(FULL)

    monkeypatch.setattr("lightning_modules.hosts.client_host.ClientHost", full)
    monkeypatch.setattr("ray_actors.client_actor.process_name", lambda: "here")
    monkeypatch.setattr(Setup, "get", lambda self: [made.factory, made.dataset, made.partition])
    with pytest.raises(RuntimeError, match="placement.actors_per_gpu"):
        ClientActor().prepare(Setup((), (), (1,)))


# Devices


asked = partial(settings_of, "data=digits", "clients=4", "rounds=2", "model.hidden=[8]")


@pytest.mark.parametrize(
    ("overrides", "seen", "device"),
    [
        ((), 1, "cpu"),
        (("placement.gpus=1",), 1, "cuda"),
        (("placement.gpus=1",), 0, "cpu"),  # the driver's node may have none
        (("placement.gpus=1", "placement.server_device=cpu"), 1, "cpu"),
        (("placement.server_device=cuda",), 1, "cuda"),
    ],
)
def test_the_device_of_the_server(overrides: tuple[str, ...], seen: int, device: str, monkeypatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: seen)
    assert with_server_device(asked(*overrides)).placement.server_device == device


def test_a_gpu_for_the_server_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    with pytest.raises(SettingsError, match=r"placement.server_device=cuda"):
        with_server_device(asked("placement.server_device=cuda"))


def test_more_gpus_than_torch_sees_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 1)
    with pytest.raises(SettingsError, match="placement.gpus=2, but torch sees 1 on this machine"):
        prepare.prepare(asked("placement.gpus=2"))
    assert prepare.prepare(asked("placement.gpus=2", "executor=inline")).factory.device == "cuda:0"
    assert prepare.prepare(asked("placement.gpus=2", "ray_address=auto")).factory.device == "cuda:0"
    assert prepare.prepare(asked("placement.gpus=2", "placement.device=cpu")).factory.device == "cpu"
