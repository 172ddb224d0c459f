"""Attacks: by hand, and against ByzFL where it is installed."""

from itertools import pairwise

import pytest
import torch

from pflsim.attacks import Alie, Attack, Backdoor, Ipm, LabelFlip, RandomLabels, RandomUpdate, Replacement, SignFlip
from pflsim.attacks import largest_z as z_of
from pflsim.data.federated import Examples
from pflsim.errors import SettingsError

CHANGE = {"a": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.tensor([[3.0]], dtype=torch.float64)}


def test_larger_fractions_contain_smaller_ones() -> None:
    each = [{*Attack(fraction=f / 10).attackers(3, 10)} for f in range(6)]
    assert [len(own) for own in each] == [0, 1, 2, 3, 4, 5] and all(a < b for a, b in pairwise(each))
    assert each[3] != {*Attack(fraction=0.3).attackers(4, 10)}


def images(n: int = 400, classes: int = 4) -> Examples:
    y = torch.arange(n) % classes
    return Examples(torch.zeros(n, 1, 6, 6, dtype=torch.uint8), y)


def test_labels() -> None:
    given = images()
    assert LabelFlip().poisoned(given, 4, 0, 1).y.tolist() == [3, 2, 1, 0] * 100
    drawn = RandomLabels().poisoned(given, 4, 0, 1).y
    assert torch.bincount(drawn).tolist() == pytest.approx([100] * 4, abs=40) and 200 < (drawn != given.y).sum() < 380
    assert torch.equal(drawn, RandomLabels().poisoned(given, 4, 0, 1).y)
    assert not torch.equal(drawn, RandomLabels().poisoned(given, 4, 0, 2).y)
    two = images(classes=2)
    assert torch.equal(RandomLabels().poisoned(two, 2, 0, 1).y, 1 - two.y)


def test_a_backdoor() -> None:
    given, attack = images(), Backdoor(ratio=0.5, target=2, size=3)
    found = attack.poisoned(given, 4, 0, 1)
    marked = (found.x != 0).flatten(1).any(1)
    assert marked.sum() == 150 and (found.y[marked] == 2).all() and (given.y[marked] != 2).all()
    assert torch.equal(found.y[~marked], given.y[~marked]) and not given.x.any()
    image = found.x[marked][0, 0]
    assert (image[3:, 3:] == 255).all() and image.sum() == 9 * 255
    for wrong in (Backdoor(target=4), Backdoor(size=7)):
        with pytest.raises(SettingsError, match="attack"):
            wrong.poisoned(given, 4, 0, 1)


def test_changes() -> None:
    generator = torch.Generator().manual_seed(0)
    assert SignFlip(scale=2).changed(CHANGE, generator, 5)["a"].tolist() == [-2, 4]
    assert Replacement().changed(CHANGE, generator, 5)["b"].tolist() == [[15]]
    assert Replacement(boost=2).changed(CHANGE, generator, 5)["b"].tolist() == [[6]]
    assert Backdoor(boost=3).changed(CHANGE, generator, 5)["a"].tolist() == [3, -6]
    large = {"a": 5 + 3 * torch.randn(20_000, dtype=torch.float64, generator=generator)}
    for attack, spread in ((RandomUpdate(), 3.0), (RandomUpdate(tau=0.5), 0.5)):
        drawn = attack.changed(large, generator, 5)["a"]
        assert drawn.std().item() == pytest.approx(spread, rel=0.03) and abs(drawn.mean().item()) < 0.1


def test_colluding_clients() -> None:
    benign = [{"a": torch.tensor([1.0, 0.0])}, {"a": torch.tensor([3.0, 4.0])}]
    known = {"a": torch.tensor([1.0, 1.0])}
    deviation = torch.tensor([2.0, 8.0]).sqrt()
    assert torch.allclose(Alie().colluded(benign, known, 1)["a"], torch.tensor([2.0, 2.0]) - 1.5 * deviation)
    assert Alie().colluded(benign[:1], known, 1)["a"].tolist() == [1, 0]
    assert Ipm().colluded(benign, known, 1)["a"].tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("clients", "malicious", "z"), [(50, 24, 1.4261), (51, 12, 0.3612), (20, 8, 0.6745), (20, 4, 0.1573), (10, 2, 0)]
)
def test_the_largest_z(clients: int, malicious: int, z: float) -> None:
    assert z_of(clients, malicious) == pytest.approx(z, abs=1e-4)


def test_as_byzfl() -> None:
    byzfl = pytest.importorskip("byzfl")
    rows = torch.randn(9, 37, generator=torch.Generator().manual_seed(0))
    benign, zero = [{"a": row.double()} for row in rows], {"a": torch.zeros(37, dtype=torch.float64)}
    for ours, theirs in (
        (Alie(z=1.5).colluded(benign, zero, 2), byzfl.ALittleIsEnough(tau=-1.5)),
        (Ipm(scale=2.0).colluded(benign, zero, 2), byzfl.InnerProductManipulation(tau=2.0)),
    ):
        assert torch.allclose(ours["a"].float(), torch.as_tensor(theirs(rows)), atol=4e-6)
