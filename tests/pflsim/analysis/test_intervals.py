"""Intervals of clients and means over them, against independent programs and made-up truths."""

import csv
import io
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
from pandas import DataFrame
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import pflsim
from pflsim import cli
from pflsim.analysis.clients import client_intervals
from pflsim.analysis.intervals import (
    POOLED,
    VARIANCES,
    cluster_bootstrap,
    interval,
    random_effects,
    random_effects_mean,
)  # fmt: skip
from pflsim.analysis.runs import UNSCORED, Run
from pflsim.analysis.tables import means
from pflsim.display.metrics import rounded
from pflsim.records.predictions import PREDICTIONS

RNG = np.random.default_rng(0)
Z = scipy.stats.norm.ppf(0.975)


def placements(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The structural components of DeLong et al. (1988) of positives and negatives, by comparing all pairs."""
    a, b = scores[positive][:, None], scores[~positive]
    above = (a > b) + 0.5 * (a == b)
    return above.mean(1), above.mean(0)


def test_variance_of_an_auroc_is_that_of_delong_with_ties() -> None:
    y = RNG.random(80) < 0.3
    scores = (RNG.normal(size=80) + y).round(1)
    v10, v01 = placements(scores, y)
    variance, why = VARIANCES["auroc"](np.column_stack([-scores, scores]), y.astype(int))
    assert (variance, why) == (pytest.approx(v10.var(ddof=1) / len(v10) + v01.var(ddof=1) / len(v01)), "")


def test_variance_of_a_mean_over_classes_is_that_of_a_jackknife() -> None:
    y = RNG.integers(0, 3, 900)
    scores = scipy.special.softmax(2 * RNG.normal(size=(900, 3)) + np.eye(3)[y], axis=1)
    value = POOLED["auroc"](scores, y)
    assert value(np.ones(900)) == pytest.approx(np.mean([roc_auc_score(y == c, scores[:, c]) for c in range(3)]))
    without = np.array([value(1.0 - (np.arange(900) == row)) for row in range(900)])
    jackknife = 899 / 900 * ((without - without.mean()) ** 2).sum()
    assert VARIANCES["auroc"](scores, y)[0] == pytest.approx(jackknife, rel=0.02)


@pytest.mark.parametrize("metric", ["auroc", "rmse"])
def test_no_variance_below_five_rows(metric: str) -> None:
    y = np.array([1, 1, 1, 1] + [0] * 20 * (metric == "auroc"))
    scores = np.random.default_rng(0).normal(size=(len(y), 2 if metric == "auroc" else 1))
    variance, why = VARIANCES[metric](scores, y)
    assert np.isnan(variance) and why
    more = VARIANCES[metric](np.vstack([scores, scores[:1]]), np.append(y, 1))
    assert more[0] > 0 and not more[1]


def test_ends_of_intervals() -> None:
    """Logit of an AUROC, Wilson of a proportion, logarithm of an RMSE; none at 0 and 1."""
    value, nothing = np.array([0.8, 1.0, 0.0]), np.full(3, np.nan)
    low, high = interval("auroc", value, np.array([0.01, 0, 0]), nothing)
    assert [low[0], high[0]] == pytest.approx([expit(logit(0.8) + s * Z * 0.1 / 0.16) for s in (-1, 1)])
    assert np.isnan([*low[1:], *high[1:]]).all()
    low, high = interval("accuracy", np.array([0.3, 0.0]), nothing[:2], np.array([20.0, 7.0]))
    for n, (k, of) in enumerate([(6, 20), (0, 7)]):
        expected = scipy.stats.binomtest(k, of).proportion_ci(method="wilson")
        assert (low[n], high[n]) == pytest.approx((expected.low, expected.high), abs=1e-12)
    errors = RNG.normal(size=(4000, 1))
    variance, _ = VARIANCES["rmse"](errors, np.zeros(4000))
    assert variance == pytest.approx(1 / 8000, rel=0.1)
    ends = interval("rmse", np.array([2.0]), np.array([variance]), nothing[:1])
    assert np.log(np.array(ends) / 2).ravel() == pytest.approx([-Z * variance**0.5 / 2, Z * variance**0.5 / 2])


@pytest.mark.parametrize("seed", range(6))
def test_random_effects_are_those_of_statsmodels(seed: int) -> None:
    """Where its τ² is negative, those of its fixed effect, with the interval of Hartung and Knapp."""
    meta = pytest.importorskip("statsmodels.stats.meta_analysis")
    rng = np.random.default_rng(seed)
    v = rng.uniform(0.05, 0.5, 8)
    y = rng.normal(0, np.sqrt(v * 0.3) if seed % 2 else np.sqrt(v + 2))
    with np.errstate(invalid="ignore"):
        theirs = meta.combine_effects(y, v, method_re="dl")
        kind = "random" if theirs.q >= 7 else "fixed"
        assert kind == ("fixed" if seed % 2 else "random")
        mean = theirs.mean_effect_re if kind == "random" else theirs.mean_effect_fe
        error = theirs.sd_eff_w_re_hksj if kind == "random" else theirs.sd_eff_w_fe_hksj
    ours, half = random_effects(y, v), scipy.stats.t.ppf(0.975, 7) * error
    assert [ours["mean"], ours["low"], ours["high"]] == pytest.approx([mean, mean - half, mean + half])
    assert [ours["tau2"], ours["i2"]] == pytest.approx([max(theirs.tau2, 0), max(theirs.i2, 0)])


def test_scales_of_random_effects_and_clients_left_out() -> None:
    """The logit with ½ added of a proportion, the logarithm of an RMSE; a client without a variance does not count."""
    k, n = np.array([3, 9, 10, 5]), np.array([10, 12, 10, 6])
    y, v = np.log((k + 0.5) / (n - k + 0.5)), 1 / (k + 0.5) + 1 / (n - k + 0.5)
    found = random_effects_mean("accuracy", k / n, np.full(4, np.nan), n)
    expected = random_effects(y, v)
    assert [found[key] for key in ("mean", "low", "high")] == pytest.approx(
        [expit(expected[key]) for key in ("mean", "low", "high")]
    )
    assert (found["tau2"], found["left_out"]) == (pytest.approx(expected["tau2"]), 0)
    value, variance = np.array([2.0, 3.0, 4.0, 0.0]), np.array([0.1, 0.2, np.nan, 0.1])
    found = random_effects_mean("rmse", value, variance, np.full(4, np.nan))
    expected = random_effects(np.log(value[:2]), variance[:2] / value[:2] ** 2)
    assert (found["mean"], found["left_out"]) == (pytest.approx(np.exp(expected["mean"])), 2)
    assert random_effects_mean("auroc", np.array([0.5, 1.0]), np.array([0.1, 0.0]), np.full(2, np.nan)) == {}


def test_pooled_metrics_of_drawn_clients() -> None:
    """A row that counts twice is there twice. The interval is that of the clients: their rows repeat each other."""
    y, clients = (RNG.random(300) < 0.4).astype(int), np.arange(300) % 12
    p = expit(RNG.normal(size=300) + 0.5 * y)[:, None]
    scores, counts = np.hstack([1 - p, p]), RNG.integers(0, 3, 300)
    twice = np.repeat(np.arange(300), counts)
    line = logit(p[twice, 0])[:, None]
    fitted = LogisticRegression(C=np.inf, tol=1e-10).fit(line, y[twice])
    assert POOLED["auroc"](scores, y)(counts.astype(float)) == pytest.approx(roc_auc_score(y[twice], p[twice, 0]))
    assert POOLED["calibration_slope"](scores, y)(counts.astype(float)) == pytest.approx(fitted.coef_.item(), abs=1e-4)
    shift = POOLED["calibration_intercept"](scores, y)(counts.astype(float))
    assert expit(line + shift).mean() == pytest.approx(y[twice].mean())
    values = RNG.normal(size=(300, 2))
    rmse = np.sqrt((values[twice] ** 2).mean(0)).mean()
    assert POOLED["rmse"](values, np.zeros((300, 2)))(counts.astype(float)) == pytest.approx(rmse)
    means = RNG.normal(size=12)
    low, high = cluster_bootstrap(clients, lambda counts: float(counts @ means[clients] / counts.sum()))
    assert [low, high] == pytest.approx(means.mean() + Z * means.std() / 12**0.5 * np.array([-1, 1]), abs=0.1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two seeds with four sites: in site b, x decides the class; site c has few of class yes."""
    folder, rng = tmp_path_factory.mktemp("sites"), np.random.default_rng(0)
    frame = DataFrame({"x": rng.normal(size=400), "site": ["a"] * 200 + ["b"] * 60 + ["c"] * 40 + ["d"] * 100})
    yes = np.where(frame["site"] == "b", frame["x"] > 0, frame["x"] + rng.normal(size=400) > 0)
    frame.assign(y=np.where(yes & ((frame.index < 265) | (frame.index > 299)), "yes", "no")).to_csv(
        folder / "t.csv", index=False
    )
    words = [f"data.path={folder / 't.csv'}", "data.label=y", "data.client=site"]
    settings: dict[str, Any] = dict(data="table", executor="inline", progress="none", model="linear", rounds=2, lr=0.3)
    eval_ = {"primary": "auroc", "metrics": ["calibration_slope"], "threshold": "sensitivity:0.8"}
    return [
        pflsim.run(method="fedavg", seed=seed, eval=eval_, overrides=words, run_dir=folder / f"{seed}", **settings)
        for seed in (0, 1)
    ]


def of_delong(run: Any, client: int) -> tuple[float, float]:
    """AUROC and variance of a site in the last round."""
    rows = run.predictions().query("when == 'last' and reported and client == @client")
    v10, v01 = placements(rows["score_1"].to_numpy(), rows["target"].to_numpy() == 1)
    return v10.mean(), v10.var(ddof=1) / len(v10) + v01.var(ddof=1) / len(v01)


def of_threshold(run: Any, client: int) -> Any:
    return run.predictions().query("when == 'last' and reported and client == @client")


def on_logit_scale(value: float, variance: float) -> list[float]:
    return [*expit(logit(value) + Z * variance**0.5 / value / (1 - value) * np.array([-1, 1]))]


def test_columns_of_per_client(runs: Any) -> None:
    frame = runs[0].per_client()
    frame = frame[frame["reported"] & (frame["split"] == "test")].set_index(["round", "client"])
    own = frame.loc[(1, 1)]
    expected = scipy.stats.binomtest(own["correct"], own["total"]).proportion_ci(method="wilson")
    assert [own["accuracy_low"], own["accuracy_high"]] == pytest.approx([expected.low, expected.high])
    assert frame.loc[(2, 0), ["auroc_low", "auroc_high"]].tolist() == pytest.approx(
        on_logit_scale(*of_delong(runs[0], 0)), rel=1e-5
    )
    assert "0 or 1" in frame.loc[(2, 1), "auroc_why"] and "5 test rows" in frame.loc[(2, 2), "auroc_why"]
    yes = of_threshold(runs[0], 0)["score_1"] >= frame.loc[(2, 0), "threshold"]
    right = int(yes[of_threshold(runs[0], 0)["target"] == 1].sum())
    ends = scipy.stats.binomtest(right, int(yes.sum())).proportion_ci(method="wilson")
    assert frame.loc[(2, 0), ["ppv", "ppv_low", "ppv_high"]].tolist() == pytest.approx([right / yes.sum(), *ends])
    assert runs[0].per_client().query("split != 'test'")["accuracy_low"].isna().all()


def test_clients_over_seeds(runs: Any) -> None:
    """Means of values and of variances, which are not divided by the number of seeds, in one interval."""
    compared = pflsim.compare(runs, at="last")
    found: Any = compared.clients().set_index("client")
    value, variance = np.mean([of_delong(run, 0) for run in runs], 0)
    ends = [found.loc["a", f"FedAvg{key}"] for key in ("", " low", " high")]
    assert ends == pytest.approx([value, *on_logit_scale(value, variance)], rel=1e-5)
    assert "0 or 1" in found.loc["b", "FedAvg why"] and "5 test rows" in found.loc["c", "FedAvg why"]
    counts = [run.partition["class_counts"][0] for run in runs]
    each = [run.per_client().query("round == 2 and client == 0 and split == 'test' and reported") for run in runs]
    share, n = np.mean([own["specificity"].item() for own in each]), np.mean([own["test"][0] for own in counts])
    ends = [found.loc["a", f"FedAvg specificity{key}"] for key in ("", " low", " high")]
    assert ends == pytest.approx([share, *np.ravel(interval("accuracy", share, np.array([np.nan]), n))])
    assert found.loc["a", "test"] == np.mean([sum(own["test"]) for own in counts])
    assert found.loc["a", "positives"] == np.mean(
        [sum(own[k][1] for k in ("train", "val", "test")) / 200 for own in counts]
    )


def test_a_share_of_no_rows_in_a_seed_has_no_interval(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, (comparison,) = Run.estimates, pflsim.compare(runs, at="last")

    def estimates(run: Run, metric: str, rows: Any) -> Any:
        found = real(run, metric, rows)
        return found.assign(n=np.nan, value=np.nan, why="none") if run.seed else found

    before = client_intervals(comparison, metric="ppv")["FedAvg"]
    monkeypatch.setattr(Run, "estimates", estimates)
    after = client_intervals(comparison, metric="ppv")["FedAvg"]
    assert before["low"].notna().any() and after[["low", "high"]].isna().all(axis=None) and {*after["why"]} == {"none"}


@pytest.mark.parametrize("suffix", ["csv", "tex", "md", "txt"])
def test_the_table_of_clients(suffix: str, runs: Any, tmp_path: Path) -> None:
    """A line per client; in text with the interval, or a letter for the reason why it has none."""
    folders, out = [str(run.folder) for run in runs], tmp_path / f"t.{suffix}"
    assert cli.main(["compare", *folders, "--clients", "--at", "last", "--out", str(out)]) == 0
    text = out.read_text()
    if suffix == "csv":
        assert [row["client"] for row in csv.DictReader(io.StringIO(text))] == [*"abcd"]
        return
    lines = {site: next(line for line in text.splitlines() if re.match(rf"\W*{site}\b.*\d", line)) for site in "abc"}
    assert re.search(r"0\.\d+ \[0\.\d+, 0\.\d+\]", lines["a"])
    letters = [re.findall(r"\([a-z]\)", lines[site])[0] for site in "bc"]
    assert letters[0] != letters[1] and all(text.count(letter) == 2 for letter in letters)


def test_means_over_clients_and_over_all_rows(runs: Any) -> None:
    """Of each seed, and then over the seeds, in the records, the tables and the report."""
    compared = pflsim.compare(runs, at="last")
    (record,) = compared.records().to_dict("records")
    found = []
    for run in runs:
        value, variance = np.transpose([of_delong(run, client) for client in (0, 3)])
        found.append(expit(random_effects(logit(value), variance / (value * (1 - value)) ** 2)["mean"]))
    assert record["random_effects_mean"] == pytest.approx(np.mean(found), rel=1e-5)
    assert record["random_effects_left_out"] == 2 and "2" in means(compared[0]).rows[0]
    each = []
    for run in runs:
        rows = run.predictions().query("when == 'last' and reported")
        statistic = POOLED["auroc"](rows.filter(like="score_").to_numpy(), rows["target"].to_numpy())
        each.append(cluster_bootstrap(rows["client"].to_numpy(), statistic))
    assert [record[f"pooled_auroc_{key}"] for key in ("low", "high")] == pytest.approx(np.mean(each, 0), rel=1e-6)
    assert record["pooled_auroc_low"] < record["pooled_auroc"] < record["pooled_auroc_high"]
    assert record["pooled_calibration_slope_low"] < record["pooled_calibration_slope_high"]
    compared, page = pflsim.compare(runs), pflsim.report(runs).read_text()
    (record,) = compared.records().to_dict("records")
    for name in ("auroc", "calibration_slope"):
        text = f"[{rounded(record[f'pooled_{name}_low'])}, ".replace("-", "−")
        assert text in repr(compared) and text in page


def test_a_run_without_predictions(runs: Any, tmp_path: Path) -> None:
    """What needs them is empty, and a line says why; intervals of accuracy need none."""
    folder = tmp_path / "run"
    shutil.copytree(runs[0].folder, folder)
    (folder / PREDICTIONS).unlink()
    compared = pflsim.compare(folder, at="last")
    found: Any = compared.clients()
    assert found["FedAvg"].notna().all() and found["FedAvg low"].isna().all()
    assert {*found["FedAvg why"]} == {UNSCORED} and UNSCORED in " ".join(repr(compared).split())
    assert "pooled_auroc_low" not in list(compared.records()) and UNSCORED in pflsim.report(folder).read_text()
    rows: Any = pflsim.load(folder)[0].per_client().query("split == 'test'")
    assert rows["accuracy_low"].notna().all()


@pytest.mark.parametrize("n", [40, 100, 400])
@pytest.mark.slow
def test_intervals_of_an_auroc_cover_the_truth(n: int) -> None:
    """Of 2,000 clients with 20 to 50% positives and normal scores, so that the AUROC is Φ(d/√2)."""
    rng, covered, known = np.random.default_rng(n), 0, 0
    for _ in range(2000):
        truth, y = rng.uniform(0.6, 0.85), rng.permutation(n) < round(n * rng.uniform(0.2, 0.5))
        score = rng.normal(size=n) + y * 2**0.5 * scipy.stats.norm.ppf(truth)
        scores = np.column_stack([-score, score])
        variance, _ = VARIANCES["auroc"](scores, y.astype(int))
        value = POOLED["auroc"](scores, y.astype(int))(np.ones(n))
        ((low,), (high,)) = interval("auroc", np.array([value]), np.array([variance]), np.full(1, np.nan))
        covered, known = covered + (low < truth < high), known + np.isfinite(low)
    assert known > 1980 and (0.93 <= covered / known <= 0.97 if n >= 100 else covered / known >= 0.91)
