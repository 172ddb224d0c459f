"""A target of the wrong kind is refused before it is called."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from lightning_modules.hosts.client_factory import MakesClient, MakesNet, MakesRule
from pflsim.config.components import resolve
from pflsim.data.dataset import Dataset, Loader, check_dataset
from pflsim.data.federate import PartitionRule, SplitRule, federate
from pflsim.data.federated import Partition
from pflsim.data.partitions import iid
from pflsim.data.splits import official
from pflsim.errors import SettingsError

NUMBERS = itertools.count()
MINE = '''
    """Components of a user; what is imported, or called, leaves a file."""
    from __future__ import annotations
    import numpy as np
    import numpy
    from numpy import ndarray as Rows
    from pathlib import Path
    from typing import Any
    import pflsim.data.dataset
    from pflsim.data import dataset as sets
    from pflsim.data.dataset import Dataset as Data
    from pflsim.data.federated import Partition
    from lightning_modules.nets.mlp import Mlp
    from lightning_modules.nets.net import Net
    from lightning_modules.methods.fedavg import FedAvg
    from pflsim.servers import fedavg
    from pflsim.servers.base import ServerRule

    Path(__file__).with_suffix(".imported").touch()
    Parts = list[np.ndarray]

    def called(*_: Any, **__: Any) -> Any:
        Path(__file__).with_suffix(".called").touch()

    def load() -> Data: called()
    def load_too(*, root: str = "") -> "sets.Dataset": called()
    def load_as_well(*args) -> pflsim.data.dataset.Dataset: called()
    class Loads(Data): ...
    def untyped(): called()
    def wrongly_typed() -> str: called()
    def needs(path) -> Data: called()
    def share(labels, num_classes, clients, rng, writers, *, alpha: float = 1.0) -> list[np.ndarray]: called()
    def share_too(labels, num_classes, clients, rng, writers=None) -> "Parts": called()
    def share_as_well(*given) -> list[Rows]: called()
    def share_lists(labels, num_classes, clients, rng, writers) -> list[list[int]]: called()
    def share_four(labels, num_classes, clients, rng) -> list[numpy.ndarray]: called()
    def split(dataset, assign, rng, /) -> Partition: called()
    class Own(Mlp): ...
    class OwnAbstract(ServerRule): ...
    class OwnRule(fedavg.FedAvg): ...
    class OwnClient(FedAvg): ...
    class Other:
        def __init__(self, shape, classes): called()
    def net(input_shape, num_classes) -> Own: called()
    base = Net
    class Computed(type("Computed", (Mlp,), {})): ...
    class ComputedOther(type("Computed", (), {})): ...
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of components that leaves a file when it is imported, and another when one of them is called."""
    path = tmp_path / f"own_components_{next(NUMBERS)}.py"
    path.write_text(dedent(MINE))
    monkeypatch.syspath_prepend(tmp_path)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("load", Loader), ("load_too", Loader), ("load_as_well", Loader),
        ("share", PartitionRule), ("share_too", PartitionRule), ("share_as_well", PartitionRule),
        ("split", SplitRule),
        ("Own", MakesNet), ("net", MakesNet), ("Computed", MakesNet), ("Mlp", MakesNet),
        ("OwnRule", MakesRule), ("OwnClient", MakesClient),
    ],
)  # fmt: skip
def test_what_is_of_its_kind(mine: Path, name: str, kind: type) -> None:
    assert callable(resolve(f"{mine.stem}.{name}", kind))
    assert not mine.with_suffix(".called").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("untyped", Loader), ("wrongly_typed", Loader), ("called", Loader), ("Other", Loader),
        ("load", PartitionRule), ("share_lists", PartitionRule), ("split", PartitionRule),
        ("share", SplitRule), ("untyped", SplitRule),
        ("Other", MakesNet), ("OwnRule", MakesNet), ("OwnClient", MakesNet),
        ("Own", MakesClient), ("OwnClient", MakesRule), ("load", MakesRule),
        ("needs", Loader), ("share_four", PartitionRule), ("Net", MakesNet), ("Loads", Loader),
        ("OwnAbstract", MakesRule), ("ServerRule", MakesRule), ("ComputedOther", MakesNet),
    ],
)  # fmt: skip
def test_what_is_not(mine: Path, name: str, kind: type) -> None:
    key = "partition._target_"
    with pytest.raises(SettingsError, match=rf"^{key}={mine.stem}.{name} (does not return|cannot be called with)"):
        resolve(f"{mine.stem}.{name}", kind, key)
    assert not mine.with_suffix(".called").exists()


@pytest.mark.parametrize("target", ["os.abort", "shutil.rmtree", "builtins.exec", "subprocess.Popen"])
def test_nothing_of_python_itself_is_a_component(target: str) -> None:
    with pytest.raises(SettingsError, match=f"_target_={target}"):
        resolve(target, Loader)


@pytest.mark.parametrize("target", ["torch.hub.load", "lightning_modules.prepare.torch.hub.load", "numpy.fromfile"])
def test_functions_of_libraries_are_no_components(target: str) -> None:
    with pytest.raises(SettingsError, match="_target_="):
        resolve(target, Loader)


def test_the_message_says_what_was_expected() -> None:
    key, target = "partition._target_", "pflsim.data.splits.official"
    call = r"\(labels, num_classes, clients, rng, writers, \*, SETTINGS\) -> list\[numpy.ndarray\]"
    with pytest.raises(SettingsError, match=f"^{key}={target} .*{call}"):
        resolve(target, PartitionRule, key)


def test_a_module_that_is_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for number, content in enumerate((b"def load( -> 3", b"\0", b"\xff")):
        (tmp_path / f"no_python_{number}.py").write_bytes(content)
        with pytest.raises(SettingsError, match=f"_target_=no_python_{number}.load.*SyntaxError"):
            resolve(f"no_python_{number}.load", Loader)


X, Y = np.zeros((6, 3), np.float32), np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (3, "returned a int, expected a Dataset"),
        (Dataset("d", X.astype(float), Y, 3, 4), r"x is float64 \[6, 3\], expected uint8 or float32"),
        (Dataset("d", X[:5], Y, 3, 4), r"x is float32 \[5, 3\]"),
        (Dataset("d", X, Y.astype(np.int32), 3, 4), r"y is int32 \[6\], expected int64"),
        (Dataset("d", X, Y, 2, 4), r"labels are 0\.\.2, expected 0\.\.1"),
        (Dataset("d", X, Y, 0, 4), "num_classes=0"),
        (Dataset("d", X, Y, 3, 7), r"train_size=7 .* 1\.\.6"),
        (Dataset("d", X, Y, 3, 4, writers=Y[:2]), r"writers are int64 \[2\], expected int64 \[6\]"),
        (Dataset("d", X + np.nan, Y, 3, 4), "NaN"),
        (Dataset("d", X[:0], Y[:0], 3, 0), "x is float32"),
    ],
)
def test_what_a_loader_returns(made: object, says: str) -> None:
    with pytest.raises(SettingsError, match=f"data=own.*{says}"):
        check_dataset(made, "data=own")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (None, "found a NoneType"),
        ([np.arange(2), "ab"], "client 1 has 'ab'"),
        ([np.arange(2), np.array([2.5, 3])], "client 1 has"),
        ([np.arange(2), np.array([[2, 3]])], "client 1 has"),
        ([np.arange(2), np.array([-1])], "client 1 has"),
        ([np.arange(2)], "returned invalid rows; expected 2 arrays"),
        ([np.arange(2), np.arange(0)], "client 1 is left without examples"),
    ],
)
def test_what_a_partition_rule_returns(parts: object, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        federate(Dataset("d", X, Y, 3, 4), lambda *_: parts, official, 2, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (3, "the split rule returned a int, expected a Partition"),
        (Partition((Y,), (Y,), (Y,)), "invalid train rows; expected 2 arrays"),
        (Partition((Y, Y[:0]), (Y, Y), (Y, Y)), "train rows: client 1 is left without examples"),
        (Partition((Y, Y), (Y, Y), (Y, Y + 9)), "invalid test rows"),
        (Partition((Y, Y), (Y, [1]), (Y, Y)), "invalid val rows"),  # type: ignore[list-item]
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
