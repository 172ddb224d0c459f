"""A target of the wrong kind is refused before it is called."""

import itertools
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from support import settings_of

from lightning_modules.hosts.client_factory import MakesClient, MakesNet, MakesRule
from pflsim.config.components import resolve
from pflsim.data.dataset import Dataset, Loader, check_dataset
from pflsim.data.federate import PartitionRule, SplitRule, federate, load_federation
from pflsim.data.federated import Partition
from pflsim.data.partitions import iid
from pflsim.data.splits import official
from pflsim.errors import SettingsError

NUMBERS = itertools.count()
MINE = '''
    """Components of a user; one that is called leaves a file."""
    from __future__ import annotations
    import numpy as np
    from pathlib import Path
    from typing import Any
    from pflsim.data import dataset as sets
    from pflsim.data.dataset import Dataset as Data
    from pflsim.data.federated import Partition
    from lightning_modules.nets.mlp import Mlp
    from lightning_modules.methods.fedavg import FedAvg
    from pflsim.servers import fedavg
    from pflsim.servers.base import ServerRule

    Parts = list[np.ndarray]

    def called(*_: Any, **__: Any) -> Any:
        Path(__file__).with_suffix(".called").touch()

    def load() -> Data: called()
    def load_too(*, root: str = "") -> "sets.Dataset": called()
    def untyped(): called()
    def wrongly_typed() -> str: called()
    def needs(path) -> Data: called()
    def share(labels, num_classes, clients, rng, client_ids, *, alpha: float = 1.0) -> list[np.ndarray]: called()
    def share_too(labels, num_classes, clients, rng, client_ids=None) -> "Parts": called()
    def share_lists(labels, num_classes, clients, rng, client_ids) -> list[list[int]]: called()
    def share_four(labels, num_classes, clients, rng) -> list[np.ndarray]: called()
    def split(dataset, assign, rng, /) -> Partition: called()
    class Own(Mlp): ...
    class OwnAbstract(ServerRule): ...
    class OwnRule(fedavg.FedAvg): ...
    class OwnClient(FedAvg): ...
    class Other:
        def __init__(self, shape, classes): called()
    def net(input_shape, num_classes) -> Own: called()
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of components that leaves a file when one of them is called."""
    path = tmp_path / f"own_components_{next(NUMBERS)}.py"
    path.write_text(dedent(MINE))
    monkeypatch.syspath_prepend(tmp_path)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("load", Loader), ("load_too", Loader), ("share", PartitionRule), ("share_too", PartitionRule),
        ("split", SplitRule), ("Own", MakesNet), ("net", MakesNet), ("OwnRule", MakesRule), ("OwnClient", MakesClient),
    ],
)  # fmt: skip
def test_what_is_of_its_kind(mine: Path, name: str, kind: type) -> None:
    assert callable(resolve(f"{mine.stem}.{name}", kind))
    assert not mine.with_suffix(".called").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("untyped", Loader), ("wrongly_typed", Loader), ("Other", Loader), ("needs", Loader),
        ("load", PartitionRule), ("share_lists", PartitionRule), ("share_four", PartitionRule), ("share", SplitRule),
        ("Other", MakesNet), ("OwnRule", MakesNet), ("Own", MakesClient), ("OwnClient", MakesRule),
        ("OwnAbstract", MakesRule),
    ],
)  # fmt: skip
def test_what_is_not(mine: Path, name: str, kind: type) -> None:
    key = "partition._target_"
    with pytest.raises(SettingsError, match=rf"^{key}={mine.stem}.{name} "):
        resolve(f"{mine.stem}.{name}", kind, key)
    assert not mine.with_suffix(".called").exists()


@pytest.mark.parametrize("target", ["os.abort", "shutil.rmtree", "torch.hub.load", "numpy.fromfile"])
def test_functions_of_libraries_are_no_components(target: str) -> None:
    with pytest.raises(SettingsError, match=f"_target_={target}"):
        resolve(target, Loader)


X, Y = np.zeros((6, 3), np.float32), np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (3, "int"),
        (Dataset("d", X.astype(float), Y, 3, 4), "x is float64"),
        (Dataset("d", X[:5], Y, 3, 4), r"x is float32 \[5, 3\]"),
        (Dataset("d", X, Y.astype(np.int32), 3, 4), "y is int32"),
        (Dataset("d", X, Y, 2, 4), "labels"),
        (Dataset("d", X, Y, 0, 4), "num_classes=0"),
        (Dataset("d", X, Y, 3, 7), "train_size=7"),
        (Dataset("d", X, Y, 3, 4, clients=Y[:2]), "clients"),
        (Dataset("d", X + np.nan, Y, 3, 4), "NaN"),
    ],
)
def test_what_a_loader_returns(made: object, says: str) -> None:
    with pytest.raises(SettingsError, match=f"data=own.*{says}"):
        check_dataset(made, "data=own")


def test_a_run_whose_loader_returns_no_dataset_says_so() -> None:
    def returns() -> Dataset:
        return 3  # type: ignore[return-value]

    with pytest.raises(SettingsError, match="int"):
        load_federation(settings_of(data=returns))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (None, "NoneType"),
        ([np.arange(2), "ab"], "client 1"),
        ([np.arange(2), np.array([2.5, 3])], "client 1"),
        ([np.arange(2), np.array([[2, 3]])], "client 1"),
        ([np.arange(2)], "clients=2"),
        ([np.arange(2), np.arange(0)], "client 1"),
        ([np.arange(2), np.array([1, 2])], "disjoint"),
        ([np.arange(2), np.array([4])], r"0\.\.3"),
        ([np.array([-1, 1]), np.array([2])], "-1"),
    ],
)
def test_what_a_partition_rule_returns(parts: object, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        federate(Dataset("d", X, Y, 3, 4), lambda *_: parts, official, 2, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (3, "int"),
        (Partition((Y,), (Y,), (Y,)), "train rows"),
        (Partition((Y, Y[:0]), (Y, Y), (Y, Y)), "train rows .*: client 1"),
        (Partition((Y, Y), (Y, Y), (Y, Y + 9)), "test rows"),
    ],
)
def test_what_a_split_rule_returns(rows: object, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        federate(Dataset("d", X, Y, 3, 4), iid, lambda *_: rows, 2, 0)  # type: ignore[arg-type]


def test_own_modules_are_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After all others: a file there replaces no library."""
    (tmp_path / "mine_alone.py").write_text("class Mine:\n    def __init__(self, *, width: int = 3): ...\n")
    (tmp_path / "yaml.py").write_text("raise ValueError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert resolve("mine_alone.Mine").__name__ == "Mine" and sys.path[-1] == str(tmp_path)
    with pytest.raises(SettingsError):
        resolve("yaml.Mine")
