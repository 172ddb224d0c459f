"""Attacks and aggregators in runs: who is malicious and judged, what is sent, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import pflsim
from pflsim.analysis.runs import Run
from pflsim.analysis.tables import tables
from pflsim.errors import SettingsError

SMALL: dict[str, Any] = {
    "method": "fedavg", "rounds": 2, "clients": 5, "executor": "inline", "progress": "none", "model": "mlp",
    "overrides": ["model.hidden=[6]"], "batch_size": 32,
}  # fmt: skip


def run(folder: Path, **settings: Any) -> Run:
    return pflsim.run(**{**SMALL, **settings}, run_dir=folder)


def sent(run: Run, number: int, client: int | None = None, *, down: bool = False) -> dict[str, torch.Tensor]:
    """Weights in a round's trace, in float64."""
    name = "server" if client is None else f"{'down' if down else 'up'}_{client:03d}"
    found = load_file(run.folder / "trace" / f"round_{number:04d}" / f"{name}.safetensors")
    return {key: value.double() for key, value in found.items() if key.startswith("weights/")}


def test_the_honest_twin_differs_in_who_is_judged_only(tmp_path: Path) -> None:
    """The benign clients are those of every attack with this fraction."""
    plain, twin, flipped = (
        run(tmp_path / name, attack=attack)
        for name, attack in {
            "plain": "none", "twin": {"name": "none", "fraction": 0.4}, "flip": {"name": "label_flip", "fraction": 0.4}
        }.items()
    )  # fmt: skip
    bad = json.loads((twin.folder / "summary.json").read_text())["attack"]
    assert len(bad["clients"]) == 2 and bad["name"] == "none"
    assert flipped.summary["attack"]["clients"] == bad["clients"] and "attack" not in plain.summary
    texts = [(made.folder / "per_client.csv").read_text().splitlines() for made in (plain, twin)]
    each = [[line.split(",")[:7] for line in text] for text in texts]  # those evaluated together have other last bits
    benign = [cells for cells in each[0] if cells[1] not in map(str, bad["clients"])]
    assert benign == [cells for cells in each[1] if cells[2]]  # the others have traffic only
    assert plain.history[-1].traffic_total == twin.history[-1].traffic_total
    comparison = pflsim.compare([twin, flipped], target=0.1)
    assert len(comparison) == 1 and comparison[0].paired
    assert "attack.fraction" in pflsim.compare([plain, twin])[0].objections[0]


def test_what_malicious_clients_send(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", trace={"rounds": [1, 2]})
    flip = run(tmp_path / "flip", trace={"rounds": [1, 2]}, attack={"name": "sign_flip", "scale": 2.0, "from_round": 1})
    late = run(tmp_path / "late", trace={"rounds": [1]}, attack={"name": "sign_flip", "from_round": 2})
    (bad,) = flip.summary["attack"]["clients"]
    for client in range(5):
        start, honest = sent(plain, 1, client, down=True), sent(plain, 1, client)
        for key, value in sent(flip, 1, client).items():
            expected = start[key] - 2 * (honest[key] - start[key]) if client == bad else honest[key]
            assert torch.allclose(value, expected, atol=1e-6)
        assert all(torch.equal(value, honest[key]) for key, value in sent(late, 1, client).items())


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper", "pfedme"])
def test_an_aggregate_of_one_client_is_what_it_sends(method: str, tmp_path: Path) -> None:
    shared = {"method": method, "fraction": 0.2, "trace": {"rounds": [2]}}
    plain, median = (run(tmp_path / name, aggregator=name, **shared) for name in ("none", "median"))
    agree = load_file(plain.folder / "trace/round_0002/server.safetensors")
    found = load_file(median.folder / "trace/round_0002/server.safetensors")
    assert agree.keys() == found.keys() and all(torch.equal(agree[key], found[key]) for key in agree)
    assert (plain.folder / "per_client.csv").read_bytes() == (median.folder / "per_client.csv").read_bytes()


def downlink(run: Run, number: int) -> dict[str, torch.Tensor]:
    return sent(run, number, 0, down=True)


@pytest.mark.parametrize(
    ("attack", "aggregator"), [("ipm", "none"), ("alie", "median"), ("alie", "trimmed_mean"), ("none", "mean")]
)
def test_the_next_model_is_that_of_numpy(attack: str, aggregator: str, tmp_path: Path) -> None:
    settings = {"attack": {"name": attack, "fraction": 0.4}, "aggregator": aggregator, "trace": {"rounds": [1, 2]}}
    settings["overrides"] = [*SMALL["overrides"], "aggregator.share=0.4"] if aggregator == "trimmed_mean" else []
    made = run(tmp_path / "run", **settings)
    bad, sizes = (
        made.summary.get("attack", {}).get("clients", []),
        [sum(own["train"]) for own in made.partition["class_counts"]],
    )
    for key, known in downlink(made, 1).items():
        ups = np.stack([sent(made, 1, client)[key].numpy() for client in range(5)])
        benign = np.delete(ups, bad, axis=0)
        if attack == "ipm":
            ups[bad] = known.numpy() - 2 * (benign.mean(0) - known.numpy())
        elif attack == "alie":
            ups[bad] = benign.mean(0) - 1.5 * benign.std(0, ddof=1)
        expected = {
            "none": np.average(ups, axis=0, weights=sizes), "mean": ups.mean(0), "median": np.median(ups, axis=0),
            "trimmed_mean": np.sort(ups, axis=0)[2:3].mean(0),
        }[aggregator]  # fmt: skip
        assert np.allclose(downlink(made, 2)[key].numpy(), expected, atol=1e-6)


def test_the_success_of_a_backdoor_is_a_test_set(tmp_path: Path) -> None:
    """Of the benign clients' test rows of other classes."""
    made = run(tmp_path / "run", attack={"name": "backdoor", "target": 3, "fraction": 0.4, "boost": 2.0})
    bad, rows = made.summary["attack"]["clients"], made.per_client().query("round == 2 and split == 'triggered'")
    counts = [own["test"] for own in made.partition["class_counts"]]
    expected = {c: sum(own) - own[3] for c, own in enumerate(counts) if c not in bad}
    assert {row.client: row.total for row in rows[rows["model"] == "global"].itertuples()} == expected
    (judged,), (compared,) = pflsim.compare([made], set="triggered"), pflsim.compare([made])
    assert judged.rows[0].figures["mean"].values[0] > 0.5
    assert [text for text in tables(compared)[-1].headers if "attack" in text] == ["attack\nsuccess"]


def test_a_resumed_run_remembers_the_last_aggregate(tmp_path: Path) -> None:
    settings = {"aggregator": {"name": "centered_clipping", "bound": 0.5}, "attack": "random_update"}
    straight = run(tmp_path / "straight", **settings, rounds=4)
    half = run(tmp_path / "half", **settings)
    pflsim.resume(half, rounds=4)
    assert (half.folder / "per_client.csv").read_bytes() == (straight.folder / "per_client.csv").read_bytes()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["attack=sign_flip", "method=local"], "attack=sign_flip .* method=local"),
        (["attack=ipm", "method=fedamp"], "attack=ipm .* mean"),
        (["attack=alie", "uplink=topk"], "uplink=none"),
        (["aggregator=median", "method=fedamp"], "aggregator=median .* mean"),
        (["aggregator=median", "method=scaffold"], "method=scaffold: an aggregator needs"),
        (["aggregator=krum", "model=cnn_bn", "model.kernel=3", "model.padding=1"], "buffers=local"),
        (["attack=replacement", "method=ifca", "clients=20"], "method=ifca.* attack=none"),
        (["attack=sign_flip", "method=fedproto"], "method=fedproto.* attack=none"),
        (["attack=label_flip", "attack.fraction=0.6"], "attack.fraction=0.6"),
        (["attack=label_flip", "attack.fraction=0.01"], "attack.fraction=0.01"),
        (["attack=sign_flip", "attack.from_round=99"], "attack.from_round=99"),
        (["attack=backdoor", "attack.size=9"], "9 pixels"),
        (["attack=backdoor", "attack.target=10"], "attack.target=10"),
        (["aggregator=trimmed_mean", "aggregator.share=0.5"], "aggregator.share=0.5"),
        (["attack=flip"], "label_flip"),
    ],
)
def test_refusals(settings: list[str], named: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=named):
        run(tmp_path / "run", model="mlp", overrides=settings)
    assert not (tmp_path / "run").exists()
