"""The virtual clock: by hand, and in a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pflsim
from pflsim.config.settings import Clock, Settings
from pflsim.engine.clock import VirtualClock
from pflsim.errors import SettingsError
from pflsim.types import Traffic, TrainReport


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    clock = VirtualClock.of(Settings(clock=Clock([1.0, 2.0, 0.0], down_mbps=8, up_mbps=4)), 3)
    assert clock
    reports = [TrainReport(0, 9, 5, up_bytes=10**6), TrainReport(1, 9, 3, up_bytes=0), TrainReport(2, 9, 9)]
    down = {0: 2 * 10**6, 1: 0, 2: 4 * 10**6}
    assert clock.round(reports[:1], down, {}) == 5 + 2 + 2  # 8 Mbit/s are a megabyte per second
    assert clock.round(reports[1:2], down, {}) == 6
    assert clock.round(reports, down, {}) == 9
    assert clock.round(reports[2:], down, {1: Traffic(10**6, 10**6)}) == 4 + 3
    assert clock.round([], {}, {}) == 0
    assert VirtualClock.of(Settings(), 3) is None
    with pytest.raises(SettingsError, match=r"clock\.step_s has 3 values, but 4"):
        VirtualClock.of(Settings(clock=Clock([1.0, 2.0, 0.0])), 4)


def test_speeds_vary_between_clients() -> None:
    """The logarithms of the factors are normal; those of a client do not depend on the number of clients."""
    each = [VirtualClock.of(Settings(clock=Clock(2.0, 8.0, 4.0, spread=0.5)), n) for n in (400, 3)]
    assert each[0] and each[1]
    for name, middle in (("step", 2.0), ("down", 1e-6), ("up", 2e-6)):
        logs = np.log(getattr(each[0], name) / middle)
        assert abs(logs.mean()) < 0.1 and logs.std() == pytest.approx(0.5, abs=0.06)
        assert np.array_equal(getattr(each[0], name)[:3], getattr(each[1], name))


@pytest.mark.parametrize("method", ["fedavg", "feddbe"])
def test_a_run_has_virtual_seconds_and_the_same_results(method: str, tmp_path: Path) -> None:
    """FedDBE surveys all clients before a round."""
    settings: dict[str, Any] = {"method": method, "rounds": 3, "clients": 4, "fraction": 0.5, "executor": "inline"}
    settings |= {"progress": "none", "faults": {"straggler": 0.5, "dropout": 0.2}}
    plain = pflsim.run(**settings, run_dir=tmp_path / "plain")
    run = pflsim.run(**settings, clock={"up_mbps": 1.0}, run_dir=tmp_path / "run")
    assert (run.folder / "per_client.csv").read_bytes() == (plain.folder / "per_client.csv").read_bytes()
    most = run.per_client().groupby(["round", "client"])["up_bytes"].first().groupby("round").max()
    expected = (most / 125_000).to_dict()
    if method == "fedavg":
        assert {line.round: line.virtual_seconds for line in run.history} == pytest.approx(expected)
        assert all(line.clock_seconds == line.total_seconds for line in plain.history)
        table = repr(pflsim.compare([run], target=0.1))
        assert "virtual" in table and "virtual" not in repr(pflsim.compare([plain], target=0.1))
    else:
        assert sum(line.virtual_seconds or 0 for line in run.history) > 0
