"""Actors on GPUs, all of which are pretended here: what they ask for, what they are shown, and on what they work."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from fake_gpus import Shown
from support import rounds, same, states, world

from lightning_modules import prepare
from lightning_modules.base import Batch, Terms
from lightning_modules.hosts import devices, gpu
from lightning_modules.hosts.client_errors import in_words
from lightning_modules.hosts.client_host import ClientHost
from lightning_modules.hosts.devices import apply_cpu_fallback, with_cpus_only, with_server_device
from lightning_modules.hosts.failure_policy import FailurePolicy
from lightning_modules.hosts.gpu import claim_device, memory_fraction
from lightning_modules.methods.fedavg import FedAvg
from pflsim.config.compose import CONFIGS, composed, composing, to_settings
from pflsim.config.settings import Placement, Settings
from pflsim.engine.execution import TrainTask
from pflsim.errors import ClientError, SettingsError
from pflsim.messages import Message
from pflsim.records.checkpoint.read import newest_checkpoint
from pflsim.records.resume import changed, saved_settings
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from ray_actors import run
from ray_actors.executor import actor_group as actor_group
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.executor.client_actor import RemoteHost
from ray_actors.executor.ray_executor import RayExecutor
from ray_actors.placement.layout import Supply, lay_out

GIB = 2**30


@pytest.mark.slow
@pytest.mark.parametrize("per_gpu", [1, 2, 3, 7])
def test_as_many_actors_as_may_share_a_gpu_start_and_each_sees_one(per_gpu: int, pool: ActorPool) -> None:
    """On both at once, or one that does not fit on its GPU would start on the other."""
    pool.trim(())
    actors = 2 * per_gpu
    layout = lay_out([1] * actors, Placement(gpus=2, actors_per_gpu=per_gpu), Supply(cpus=8, gpus=2))
    made = [
        ray.remote(num_cpus=spec.cpus / 2, num_gpus=spec.gpus)(Shown).remote()  # CPUs that the others of Ray's leave
        for spec in layout.specs
    ]
    try:
        shown = ray.get([actor.gpus.remote() for actor in made], timeout=60)
    finally:
        for actor in made:
            ray.kill(actor)
    assert Counter(shown) == {"0": per_gpu, "1": per_gpu}


# A share of the memory


def test_what_tensors_may_take_of_a_share() -> None:
    """A quarter of 80 GiB is 20 GiB, and 500 MiB of them are CUDA's own."""
    assert memory_fraction(0.25, 80 * GIB) * 80 * GIB == pytest.approx(20 * GIB - 500 * 2**20)
    assert memory_fraction(1.0, 80 * GIB) == 1.0
    with pytest.raises(
        RuntimeError, match="0.02 of a GPU of 24.0 GiB is less than the 500 MiB .*lower placement.actors_p"
    ):
        memory_fraction(0.02, 24 * GIB)


def test_a_host_takes_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[float, torch.device]] = []
    fake = SimpleNamespace(
        is_available=lambda: True,
        get_device_properties=lambda device: SimpleNamespace(total_memory=10 * GIB),
        set_per_process_memory_fraction=lambda part, device: held.append((part, device)),
        reset_peak_memory_stats=lambda device: None,
    )
    monkeypatch.setattr(gpu.torch, "cuda", fake)
    assert claim_device("cuda:0", 0.5) == torch.device("cuda:0")
    assert held == [(pytest.approx(0.5 - 500 / 10240), torch.device("cuda:0"))]
    assert claim_device("cpu", 0.5) == torch.device("cpu") and len(held) == 1


def test_where_torch_sees_no_gpu_the_node_is_named() -> None:
    with pytest.raises(RuntimeError, match=rf"torch sees none on node {platform.node()} "):
        claim_device("cuda:0", 1.0)


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
    with pytest.raises(ClientError) as caught:
        home.run(TrainTask(1), {1: Message(weights=made.federation.initial)})
    assert str(caught.value).startswith(
        "client 1 failed in round 1 (local training): out of memory on the GPU (tried to allocate 2.50 GiB): lower "
        "placement.actors_per_gpu"
    )
    assert "PYTORCH" not in str(caught.value) and in_words(ValueError("no")) == "ValueError: no"

    def full(*parts: Any) -> None:
        raise torch.cuda.OutOfMemoryError(FULL)

    monkeypatch.setattr("lightning_modules.hosts.client_host.ClientHost", full)
    with pytest.raises(RuntimeError, match="out of memory on the GPU .*lower placement.actors_per_gpu"):
        RemoteHost().build(made.factory, made.dataset, made.partition, [1])


# Devices of actors


def test_each_host_is_given_its_device_and_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(FedAvg, FedAvgServer())
    layout = lay_out([1] * 4, Placement(gpus=1, actors_per_gpu=2, cpu_actors=1), Supply(cpus=8, gpus=1))
    built: list[Any] = []
    actor = SimpleNamespace(
        build=SimpleNamespace(remote=lambda factory, *rest: built.append((factory, rest[-1]))),
        extend_path=SimpleNamespace(remote=lambda folders: None),
    )
    monkeypatch.setattr(actor_group.ray, "put", lambda value: value)
    hosts: Any = SimpleNamespace(hosts=lambda specs: [actor] * len(specs))
    failure_policy: FailurePolicy = SimpleNamespace()  # type: ignore[assignment]
    factory = replace(made.factory, device="cuda:0")
    actor_group.ActorGroup(hosts, layout, (factory, made.dataset, made.partition), failure_policy).start()
    assert [(r.device, r.gpu_share) for r, _ in built] == [("cuda:0", 0.5), ("cuda:0", 0.5), ("cpu", 1.0)]
    assert [group for _, group in built] == list(layout.groups)


@pytest.mark.slow
def test_a_mix_works_like_any_other(pool: ActorPool) -> None:
    """On CPUs throughout, where it shows that all arrives: two actors that hold a GPU, and one that does not."""
    pool.trim(())
    w = world(FedAvg, FedAvgServer(), stacks=((2, 0), (1,), (3,)))
    layout = lay_out(
        [5, 2, 9, 3], Placement(gpus=2, cpu_actors=1, device="cpu"), Supply(cpus=3, gpus=2), w.factory.stacks
    )
    assert [spec.gpus for spec in layout.specs] == [1.0, 1.0, 0]
    executor = RayExecutor(w.factory, w.dataset, w.partition, w.rule, w.federation, layout, pool)
    executor.start()
    shown = ray.get([host.__ray_call__.remote(lambda _: ray.get_gpu_ids()) for host in executor.actor_group.actors])
    assert sorted(len(ids) for ids in shown) == [0, 1, 1]
    inline = w.inline()
    for e in (executor, inline):
        rounds(e, 2, 4)
    assert same(states(executor), states(inline))


# CPUs instead


def asked(*overrides: str) -> Settings:
    with composing([CONFIGS]):
        return to_settings(
            composed(["data=digits", "clients=4", "rounds=2", "model.hidden=[8]", *overrides], [CONFIGS])
        )


GPUS = ("placement.gpus=2", "placement.cpu_fallback=true")


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
    assert with_cpus_only(asked(*overrides)).placement.server_device == "cpu"


def test_a_gpu_for_the_server_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    with pytest.raises(SettingsError, match=r"placement.server_device=cuda"):
        with_server_device(asked("placement.server_device=cuda"))


def test_cpus_instead_only_where_that_is_asked_for_and_gpus_are_missing() -> None:
    settings = asked(*GPUS, "placement.cpu_actors=1", "placement.actors=2")
    given, said = apply_cpu_fallback(settings, lambda: 1.0)
    assert all(part in said for part in ("placement.gpus=2", "1 GPUs", "CPUs", "placement.cpu_fallback=true"))
    assert given.placement == replace(settings.placement, gpus=0, cpu_actors=0, device="cpu", server_device="cpu")
    assert apply_cpu_fallback(settings, lambda: 2.0) == (settings, "")

    def nobody() -> float:
        raise AssertionError("nobody should ask")

    for other in (asked("placement.gpus=2"), asked("placement.cpu_fallback=true")):
        assert apply_cpu_fallback(other, nobody) == (other, "")


@pytest.mark.slow
def test_a_run_that_fell_back_says_so_and_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder records a run on CPUs, and it stays one when it is resumed on a machine with GPUs."""
    with run.Runner() as runner:
        common = ("executor=inline", "progress=quiet", "checkpoint.every=1")
        folder = runner.run(replace(asked(*GPUS, *common), run_dir=str(tmp_path / "fell")))
        plainly = runner.run(replace(asked(*common), run_dir=str(tmp_path / "cpu")))
        assert "all clients train on CPUs" in (folder / "run.log").read_text()
        assert "warning: placement.gpus=2, but 0 GPUs" in capsys.readouterr().err
        saved = saved_settings(folder)
        assert (saved.placement.device, saved.placement.gpus) == ("cpu", 0)
        assert (folder / "partition.json").read_text() == (plainly / "partition.json").read_text()
        held = newest_checkpoint(folder / "checkpoints", print)
        assert held is not None and held.header["settings"]["placement.device"] == "cpu"
        monkeypatch.setattr(devices, "visible_gpus", lambda: 2)
        assert prepare.prepare(saved).factory.device == "cpu"
        runner.resume(
            folder, changed(saved, replace(saved, checkpoint=replace(saved.checkpoint, every=2)), ["checkpoint.every"])
        )


@pytest.mark.slow
def test_a_run_on_gpus_is_not_resumed_on_cpus(tmp_path: Path) -> None:
    """Even where it might have begun there."""
    with run.Runner() as runner:
        folder = runner.run(replace(asked("executor=inline", "progress=quiet"), run_dir=str(tmp_path / "a")))
        with pytest.raises(SettingsError, match="placement.gpus=2, but torch sees no GPU on this machine"):
            runner.resume(folder, asked(*GPUS))


def test_more_gpus_than_torch_sees_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 1)
    with pytest.raises(SettingsError, match="placement.gpus=2, but torch sees only 1 on this machine"):
        prepare.prepare(asked("placement.gpus=2"))
    assert prepare.prepare(asked("placement.gpus=2", "executor=inline")).factory.device == "cuda:0"
    assert prepare.prepare(asked("placement.gpus=2", "ray_address=auto")).factory.device == "cuda:0"
    assert prepare.prepare(asked("placement.gpus=2", "placement.device=cpu")).factory.device == "cpu"


@pytest.mark.parametrize("key", ["gpus", "actors_per_gpu", "gpu_speed", "actors", "cpu_actors"])
def test_in_a_mix_nothing_changes_that_decides_who_is_where(key: str) -> None:
    mix = asked("placement.gpus=2", "placement.cpu_actors=1", "placement.actors=4")
    other = replace(mix, placement=replace(mix.placement, **{key: 3}))
    with pytest.raises(SettingsError, match=f"placement.{key} may change the last bits"):
        changed(mix, other, [f"placement.{key}"])
    plainly = asked("placement.gpus=2")
    if key != "cpu_actors":
        changed(plainly, replace(plainly, placement=replace(plainly.placement, **{key: 3})), [f"placement.{key}"])
