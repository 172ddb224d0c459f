"""Ray is started once for the runs of a sweep that need the same of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pflsim.config.settings import Placement
from ray_actors.cluster import local as cluster
from ray_actors.placement.actor_spec import ACTOR_MB
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
    pool = SimpleNamespace(
        started=0,
        close=lambda: made.calls.append(("actors end",)),
        trim=lambda specs: made.calls.append(("trim", tuple(specs))),
    )
    monkeypatch.setattr(cluster, "ActorPool", lambda: pool)
    return made


TWO = Placement(cpus=2)
SAME = Layout.even(((0, 1), (2,)), 1.0, 0.0)
THIN = Layout.even(((0,), (1,), (2,)), 0.6666, 0.0)


def test_runs_with_the_same_needs_share_ray_and_actors(fake: FakeRay) -> None:
    with cluster.LocalRay() as local:
        pools = [local.pool(TWO, SAME, store) for store in (200, 128)]
        assert pools[0] is pools[1] and fake.calls.count(("init", 2, 0, 200)) == 1
        fake.calls.clear()
        local.pool(TWO, THIN, 200)
        assert fake.calls == [("actors end",)]  # or their CPUs would be missing for the new ones
    assert fake.calls[-1] == ("shutdown",) and not fake.up


def test_of_a_mix_no_actor_stays_that_a_run_has_no_use_for(fake: FakeRay) -> None:
    """Runs may ask for the same two kinds, but for more of one and fewer of the other."""
    wanted: list[Any] = []
    with cluster.LocalRay() as local:
        for cpu_actors in (2, 3, 2):
            mix = Placement(cpus=6, gpus=2, actors_per_gpu=2, actors=6, cpu_actors=cpu_actors)
            layout = lay_out([1] * 9, mix, local.supply(mix))
            local.pool(mix, layout, 100)
            assert len(set(layout.specs)) == 2
            wanted.append(("trim", layout.specs))
        assert [call for call in fake.calls if call[0] == "trim"] == wanted[1:]


def test_of_one_kind_they_all_stay(fake: FakeRay) -> None:
    with cluster.LocalRay() as local:
        for layout in (SAME, Layout.even(((0, 1, 2),), 1.0, 0.0), SAME):
            local.pool(TWO, layout, 200)
            assert not [call for call in fake.calls if call[0] == "trim"]


@pytest.mark.parametrize(("placement", "store"), [(Placement(cpus=3), 200), (TWO, 300), (Placement(cpus=2, gpus=1), 9)])
def test_other_needs_start_it_anew(fake: FakeRay, placement: Placement, store: int) -> None:
    with cluster.LocalRay() as local:
        local.pool(TWO, SAME, 200)
        local.pool(placement, SAME, store)
        starts = [call for call in fake.calls if call[0] != "actors end"]
        assert starts == [("init", 2, 0, 200), ("shutdown",), ("init", placement.cpus, placement.gpus, store)]


def test_a_ray_of_someone_else_is_left_running(fake: FakeRay) -> None:
    fake.up = True
    with cluster.LocalRay() as local:
        assert (local.supply(TWO).cpus, local.supply(TWO).gpus) == (3.0, 1.0)
        local.pool(TWO, SAME, 200)
    assert fake.up and fake.calls == [("actors end",)] * 2


def test_memory_of_actors_that_are_up_counts_as_free(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 * 2**20))
    local = cluster.LocalRay()
    assert local.supply(TWO).free_mb == 1000
    local._pool.started = 2  # type: ignore[misc]
    assert local.supply(TWO).free_mb == 1000 + 2 * ACTOR_MB
