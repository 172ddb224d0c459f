"""predictions.npz: what it holds, which runs have it, and that it belongs to the checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import pflsim
from pflsim.engine.simulation import Simulation
from pflsim.errors import SettingsError
from pflsim.records.checkpoint_write import Staged
from pflsim.records.per_client import PER_CLIENT
from pflsim.records.predictions import PREDICTIONS, read_predictions

EVERY = dict(method="fedavg", executor="inline", progress="none", model="linear", rounds=4)


def table(path: Path, **columns: Any) -> dict[str, Any]:
    """Write a table of five sites, in which rows without a site are left out, and return the settings of a run."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=150), "site": rng.choice([*"pqrst", None], 150)})
    drawn = 2 * frame["a"] + rng.normal(size=150)
    kinds = {"two": np.where(drawn > 0, "yes", "no"), "three": pd.cut(drawn, 3, labels=[*"klm"]), "value": 9 * drawn}
    frame.assign(**{key: kinds[kind] for key, kind in columns.items()}).to_csv(path, index=False)
    data = [f"data.path={path}", f"data.label={next(iter(columns))}", "data.client=site", "data.missing=['']"]
    return dict(EVERY, data="table", overrides=[*data, "split.validation=0.2"])


@pytest.mark.parametrize(("kind", "metric"), [("two", "accuracy"), ("three", "accuracy"), ("value", "rmse")])
def test_scores_of_every_row_of_the_users_file(kind: str, metric: str, tmp_path: Path) -> None:
    """Of both models, in the last round and in the best: their metrics are those of per_client.csv."""
    run = pflsim.run(**table(tmp_path / "t.csv", y=kind), run_dir=tmp_path / "run", lr=0.3, batch_size=5)
    frame, file = run.predictions(), pd.read_csv(tmp_path / "t.csv")
    best = run.at("best_val")
    assert best and {(when, n) for when, n in zip(frame["when"], frame["round"], strict=True)} == {
        ("best", best.round), ("last", 4),
    }  # fmt: skip
    own = file.iloc[frame["row"]]
    assert (own["site"].to_numpy() == frame["name"]).all() and not frame.duplicated(["when", "model", "row"]).any()
    scores = frame.filter(regex="^(score|value)_").to_numpy()
    if kind == "value":
        assert np.allclose(own["y"], frame["target"], rtol=1e-6) and list(frame.filter(like="_")) == ["value_0"]
        frame["found"] = (scores[:, 0] - frame["target"]) ** 2
    else:
        assert (np.unique(file["y"])[frame["target"]] == own["y"]).all() and np.allclose(scores.sum(1), 1)
        frame["found"] = scores.argmax(1) == frame["target"]
    means = frame.groupby(["round", "model", "phase", "client"])["found"].mean() ** (0.5 if kind == "value" else 1)
    written = run.per_client().query("split == 'test'").set_index(["round", "model", "phase", "client"])[metric]
    assert means.to_numpy() == pytest.approx(written[means.index].to_numpy(), rel=1e-5)
    assert run.predictions()["reported"].sum() == len(frame) / 2


@pytest.mark.parametrize("asked", ["auto", True, False])
def test_which_runs_have_them(asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default tables with few test rows; the results are the same. A resumed run may change it."""
    monkeypatch.setattr("pflsim.data.record.MAX_ROWS", 20)
    settings, tracking = {**table(tmp_path / "t.csv", y="two"), "rounds": 1}, {"tracking": {"predictions": asked}}
    run = pflsim.run(**settings, **tracking, run_dir=tmp_path / "run")
    other = pflsim.run(**settings, tracking={"predictions": not asked}, run_dir=tmp_path / "other")
    assert (run.folder / "per_client.csv").read_bytes() == (other.folder / "per_client.csv").read_bytes()
    assert (read_predictions(run.folder) is not None) == (asked is True)
    longer = pflsim.resume(run, rounds=2, tracking={"predictions": not asked})
    assert (read_predictions(longer.folder) is not None) == (not asked)
    if asked == "auto":
        with pytest.raises(SettingsError, match=r"tracking\.predictions"):
            run.predictions()


def test_a_round_without_a_score_is_not_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([float("nan"), 0.5, 0.4, float("nan")])
    monkeypatch.setattr("pflsim.engine.simulation.validation_score", lambda *_: next(scores))
    run = pflsim.run(**table(tmp_path / "t.csv", y="two"), run_dir=tmp_path / "run")
    frame = run.predictions()
    assert {*frame[frame["when"] == "best"]["round"]} == {2}
    assert {path.name for path in (run.folder / "checkpoints").iterdir()} == {"round_0002", "round_0004"}


def test_thresholds_change_no_other_result_and_need_no_recorded_scores(tmp_path: Path) -> None:
    """The validation scores reach the driver. New clients have thresholds where some of their rows are not judged."""
    settings = table(tmp_path / "t.csv", y="two") | {"rounds": 2}
    asked: dict[str, Any] = {"holdout_clients": 2, "newcomer_rows": [5]}
    plain = pflsim.run(**settings, eval=asked, run_dir=tmp_path / "plain").per_client()
    asked["threshold"] = "sensitivity:0.8"
    run, other = (
        pflsim.run(**settings, eval=asked, tracking={"predictions": on}, run_dir=tmp_path / f"{on}")
        for on in (True, False)
    )
    assert (run.folder / PER_CLIENT).read_bytes() == (other.folder / PER_CLIENT).read_bytes()
    frame = run.per_client()
    pd.testing.assert_frame_equal(frame[list(plain)], plain)
    assert {*frame} - {*plain} >= {"threshold", "sensitivity_low", "specificity", "ppv", "npv_high"}
    has = frame[frame["total"] > 0].groupby(["model", "phase"])["threshold"].agg(lambda each: each.notna().all())
    assert [*has[~has].index] == [("newcomer", "received_all")] and len(has) == 7


@pytest.mark.parametrize(
    ("kind", "more", "named"),
    [("two", ["split.validation=0"], "split.validation"), ("three", [], "two classes"), ("value", [], "two classes"),
     ("two", ["eval.metrics=[specificity]"], "eval.metrics: specificity")],
)  # fmt: skip
def test_thresholds_are_of_two_classes_and_need_validation_rows(
    kind: str, more: list[str], named: str, tmp_path: Path
) -> None:
    settings = table(tmp_path / "t.csv", y=kind)
    settings["overrides"] += ["eval.threshold=sensitivity:0.9", *more]
    with pytest.raises(SettingsError, match=named):
        pflsim.run(**settings)


def interrupted(simulation: Simulation[Any]) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("mode", "best"), [("min", 4), ("max", 1)])
def test_a_killed_run_goes_on_with_those_of_its_checkpoint(
    mode: str, best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the checkpoint of round 4 is seen: that of round 2 counts, although the best may have improved."""
    settings = table(tmp_path / "t.csv", y="two") | {"lr": 0.02, "checkpoint": {"every": 2, "best": False}}
    settings["eval"] = {"primary": "nll", "mode": mode, "threshold": "sensitivity:0.8"}
    straight = pflsim.run(**settings, run_dir=tmp_path / "straight")
    assert straight.at("best_val").round == best  # type: ignore[union-attr]
    real, folder = Staged.publish, tmp_path / "killed"

    def publish(self: Staged, keep: int) -> Path:
        if self.round == 4:
            raise SystemExit
        return real(self, keep)

    def rounds(folder: Path) -> dict[str, int]:
        frame = read_predictions(folder)
        assert frame is not None
        return dict(zip(frame["when"], frame["round"], strict=True))

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Staged, "publish", publish)
        pflsim.run(**settings, run_dir=folder)
    assert rounds(folder) == {"last": 4, "best": best}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Simulation, "run", interrupted)
        pflsim.resume(folder)
    assert rounds(folder) == {"last": 2, "best": min(best, 2)}
    pflsim.resume(folder)
    for name in (PREDICTIONS, PER_CLIENT):
        assert (folder / name).read_bytes() == (straight.folder / name).read_bytes()
