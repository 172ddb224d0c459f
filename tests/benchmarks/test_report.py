"""From figures to tables."""

from typing import Any

import pytest

from benchmarks.cases import CASES, OURS, overrides, settings_of
from benchmarks.speed.results import Results
from benchmarks.speed.targets import verdicts

pytestmark = pytest.mark.slow

HEAD = {"at": "2026-01-02T03:04:05+00:00", "commit": "0123456789", "dirty": False, "rates": {"one": 50.0, "two": 100.0}}
ENVIRONMENT = {
    "machine": {"processor": "a processor", "cpus_usable": 2, "memory_mb": 8000},
    "versions": dict.fromkeys(("python", "torch", "lightning", "ray", "numpy"), "1"),
}


def made(seconds: float, **more: Any) -> dict[str, Any]:
    """Figures of a way whose rounds take so long."""
    counts = {"steps": 100.0, "examples": 1000.0, "evaluated": 500.0, "up_bytes": 1e6, "down_bytes": 2e6}
    parts = {"train": seconds * 0.75, "fuse": 0.0, "evaluate": seconds * 0.25, "total": seconds, "server": seconds / 10}
    figures = {"first": 2 * seconds, "gflop_train": 90.0, "gflop_evaluate": 10.0, "cores": 2, "lockstep": False}
    return {**HEAD, "round": {**parts, **counts}, **figures, "peak_mb": 2500.0, **more}


@pytest.fixture
def results() -> Results:
    cases = {
        "mlp-20": {"plain": made(9.0), "plain1": made(8.0), "workers": made(3.0), "loop": made(4.0), "ray2": made(1.0)},
        "cnn-20": {"plain": made(9.0), "loop": made(3.0, cores=1), "ray2": made(1.5), "ray1": {"error": "a|b", **HEAD}},
        "memory-mlp": {"ray2": made(1.0, held_mb=[900.0] * 20 + [1000.0, 1001.0] * 40)},
        "memory-cnn": {"ray2": made(1.0, held_mb=[float(mb) for mb in range(1000, 1100)])},
        "start": {"start": {**HEAD, "help": 0.5, "first_round": 30.0}},
    }
    return Results(cases, ENVIRONMENT)


def test_targets(results: Results) -> None:
    found = {v.what: v for v in verdicts(results)}
    plain = found["MLP, 20 clients, whole round, against the plain loop"]
    assert plain.met and plain.measured == "8.00× (Ray, 2 actors)"  # to the faster of the two plain loops
    workers = found["MLP, 20 clients, against two plain Ray workers"]
    assert not workers.met and workers.measured.startswith("3.00×") and workers.by == pytest.approx(3 / 4.5)
    assert found["CNN, 20 clients, share of the matrix-product rate of both cores"].measured == "67% (Ray, 2 actors)"
    assert found["CNN, 20 clients, Ray with 2 actors against inline on one thread"].measured == "2.00×"
    assert found["MLP, 100 clients, memory over 100 rounds"].met
    assert not found["CNN, 100 clients, memory over 100 rounds"].met
    assert found["`launch.py --help`"].met
    assert not found["pFedLA, 100 clients, CNN, the server's share of a round"].measured


@pytest.mark.parametrize("quick", [False, True])
def test_every_case_composes(quick: bool) -> None:
    for case in CASES.values():
        for way in case.ways if case.name == "cnn-20" and not quick else set(case.ways[-1:]) - {"start"}:
            settings = settings_of(overrides(case, way, 3, "DIR", quick))
            assert settings.rounds == 3 and settings.batch_size == 10 and settings.lr == 0.01
            assert (settings.executor == "ray") == (way in ("ray1", "ray2", "bf16"))
    assert {way for case in CASES.values() for way in case.ways} >= set(OURS)
