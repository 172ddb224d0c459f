"""What is said of made-up differences: who is named as what, and with which numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pflsim.analysis.differences import Difference, Family, SeedTest
from pflsim.analysis.groups import Group
from pflsim.analysis.verdict import over_benchmarks, sentences, winners

ERRORS = {"clear": 0.06, "only": 0.46, "not": 0.46}
"""Standard errors over seeds, as parts of the mean."""


def family(
    differences: Mapping[str, tuple[float, str]],
    pairs: int = 30,
    seeds: int = 3,
    local: str = "local",
    metric: str = "accuracy",
    higher: bool = True,
) -> Family:
    """The differences to a reference by name: the mean, and "clear", "only" (on these clients) or "not"."""
    found = []
    for name, (mean, level) in differences.items():
        spread, p = sorted((0.8 * mean, 1.2 * mean)), 0.5 if level == "not" else 0.001
        low, high = (-1.0, 1.0) if level == "not" else spread
        test = SeedTest(None, mean, ERRORS[level] * abs(mean), 2.0) if seeds > 1 else None
        test = test and replace(test, p_holm=test.p)
        group = Group(name, name, {}, ())
        found.append(Difference(group, pairs, mean, (mean,) * seeds, low, high, 20, 0, 10, p, p, test))
    run: Any = SimpleNamespace(primary=metric, higher=higher)
    return Family(Group(local, local, {}, (run,)), tuple(found))


def said(
    differences: Mapping[str, tuple[float, str]],
    base: float = 0.7,
    tied: Sequence[str] = ("a",),
    higher: bool = True,
    local: str = "local",
    lead: str = "",
    **settings: Any,
) -> str:
    means = {name: base + mean for name, (mean, _) in differences.items()} | {local: base}
    ordered = dict(sorted(means.items(), key=lambda item: -item[1] if higher else item[1]))
    return " ".join(sentences(ordered, family(differences, local=local, higher=higher, **settings), tied, lead=lead))


def test_one_is_clear() -> None:
    found = said({"a": (0.101, "clear"), "b": (0.02, "not")})
    assert "Only a is clearly better than local (0.700): 0.801, 10.1 points above" in found
    assert "b" not in found.split() and "open" not in found
    assert said({"a": (0.101, "clear")}).startswith("a is clearly better than local")


def test_a_few_are_clear_and_some_worse() -> None:
    found = said({"b": (0.05, "clear"), "a": (0.1, "clear"), "c": (0.01, "not"), "d": (-0.1, "clear")})
    assert "2 of 4 methods are clearly better" in found and "a by 10.0 points and b by 5.0." in found
    assert "d is clearly worse than local." in found and "c" not in found.split()


def test_none_is_clear() -> None:
    assert said({"a": (0.1, "not")}) == "No method is clearly better than local (0.700)."
    found = said({name: (-0.1, "clear") for name in "abcde"} | {"f": (0.1, "not")})
    assert "No method" in found and "5 methods are clearly worse" in found
    assert "b and a are clearly worse" in said({"a": (-0.1, "clear"), "b": (-0.2, "clear"), "c": (0.1, "not")})


@pytest.mark.parametrize(
    ("differences", "seeds", "chosen"),
    [
        ({"a": (0.1, "clear"), "b": (0.05, "clear")}, 3, True),
        ({"a": (0.1, "not"), "b": (0.05, "not")}, 1, True),
        ({"a": (0.1, "not"), "b": (0.05, "not")}, 3, False),  # the best is not compared with local
        ({"a": (-0.1, "clear"), "b": (-0.05, "not")}, 1, False),
        ({"a": (0.1, "clear")}, 3, False),  # one method is no choice
    ],
)
def test_the_best_of_several_is_a_choice_on_test_data(
    differences: Mapping[str, tuple[float, str]], seeds: int, chosen: bool
) -> None:
    assert ("a is the best of 3 on test data" in said(differences, seeds=seeds)) == chosen


def test_what_cannot_be_told_apart_from_the_best() -> None:
    differences = {name: (0.2 - n / 100, "clear") for n, name in enumerate("abcdef")}
    assert "open: b and c cannot be told apart from a" in said(differences, tied="abc")
    assert "open: 5 methods cannot be told apart from a" in said(differences, tied="abcdef")
    alone = said(differences, tied="a")
    assert "open" not in alone and "a is ahead of the next, b, by 1.0 points, on these clients" in alone
    assert "a is clearly ahead of the next, b, by 1.0 points." in said(differences, tied="a", lead="clear")
    assert "the next" not in said(differences, tied="a", lead="not clear")


def test_the_seeds_disagree() -> None:
    found = said({"a": (0.1, "only"), "b": (-0.1, "only"), "c": (-0.2, "only")})
    assert "No method is clearly better" in found and "3 seeds" in found
    assert "a is ahead of local" in found and "c and b are behind local" in found


def test_one_seed() -> None:
    found = said({"a": (0.1, "clear"), "b": (0.05, "not")}, seeds=1)
    assert "a has the highest accuracy: 0.800, 10.0 points above local (0.700)" in found
    assert "clearly" not in found and "at least three" in found and "pairs" not in found
    assert "local has the highest accuracy: 0.700." in said({"a": (-0.1, "clear")}, seeds=1)
    assert "a and b have the highest" in said({"a": (0.1, "not"), "b": (0.1, "not")}, seeds=1)


@pytest.mark.parametrize(
    ("pairs", "tests", "least", "needed", "seeds"),
    [(5, 1, "0.062", 6, 4), (8, 11, "0.086", 9, 4), (3, 1, "0.25", 6, 6)],
)
def test_a_correction_that_few_clients_cannot_pass(pairs: int, tests: int, least: str, needed: int, seeds: int) -> None:
    """The pairs are those of three seeds."""
    found = said({f"m{n}": (0.1 - n / 100, "not") for n in range(tests)}, pairs=pairs)
    assert "m0 has the highest accuracy: 0.800" in found and "clearly" not in found
    assert f"at least {least} over {pairs} pairs" in found and f"{needed} are needed, that is {seeds} seeds" in found
    assert "pairs" not in said({f"m{n}": (0.1, "not") for n in range(tests)}, pairs=needed)


def test_unlike_runs_are_not_compared() -> None:
    differences = {"a": (0.1, "clear")}
    found = sentences({"a": 0.8, "local": 0.7}, family(differences), ("a",), ["the seeds differ"])
    assert found == ["These runs cannot be compared: the seeds differ."]


def test_a_metric_of_which_lower_is_better() -> None:
    found = said({"a": (-0.101, "clear"), "b": (0.1, "clear"), "c": (0.2, "only")}, metric="rmse", higher=False)
    assert "Only a is clearly better" in found and "0.599, 0.101 below." in found
    assert "b is clearly worse" in found and "c is behind local" in found
    assert "a has the lowest RMSE: 0.599, 0.101 below" in said(
        {"a": (-0.101, "not")}, metric="rmse", higher=False, seeds=1
    )


def test_clear_winners_are_counted_in_each_benchmark() -> None:
    one = family({"a": (0.1, "clear"), "b": (-0.1, "clear"), "c": (0.1, "only")})
    error = family({"a": (-0.1, "clear"), "b": (-0.2, "clear"), "c": (0.1, "clear")}, higher=False)
    said = winners([("iid", one), ("dirichlet", error), ("rotation", family({"a": (0.1, "not")})), ("iid", error)])
    assert said.count("iid") == 2  # they differ in their evaluation
    for counted in ("1 of 3 methods with iid", "2 of 3 methods with dirichlet", "none of 1 method with rotation"):
        assert counted in said


def test_several_benchmarks_have_no_ranks() -> None:
    one = family({"a": (0.1, "clear"), "b": (0.1, "clear"), "c": (0.1, "clear"), "d": (0.1, "only")})
    two = family({"a": (0.1, "clear"), "b": (0.1, "not"), "c": (-0.1, "clear"), "d": (0.2, "not")})
    error = {higher: family({"a": (-0.1, "clear")}, higher=higher) for higher in (True, False)}
    lead, some, both, only = over_benchmarks([one, two]).split("; ")
    assert lead.startswith("a is clearly better than local") and "all benchmarks" in lead
    assert some.endswith("none: b") and both.endswith("others: c") and only.endswith("on these clients only: d.")
    assert over_benchmarks([family({"a": (0.1, "not")})] * 2).endswith("not clear in any: a.")
    assert over_benchmarks([one, error[False]]).startswith("a is clearly better")
    said = over_benchmarks([two, error[True]])
    assert said.startswith("No method is clearly better") and "worse in some, clearly better in none: c;" in said
