"""Calibration of two classes: the curve against statsmodels, and where it appears."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit, logit

import pflsim
from pflsim.analysis.calibration import Calibration, calibration
from pflsim.analysis.groups import group_runs
from pflsim.analysis.runs import Runs
from pflsim.records.predictions import PREDICTIONS


def runs(folder: Path, classes: int = 2, **settings: Any) -> Runs:
    rng, site = np.random.default_rng(0), np.repeat(np.arange(6), 80)
    a = rng.normal(size=480)
    y = (rng.random((classes - 1, 480)) < expit(a + site / 3 - 1)).sum(0)
    frame = pd.DataFrame({"a": a, "site": site, "y": np.array([*"nyz"])[y]})
    frame.to_csv(folder / "t.csv", index=False)
    data = [f"data.path={folder / 't.csv'}", "data.label=y", "data.client=site", "split.validation=0.2", "model=linear"]
    given = dict(
        data="table",
        rounds=2,
        executor="inline",
        progress="none",
        eval={"metrics": ["calibration_slope"] * (classes == 2)},
    )
    where = [*data, f"run_dir={folder}/${{method}}-${{seed}}"]
    return pflsim.sweep(overrides=where, **given, **settings)


def test_the_curve_is_that_of_statsmodels(tmp_path: Path) -> None:
    """The same clients in both seeds are clusters; the slope is the mean of the seeds' pooled ones."""
    models = pytest.importorskip("statsmodels.api")
    found = runs(tmp_path, method=["fedavg"], seed=[0, 1])
    (group,) = group_runs(found)
    own = calibration(group, "best_val")
    assert isinstance(own, Calibration)
    slopes = [run.at("best_val").evaluations[run.reported].metrics["calibration_slope"].pooled for run in found]  # type: ignore[union-attr]
    assert own.metrics["calibration_slope"] == pytest.approx(np.mean(slopes), rel=1e-4)
    rows = pd.concat([run.predictions().query("when == 'best' and reported") for run in found])
    x = np.log(rows["score_1"].astype(float) / rows["score_0"])
    knots = np.quantile(x, (0.1, 0.5, 0.9))

    def basis(x: np.ndarray) -> np.ndarray:
        a, b, c = (np.maximum(x - knot, 0) ** 3 for knot in knots)
        t = knots
        return np.column_stack([
            np.ones_like(x), x, a - b * (t[2] - t[0]) / (t[2] - t[1]) + c * (t[1] - t[0]) / (t[2] - t[1]),
        ])  # fmt: skip

    how = {"groups": rows["client"], "use_correction": False}
    fit = models.Logit(rows["target"].to_numpy(), basis(x.to_numpy())).fit(disp=0, cov_type="cluster", cov_kwds=how)
    at = basis(logit(own.p))
    half = 1.96 * np.sqrt(6 / 5 * np.einsum("ij,jk,ik->i", at, fit.cov_params(), at))
    for ours, theirs in ((own.observed, 0), (own.low, -half), (own.high, half)):
        np.testing.assert_allclose(ours, expit(at @ fit.params + theirs), atol=1e-4)


def test_where_it_is_shown_and_why_not(tmp_path: Path) -> None:
    """Without scores there is a line in its place; a figure that was not asked for is left out."""
    found = runs(tmp_path, method=["local", "fedavg"], seed=[0])
    (figure,) = pflsim.figures(found, only="calibration").values()
    assert {axes.get_title(loc="left") for axes in figure.axes} == {"FedAvg", "Local"}
    page = pflsim.report(found, tmp_path / "page.html").read_text()
    section = page[page.index('<section id="calibration">') : page.index('<section id="cost">')]
    assert section.count('class="band"') == 2 and "tracking.predictions" not in section
    (other,) = runs(tmp_path, 3, method=["ditto"], seed=[0])
    assert 'id="calibration"' not in pflsim.report(other, tmp_path / "page.html").read_text()
    for run in found:
        (run.folder / PREDICTIONS).unlink()
    assert "calibration" not in pflsim.figures(found)
    (empty,) = pflsim.figures(found, only="calibration").values()
    assert not empty.axes and "tracking.predictions" in empty.texts[0].get_text()
    page = pflsim.report(found, tmp_path / "page.html").read_text()
    section = page[page.index('<section id="calibration">') : page.index('<section id="cost">')]
    assert "tracking.predictions" in section and "<svg" not in section
