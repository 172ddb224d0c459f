import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_runs import made

from pflsim.analysis.comparison import compare
from pflsim.analysis.groups import check_comparable, group_runs
from pflsim.analysis.runs import Run, incomplete, read_run
from pflsim.analysis.tables import notes, remarks
from pflsim.config.settings import Checkpoint, Eval, Placement
from pflsim.errors import SettingsError

ONE = [[(5, 10), (6, 10)]]
Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a run into a folder of its own and reads it back."""
    numbers = itertools.count()
    return lambda test=ONE, **settings: made(tmp_path / f"r{next(numbers)}", test, **settings)


def labels(*runs: Run) -> list[str]:
    return [group.label for group in group_runs(runs)]


def objections(*runs: Run) -> list[str]:
    return check_comparable(group_runs(runs))


def test_seeds_make_a_group(make: Make) -> None:
    runs = [make(method=m, seed=s) for s, m in itertools.product((2, 0, 1), ("local", "fedavg"))]
    local, fedavg = group_runs(runs)
    assert (local.label, local.name, local.method, local.settings) == ("Local", "local", "local", {})
    assert fedavg.label == "FedAvg"
    assert local.seeds == fedavg.seeds == (0, 1, 2)
    assert local.runs == (runs[2], runs[4], runs[0])
    assert check_comparable([local, fedavg]) == []


@pytest.mark.parametrize(
    ("split", "named"),
    [
        ({"test_by": "labels", "stratify": True}, True), ({"test_by": "clients", "stratify": True}, False),
        ({"stratify": True}, True), ({"stratify": False}, False), ({}, False),
    ],
)  # fmt: skip
def test_rows_that_favour_personal_models_are_named(split: dict[str, Any], named: bool, make: Make) -> None:
    runs = [make(method=method, parts={"split": split}, names={"split": "drawn"}) for method in ("local", "fedavg")]
    found = [line for line in remarks(compare(group_runs(runs))) if line.startswith("split=drawn")]
    assert len(found) == named


def test_what_changes_no_result_makes_no_group(make: Make) -> None:
    first = make()
    others = [
        {"executor": "inline"}, {"run_dir": "there"}, {"placement": Placement(actors=2)}, {"on_client_error": "drop"},
        {"checkpoint": Checkpoint(every=3)}, {"names": {"placement": "packed"}}, {"names": {"experiment": "x"}},
        {"parts": {"data": {"root": "there", "path": "here", "download": True}}}, {"eval": Eval(models=["global"])},
        {"sets": {"others": ONE}},
    ]  # fmt: skip
    runs = [make(seed=seed, **other) for seed, other in enumerate(others, start=1)]
    (group,) = group_runs([first, *runs])
    assert group.seeds == tuple(range(11))


@pytest.mark.parametrize(
    ("setting", "label"),
    [
        ({"lr": 0.5}, "FedAvg lr=0.5"),
        ({"momentum": 0.9, "local_steps": 3}, "FedAvg local_epochs=null local_steps=3 momentum=0.9"),
        ({"lockstep": False}, "FedAvg lockstep=false"),
        ({"init": "per_client"}, "FedAvg init=per_client"),
        ({"parts": {"method": {"mu": 0.1}}}, "FedAvg mu=0.1"),
        ({"parts": {"model": {"hidden": [8, 4]}}}, "FedAvg model.hidden=[8,4]"),
        ({"eval": Eval(holdout_clients=1)}, "FedAvg eval.holdout_clients=1"),
    ],
)
def test_a_setting_makes_a_group_and_is_in_its_label(make: Make, setting: dict[str, Any], label: str) -> None:
    assert label in labels(make(), make(**setting))


def test_a_run_from_before_a_setting_has_its_default(make: Make) -> None:
    """A component and a section that its config.yaml lacks; the same settings given make the same group."""
    old, new = make(seed=0), make(seed=1)
    other = make(seed=0, uplink={"_target_": "pflsim.transforms.compression.Sign"})
    config = yaml.safe_load((old.folder / "config.yaml").read_text())
    lacking = {key: value for key, value in config.items() if key not in ("uplink", "participation")}
    (old.folder / "config.yaml").write_text(yaml.safe_dump(lacking, sort_keys=False))
    old = read_run(old.folder)
    assert labels(old, new) == ["FedAvg"] and old.untrained(1) == set()
    assert labels(old, other) == ["FedAvg uplink=none", "FedAvg uplink=Sign"]


def test_settings_of_another_part_are_not_listed(make: Make) -> None:
    """What follows from the method, or the model, is not what sets the groups apart."""
    runs = [
        make(method="fedprox", parts={"method": {"mu": 0.1}}),
        make(method="fedavg", parts={"model": {"_target_": "e.Cnn", "width": 3}}, names={"model": "cnn"}),
        make(method="fedavg"),
    ]
    assert labels(*runs) == ["FedProx model=mlp", "FedAvg model=cnn", "FedAvg model=mlp"]


def test_settings_of_the_same_method_are_listed_for_it_alone(make: Make) -> None:
    """The learning rate, which is tuned for each method, counts among them."""
    runs = [make(method="fedprox", lr=lr, parts={"method": {"mu": mu}}) for mu, lr in ((0.1, 0.5), (1e-5, 0.1))]
    assert labels(make(method="local", lr=0.2), *runs) == ["Local", "FedProx lr=0.5 mu=0.1", "FedProx lr=0.1 mu=1e-05"]


def test_learning_rates_that_labels_lack_are_noted_by_value(make: Make) -> None:
    runs = [make(method=m, lr=r, clip_grad_norm=c) for m, r in (("local", 0.3), ("fedavg", 0.9)) for c in (1.0, 2.0)]
    note = next(line for line in notes(compare(group_runs(runs))) if line.startswith("lr:"))
    assert note == "lr: 0.3 (Local), 0.9 (FedAvg)"


def test_noise_that_follows_from_epsilon_is_in_no_label(make: Make) -> None:
    spent = ({"noise": 0.7, "epsilon": 8.0}, {"noise": 2.1, "epsilon": 1.0})
    runs = [make(privacy=each, names={"privacy": "client"}) for each in spent]
    assert [set(group.settings) for group in group_runs(runs)] == [{"privacy.epsilon"}] * 2


def test_methods_with_the_same_name_for_readers(make: Make) -> None:
    assert labels(make(method="local"), make(method="a.Mine"), make(method="ditto+fedadam")) == [
        "Local", "Mine", "Ditto+FedAdam",
    ]  # fmt: skip
    assert labels(make(method="local"), make(method="a.Mine"), make(method="b.Mine")) == ["local", "a.Mine", "b.Mine"]


def test_a_repeated_run_counts_once(make: Make) -> None:
    two = [[(5, 10), (6, 10)], [(7, 10), (6, 10)]]
    part, first, again = make(ONE, complete=False, rounds=2), make(two), make(two, executor="inline")
    (group,) = group_runs([part, first, again])
    assert group.runs == (first,)
    assert {run.folder for run in group.left_out} == {part.folder, again.folder}
    longer = make([*two, *two], complete=False, rounds=9)
    (group,) = group_runs([make(two, complete=False, rounds=9), longer])
    assert group.runs == (longer,)


@pytest.mark.parametrize("other", [{"test": [[(5, 10), (7, 10)]]}, {"up": 11}])
def test_two_runs_that_should_be_the_same_and_differ(make: Make, other: dict[str, Any]) -> None:
    runs = [make(), make(seed=1), make(**other)]
    with pytest.raises(SettingsError, match="FedAvg with seed 0") as error:
        group_runs(runs)
    assert str(runs[0].folder) in str(error.value) and str(runs[2].folder) in str(error.value)


def test_another_partition_in_memory(make: Make) -> None:
    """Runs with equal settings and seeds on other examples are unlike, and no error."""
    groups = group_runs([make(), make(digest="f" * 64)])
    assert [group.label for group in groups] == [f"FedAvg partition_hash={d * 8}" for d in "0f"]
    assert "partition hash" in "".join(check_comparable(groups))


# What cannot be compared ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alphas", "why"), [((0.1, 1), "partition.alpha=0.1 or 1"), ((1, 1), "11111111.* 22222222")])
def test_another_partition(make: Make, alphas: tuple[float, float], why: str) -> None:
    """Also with equal names and settings: other data behind the name, or another version."""
    runs = [
        make(method=m, digest=d * 64, parts={"partition": {"alpha": a}})
        for m, d, a in zip("ab", "12", alphas, strict=True)
    ]
    (found,) = objections(*runs)
    assert re.search(why, found)


def test_other_settings_with_the_same_examples(make: Make) -> None:
    """The hash decides, where there is one: standardised pixels are the same examples."""
    assert objections(make(method="a"), make(method="b", parts={"data": {"standardize": True}})) == []


def test_other_seeds(make: Make) -> None:
    (why,) = objections(make(method="a"), make(method="a", seed=1), make(method="b"))
    assert "[0,1] (a), [0] (b)" in why


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"every": 2}, "eval.every=1 or 2"),
        ({"on": "participants"}, "eval.clients=all or participants"),
        ({"eval": Eval(holdout_clients=1)}, "eval.holdout_clients=0 or 1"),
        ({"eval": Eval(severity=5)}, "eval.severity=3 or 5"),
    ],
)
def test_another_evaluation(make: Make, settings: dict[str, Any], why: str) -> None:
    assert why in objections(make(method="a"), make(method="b", rounds=settings.get("every", 1), **settings))[0]


def test_other_participants(make: Make) -> None:
    runs = [make(method=m, on="participants", fraction=f) for m, f in (("a", 1.0), ("b", 0.5))]
    (why,) = objections(*runs)
    assert "eval.clients=participants" in why and "fraction=1.0 or 0.5" in why
    assert objections(make(method="a"), make(method="b", fraction=0.5)) == []


def test_an_incomplete_run(make: Make) -> None:
    stopped = make(method="b", rounds=3, complete=False)
    assert objections(make(method="a", rounds=3), stopped) == []
    assert list(incomplete([make(), stopped])) == [f"{stopped.folder} is not complete: 1 of 3 rounds are done"]


def test_other_budgets_can_be_compared(make: Make) -> None:
    assert objections(make(method="a", lr=0.1), make(method="b", rounds=9, lr=1.0, batch_size=7, fraction=0.5)) == []
