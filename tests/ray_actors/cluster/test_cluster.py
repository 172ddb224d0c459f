"""Ray is started once for the runs of a sweep that need the same of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pflsim.config.settings import Placement, Settings
from ray_actors.cluster import early
from ray_actors.cluster import local as cluster
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec
from ray_actors.placement.layout import Layout, lay_out


class FakeRay:
    """Writes down what was asked of it."""

    def __init__(self, up: bool = False):
        self.up, self.calls, self.theirs = up, [], {"CPU": 3.0, "GPU": 1.0}

    def is_initialized(self) -> bool:
        return self.up

    def cluster_resources(self) -> dict[str, float]:
        return self.theirs

    def start(self, cpus: int, gpus: int, store_mb: int) -> Path:
        assert not self.up
        self.up = True
        self.calls.append(("init", cpus, gpus, store_mb))
        return Path("files")

    def stop(self, folder: Path) -> None:
        assert folder == Path("files")
        self.up = False
        self.calls.append(("shutdown",))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setattr(cluster, "ray", made)
    monkeypatch.setattr(cluster, "launcher", made)
    monkeypatch.setattr(early, "launcher", made)
    pool = SimpleNamespace(
        started=0,
        close=lambda: made.calls.append(("actors end",)),
        trim=lambda specs: made.calls.append(("trim", tuple(specs))),
        hosts=lambda specs: made.calls.append(("actors", tuple(specs))),
        server=lambda: None,
    )
    monkeypatch.setattr(cluster, "ActorPool", lambda: pool)
    monkeypatch.setattr(early, "ActorPool", lambda: pool)
    return made


TWO = Placement(cpus=2, object_store_mb=200)
SAME = Layout.even(((0, 1), (2,)), 1.0, 0.0)
THIN = Layout.even(((0,), (1,), (2,)), 0.6666, 0.0)


def test_runs_with_the_same_needs_share_ray_and_actors(fake: FakeRay) -> None:
    with cluster.LocalRay() as local:
        pools = [local.pool(TWO, SAME) for _ in range(2)]
        assert pools[0] is pools[1] and fake.calls.count(("init", 2, 0, 200)) == 1
        fake.calls.clear()
        local.pool(TWO, THIN)
        assert fake.calls == [("actors end",)]  # or their CPUs would be missing for the new ones
    assert fake.calls[-1] == ("shutdown",) and not fake.up


def test_of_a_mix_no_actor_stays_that_a_run_has_no_use_for(fake: FakeRay) -> None:
    """Runs may ask for the same two kinds, but for more of one and fewer of the other."""
    wanted: list[Any] = []
    with cluster.LocalRay() as local:
        for cpu_actors in (2, 3, 2):
            mix = Placement(cpus=6, gpus=2, actors_per_gpu=2, actors=6, cpu_actors=cpu_actors)
            layout = lay_out([1] * 9, mix, local.supply(mix))
            local.pool(mix, layout)
            assert len(set(layout.specs)) == 2
            wanted.append(("trim", layout.specs))
        assert [call for call in fake.calls if call[0] == "trim"] == wanted[1:]


def test_of_one_kind_they_all_stay(fake: FakeRay) -> None:
    with cluster.LocalRay() as local:
        for layout in (SAME, Layout.even(((0, 1, 2),), 1.0, 0.0), SAME):
            local.pool(TWO, layout)
            assert not [call for call in fake.calls if call[0] == "trim"]


@pytest.mark.parametrize("other", [{"cpus": 3}, {"object_store_mb": 300}, {"gpus": 1}])
def test_other_needs_start_it_anew(fake: FakeRay, other: dict[str, int]) -> None:
    placement = replace(TWO, **other)
    with cluster.LocalRay() as local:
        local.pool(TWO, SAME)
        local.pool(placement, SAME)
        starts = [call for call in fake.calls if call[0] != "actors end"]
        assert starts == [
            ("init", 2, 0, 200),
            ("shutdown",),
            ("init", placement.cpus, placement.gpus, placement.object_store_mb),
        ]


def test_a_ray_of_someone_else_is_left_running(fake: FakeRay) -> None:
    fake.up = True
    with cluster.LocalRay() as local:
        assert (local.supply(TWO).cpus, local.supply(TWO).gpus) == (3.0, 1.0)
        local.pool(TWO, SAME)
    assert fake.up and fake.calls == [("actors end",)] * 2


def test_memory_of_actors_that_are_up_counts_as_free(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 * 2**20))
    local = cluster.LocalRay()
    assert local.supply(TWO).free_mb == 1000
    local._pool.started = 2  # type: ignore[misc]
    assert local.supply(TWO).free_mb == 1000 + 2 * ACTOR_MB


def test_a_ray_that_is_starting_already_is_used_with_its_actors(fake: FakeRay) -> None:
    starting = early.EarlyRay(TWO, 2)
    with cluster.LocalRay(early=starting) as local:
        assert local.pool(TWO, SAME) is starting.pool
        assert fake.calls == [("init", 2, 0, 200), ("actors", (ActorSpec(1.0, 0.0),) * 2)]
    assert fake.calls[2:] == [("actors end",), ("shutdown",)]


def test_a_ray_of_another_size_or_without_use_is_stopped(fake: FakeRay) -> None:
    with cluster.LocalRay(early=early.EarlyRay(TWO, 1)) as local:
        local.pool(Placement(cpus=1, object_store_mb=80), SAME)
        assert [call[0] for call in fake.calls if "actors" not in call[0]] == ["init", "shutdown", "init"]
    cluster.LocalRay(early=early.EarlyRay(TWO, 1)).close()
    early.EarlyRay(TWO, 1).close()
    assert not fake.up and fake.calls[-1] == ("shutdown",)


def test_an_error_while_ray_starts_early_reaches_the_run(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*size: int) -> None:
        raise ConnectionError("no port")

    monkeypatch.setattr(fake, "start", broken)
    with cluster.LocalRay(early=early.EarlyRay(TWO, 1)) as local, pytest.raises(ConnectionError, match="no port"):
        local.pool(TWO, SAME)


@pytest.mark.parametrize(("settings", "actors"), [({"clients": 2}, 2), ({"clients": 9, "placement": {"actors": 3}}, 3)])
def test_ray_starts_early_with_the_actors_that_a_run_probably_needs(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], actors: int
) -> None:
    placement = replace(Placement(cpus=4, object_store_mb=200), **settings.pop("placement", {}))
    monkeypatch.setattr(early, "ray", fake)
    started = early.start_early(Settings(placement=placement, **settings))
    assert started is not None and len(started.specs) == actors
    started.close()
    fake.up = True
    assert early.start_early(Settings(placement=placement, **settings)) is None  # of someone else


@pytest.mark.parametrize(("memory", "shared", "expected"), [(3000, 9000, 1000), (30_000, 1000, 900), (90, 9, 128)])
def test_the_object_store_fits_into_memory_and_shared_memory(
    monkeypatch: pytest.MonkeyPatch, memory: int, shared: int, expected: int
) -> None:
    monkeypatch.setattr(early.psutil, "virtual_memory", lambda: SimpleNamespace(available=memory * 2**20))
    monkeypatch.setattr(early.psutil, "disk_usage", lambda path: SimpleNamespace(free=shared * 2**20))
    assert early.free_mb() == expected
