"""Differential privacy of clients: what the server releases, what is spent, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from support import prepared

import pflsim
from lightning_modules import message_parts
from pflsim.errors import SettingsError
from pflsim.privacy import epsilon
from pflsim.records.trace import read_matrices
from pflsim.servers.fedavg import FedAvg
from pflsim.servers.privacy import Release

pytest.importorskip("dp_accounting")
SHAPES = {"a": torch.Size([40, 50]), "b": torch.Size([])}


def release(clip: float, noise: float, expected: float = 20.0, adapt: bool = False) -> Release:
    return Release(clip, noise, 1e-3, 1.0, expected, seed=3, adapt=adapt)


def changes(*scales: float) -> list[dict[str, torch.Tensor]]:
    """Of norms that are these."""
    unit = torch.ones(40, 50, dtype=torch.float64) / 2000**0.5
    return [{"a": scale * 0.6 * unit, "b": torch.tensor(scale * 0.8, dtype=torch.float64)} for scale in scales]


def test_changes_are_clipped_and_divided_by_the_expected_number() -> None:
    found, memory = release(1.0, 0.0, 4.0)(changes(0.5, 2.0), SHAPES, {}, 1)
    assert found["b"].item() == pytest.approx(0.8 * (0.5 + 1) / 4) and memory == {}
    assert found["a"].norm().item() == pytest.approx(0.6 * 1.5 / 4)


@pytest.mark.parametrize("given", [[], changes(1.0, 5.0)])
def test_the_noise_also_of_a_round_without_clients(given: Any) -> None:
    """Its deviation is z S/m; changes are clipped to almost nothing."""
    found, _ = release(1e-6, 1.3, 5.0)(given, SHAPES, {}, 7)
    other, _ = release(1e-6, 1.3, 5.0)(given, SHAPES, {}, 8)
    squares = (found["a"] / (1.3e-6 / 5)).square().sum().item()
    slack = len(given) * 100
    assert chi2.ppf(1e-4, 2000) - slack < squares < chi2.ppf(1 - 1e-4, 2000) + slack
    assert not torch.equal(found["a"], other["a"])
    assert torch.equal(found["a"], release(1e-6, 1.3, 5.0)(given, SHAPES, {}, 7)[0]["a"])


@pytest.mark.parametrize(("expected", "noise"), [(20.0, 1.1000), (50.0, 1.0206)])
def test_an_adaptive_clip_norm(expected: float, noise: float) -> None:
    """The noise of the count is paid for; the norm moves towards the median of 0.5, 2, 2 and 2."""
    assert release(1.0, 1.0, expected, adapt=True).change_noise == pytest.approx(noise, abs=1e-4)
    assert release(1.0, 1.0, expected).change_noise == 1.0
    clip, memory, free = 1.0, dict[str, torch.Tensor](), release(1.0, 0.0, 4.0, adapt=True)
    for _ in range(60):
        _, memory = free(changes(0.5, 2.0, 2.0, 2.0), SHAPES, memory, 1)
        share = (1 + 3 * (clip >= 2)) / 4
        clip *= 2.718281828459045 ** (-0.2 * (share - 0.5))
        assert memory["clip"].item() == pytest.approx(clip)
    assert clip == pytest.approx(2.0, rel=0.15)
    few = release(1.0, 0.0, 20.0, adapt=True)(changes(0.5), SHAPES, {}, 1)[1]["clip"].item()
    assert few == pytest.approx(2.718281828459045 ** (-0.2 * 0.5 / 20))  # one client more or less moves it by this


SMALL: dict[str, Any] = {
    "method": "fedavg", "rounds": 3, "clients": 6, "executor": "inline", "progress": "none", "fraction": 0.5,
}  # fmt: skip
CLIENT = {"name": "client", "noise": 0.6, "delta": 0.01}


def run(folder: Path, overrides: list[str] | None = None, **settings: Any) -> Any:
    more = ["participation.sampling=poisson", *(overrides or [])]
    return pflsim.run(**{**SMALL, "privacy": CLIENT, **settings}, overrides=more, run_dir=folder)


def test_what_a_run_spends(tmp_path: Path) -> None:
    made, half = run(tmp_path / "run", rounds=4), run(tmp_path / "half", rounds=2)
    about = json.loads((made.folder / "summary.json").read_text())["privacy"]
    assert about["epsilon"] == pytest.approx(epsilon(0.5, 0.6, 0.01, 4)) and about["rounds"] == 4
    pflsim.resume(half, rounds=4)
    assert (half.folder / "per_client.csv").read_bytes() == (made.folder / "per_client.csv").read_bytes()
    row = pflsim.compare([made], at="last")[0].rows[0]
    assert row.figures["epsilon"].values[0] == pytest.approx(epsilon(0.5, 0.6, 0.01, row.rounds[0]))
    spent = pflsim.compare([made])[0].rows[0].figures["epsilon"].mean
    assert f'<td class="num" data-v="{spent}">' in pflsim.report(made).read_text()
    budget = run(tmp_path / "budget", privacy={"name": "client", "epsilon": 5.0, "delta": 0.01})
    found = budget.config["privacy"]["noise"]
    assert epsilon(0.5, found, 0.01, 3) <= 5 < epsilon(0.5, found - 0.001, 0.01, 3)
    with pytest.raises(SettingsError, match=r"spends .* 30 rounds"):
        pflsim.resume(budget, rounds=30)


def test_the_adapted_clip_norm_is_in_the_diagnostics(tmp_path: Path) -> None:
    made = run(tmp_path / "run", privacy={**CLIENT, "adapt": True})
    diagnostics: Any = read_matrices(made.folder)
    (found,) = (matrix.values for matrix in diagnostics.matrices if matrix.name == "clip_norm")
    saved = torch.load(next(made.folder.glob("checkpoints/round_0003/server.pt")))
    assert found.item() == pytest.approx(saved["memory"]["clip"].item()) and found.item() != 1


@pytest.mark.parametrize("more", [{"privacy": {**CLIENT, "noise": 0.0}}, {"method": "local"}, {"privacy": "none"}])
def test_nothing_is_said_of_a_run_that_spends_nothing(more: Any, tmp_path: Path) -> None:
    made = run(tmp_path / "run", **more)
    assert made.summary.get("privacy", {}).get("epsilon") is None
    assert "ε" not in repr(pflsim.compare([made])) and "ε" not in pflsim.report(made).read_text()


def test_no_noise_and_no_clipping_is_the_mean(tmp_path: Path) -> None:
    private = run(tmp_path / "private", fraction=1.0, privacy={**CLIENT, "noise": 0.0, "clip": 1e9})
    mean = run(tmp_path / "mean", fraction=1.0, privacy="none", aggregator="mean")
    each = [made.per_client().query("split == 'test'")["loss"].to_numpy() for made in (private, mean)]
    assert each[0] == pytest.approx(each[1], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["participation.sampling=fixed"], "poisson"),
        (["participation.cycle=2"], r"participation\.cycle=2"),
        (["participation.spread=1"], r"participation\.spread=1"),
        (["privacy.delta=0.2"], r"privacy\.delta=0\.2"),
        (["privacy.noise=null"], r"privacy\.epsilon"),
        (["privacy.epsilon=0.1"], "spends"),
        (["aggregator=median"], "aggregator=median"),
        (["method=feddbe"], "method=feddbe"),
        (["method=fedamp"], "privacy=client"),
        (["method=scaffold"], "method=scaffold: privacy=client"),
        (["method=fedproto"], "privacy=client .* method=fedproto"),
        (["model=cnn_bn", "model.kernel=3", "model.padding=1"], "buffers=local"),
    ],
)
def test_refusals(settings: list[str], named: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=named):
        run(tmp_path / "run", settings)
    assert not (tmp_path / "run").exists()


def test_only_noise_that_is_not_given_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(message_parts, "doing", lambda what: said.append(what) or "before")
    small = ["method=fedavg", "data=digits", "clients=6", "participation.sampling=poisson", "fraction=0.5"]
    prepared(*small, "privacy=client", "privacy.delta=0.01", "privacy.noise=0.6")
    assert not said
    prepared(*small, "privacy=client", "privacy.delta=0.01", "privacy.epsilon=5", "rounds=3")
    assert len(said) == 2 and "noise" in said[0] and said[1] == "before"


class Everyone(FedAvg):
    """Ignores `fraction`, so that ε of sampled clients would be too low."""

    def full_participation(self, round_number: int, rounds: int) -> bool:
        return round_number == rounds


def test_rounds_of_all_clients_are_refused(tmp_path: Path) -> None:
    method = {"client": "lightning_modules.methods.fedavg.FedAvg", "server": Everyone}
    with pytest.raises(SettingsError, match="privacy=client.*fraction"):
        run(tmp_path / "run", method=method)
    assert run(tmp_path / "run", method=method, privacy="none").complete
