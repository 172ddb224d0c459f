"""The sentences at the top of a report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from made_runs import made

from pflsim.analysis.comparison import compare
from pflsim.analysis.groups import Group, group_runs
from pflsim.analysis.report.page import sentences


def group(folder: Path, rights: list[int], method: str, total: int = 100, **settings: object) -> Group:
    """One run of one round: how many examples every client gets right."""
    run = made(folder / method, [[(right, total) for right in rights]], method=method, **settings)
    (found,) = group_runs([run])
    return found


def said(*groups: Group) -> list[str]:
    return sentences(compare(groups))


def test_who_is_best_and_what_is_clear(tmp_path: Path) -> None:
    rights = np.arange(30) + 40
    noise = np.random.default_rng(4).permutation([-1, 1] * 15)
    found = said(
        group(tmp_path, rights.tolist(), "local", up=0, down=0),
        group(tmp_path, (rights + 20).tolist(), "ahead", up=1000, down=1000),
        group(tmp_path, (rights - 20).tolist(), "behind", up=5000, down=5000),
        group(tmp_path, (rights + noise).tolist(), "level", up=10, down=10),
    )
    best, differences, traffic = found
    assert "mean accuracy: ahead (0.745)" in best and "worst decile: ahead (0.610)" in best
    assert "local" in differences
    for what, method in (("higher for", "ahead"), ("lower for", "behind"), ("not clear for", "level")):
        assert f"{what} {method}" in differences
    assert "0 B (local)" in traffic and "300 kB (behind)" in traffic


def test_without_pairs_nothing_is_said_of_differences(tmp_path: Path) -> None:
    runs = group(tmp_path, [60] * 10, "local"), group(tmp_path, [10] * 10, "ditto", digest="f" * 64)
    assert not any("clear" in sentence for sentence in said(*runs))


def test_equal_figures_name_both(tmp_path: Path) -> None:
    best, *_ = said(group(tmp_path, [50] * 10, "one"), group(tmp_path, [50] * 10, "two"))
    assert "one and two (0.500)" in best


def test_one_method_alone(tmp_path: Path) -> None:
    (only,) = said(group(tmp_path, [60, 100], "fedavg"))
    assert "0.800" in only and "0.600" in only and "60 B" in only


def test_no_claim_about_unlike_runs(tmp_path: Path) -> None:
    """With other seeds there are pairs, and the banner says that the runs should not be compared."""
    runs = [
        made(tmp_path / f"{m}{s}", [[(70 - 20 * s, 100)] * 9], method=m, seed=s)
        for m, s in (("a", 0), ("b", 0), ("b", 1))
    ]
    groups = group_runs(runs)
    assert not any(name in " ".join(said(*groups)) for name in ("Highest", "higher", "lower"))
