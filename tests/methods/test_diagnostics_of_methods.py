"""What every method shows of a round: the same numbers as in its trace, and pictures in TensorBoard."""

from pathlib import Path

import numpy as np
import pytest
from run_files import read_message, read_server
from support import events, slow_except

from pflsim import cli
from pflsim.messages import Uplink
from pflsim.records.trace import RoundMatrices, read_matrices

FROM_NUMBERS = {"pfedcfr": "zeta", "fedamp": "zeta", "pfedla": "alpha", "heurpfedla": "alpha", "fedalp": "psi",
                "fedfomo": "affinity"}  # fmt: skip
CLUSTERS = {"cfl", "ifca", "fesem", "fedalp"}
PROTOTYPES = {"fd", "fedfcd", "fedproto", "fedgh", "fedtgp", "pfedpm", "r_pfedpm"}


@pytest.mark.parametrize(
    "method", slow_except({"fedfcd", "pfedcfr", "ifca"}, sorted({*FROM_NUMBERS, *PROTOTYPES, *CLUSTERS, "fedavg"}))
)
def test_what_a_method_shows(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = [f"method={method}", "executor=inline", "clients=5", "rounds=3", "fraction=0.6", "model.hidden=[8]",
               "trace.rounds=[3]", "lockstep=false", "tracking.diagnostics_every=2", f"run_dir={folder}"]  # fmt: skip
    assert cli.main(options) == 0
    seen = read_matrices(folder)
    assert seen.round == 3
    found = {m.name: m.values for m in seen.matrices}
    kind = FROM_NUMBERS.get(method)
    numbers = read_server(folder / "trace" / "round_0003" / "server.safetensors")[0] if method != "fedavg" else {}
    if method in CLUSTERS:
        groups, members = numbers["groups"].tolist(), found.pop("clusters")
        assert members.sum() == 5 - groups.count(-1) and all(members[g, c] for c, g in enumerate(groups) if g >= 0)
    if kind:
        expected = {k: v.float().numpy() for k, v in numbers.items() if k.partition("/")[0] == kind}
        assert expected
        for name, values in expected.items():
            np.testing.assert_array_equal(found.pop(name), values)
    if method in PROTOTYPES:
        np.testing.assert_allclose(found.pop("prototype_similarity"), similarity(folder), rtol=1e-5, atol=1e-6)
    confusion = found.pop("confusion")
    assert confusion.shape == (10, 10)
    assert not found
    pictures(folder, seen)


def similarity(folder: Path) -> np.ndarray:
    """Of the uplinks in the trace, pair by pair and class by class."""
    sent = {}
    for path in (folder / "trace" / "round_0003").glob("up_*.safetensors"):
        up = read_message(path)
        assert isinstance(up, Uplink) and up.prototypes is not None
        sent[up.client] = up.prototypes.means.flatten(1).double().numpy(), up.prototypes.counts.numpy()
    values = np.full((5, 5), np.nan)
    for i, (a, held) in sent.items():
        for j, (b, also) in sent.items():
            both = [c for c in range(10) if held[c] > 0 and also[c] > 0]
            cosines = [a[c] @ b[c] / (np.linalg.norm(a[c]) * np.linalg.norm(b[c])) for c in both]
            values[i, j] = np.mean(cosines) if cosines else np.nan
    return values


def pictures(folder: Path, seen: RoundMatrices) -> None:
    """Each kind once at least, and the last one is of the last round."""
    shown, kinds = events(folder), {f"diagnostics/{m.name.partition('/')[0]}" for m in seen.matrices}
    assert set(shown.Tags()["images"]) == kinds | {"partition"}
    assert all(shown.Images(kind)[-1].step == 3 for kind in kinds)
