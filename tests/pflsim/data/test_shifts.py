"""Shifts against numpy, their groups, where they are recorded, and where they are applied."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import World, dataset, prepared, rounds, states, world

from lightning_modules.lockstep.stacks import stacks
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.training import Training
from pflsim.config.settings import Settings
from pflsim.data import partitions, shifts, splits
from pflsim.data.content import partition_hash
from pflsim.data.dataset import Dataset
from pflsim.data.explicit import explicit
from pflsim.data.federate import federate
from pflsim.data.federated import Shard, class_counts, shard
from pflsim.data.record import write_partition
from pflsim.data.shifts import Shift
from pflsim.errors import SettingsError
from pflsim.seeding import numpy_generator
from pflsim.servers.fedavg import FedAvg as FedAvgServer

SQUARE, WIDE = dataset(shape=(2, 6, 6)), dataset(shape=(1, 5, 8))
RULES = (shifts.rotation, shifts.noise, shifts.permuted_labels)


def shift_of(rule: Any, data: Dataset, clients: int = 4, seed: int = 0, **settings: Any) -> Shift:
    return rule(data, clients, numpy_generator(seed, "shift"), **settings)


def shards(data: Dataset, shift: Shift) -> list[Shard]:
    """The shard of each client."""
    clients = len(shift.groups)
    rows = replace(federate(data, partitions.iid, splits.official, clients, 0), shift=shift)
    return [shard(data, rows, client) for client in range(clients)]


def plain_shards(data: Dataset, clients: int = 4) -> list[Shard]:
    return shards(data, Shift((0,) * clients, (shifts.Change(),)))


def numpy_rotated(image: np.ndarray, angle: float) -> np.ndarray:
    """An image [H, W] rotated counter-clockwise about its centre, bilinear, zeros outside."""
    (height, width), a = image.shape, np.deg2rad(angle)
    padded = np.pad(image.astype(float), 20)
    out = np.zeros((height, width))
    for i in range(height):
        for j in range(width):
            right, up = j - (width - 1) / 2, (height - 1) / 2 - i
            from_right, from_up = right * np.cos(a) + up * np.sin(a), up * np.cos(a) - right * np.sin(a)
            y, x = (height - 1) / 2 - from_up + 20, from_right + (width - 1) / 2 + 20
            top, left = int(np.floor(y)), int(np.floor(x))
            square, dy, dx = padded[top : top + 2, left : left + 2], y - top, x - left
            out[i, j] = np.array([1 - dy, dy]) @ square @ np.array([1 - dx, dx])
    return out


@pytest.mark.parametrize("rule", RULES)
def test_groups_are_equal_random_and_a_function_of_the_seed(rule: Any) -> None:
    shift = shift_of(rule, SQUARE, 10, groups=4)
    assert sorted(np.bincount(shift.groups)) == [2, 2, 3, 3] and len(shift.changes) == 4
    assert shift == shift_of(rule, SQUARE, 10, groups=4) != shift_of(rule, SQUARE, 10, seed=1, groups=4)
    assert shift.groups == shift_of(shifts.rotation, SQUARE, 10).groups
    assert list(shift.groups) not in (sorted(shift.groups), [i % 4 for i in range(10)])


def test_quarter_turns_are_those_of_numpy() -> None:
    shift = shift_of(shifts.rotation, SQUARE)
    for client, (own, other) in enumerate(zip(shards(SQUARE, shift), plain_shards(SQUARE), strict=True)):
        for split in ("train", "val", "test"):
            got, stored = own.split(split), other.split(split)
            assert got.x.dtype == torch.uint8 and torch.equal(got.y, stored.y) and len(got)
            assert np.array_equal(got.x, np.rot90(stored.x, shift.groups[client], axes=(2, 3)))
    half = shards(WIDE, shift_of(shifts.rotation, WIDE, 2, groups=2))[:2]
    turned = shift_of(shifts.rotation, WIDE, 2, groups=2).groups.index(1)
    assert np.array_equal(half[turned].train.x, plain_shards(WIDE, 2)[turned].train.x.numpy()[:, :, ::-1, ::-1])


@pytest.mark.parametrize("angle", [45.0, 90.0, 137.0, 270.0])
def test_other_angles_interpolate(angle: float) -> None:
    stored = WIDE.x[:3]
    expected = np.stack([numpy_rotated(image[0], angle)[None] for image in stored])
    got = shifts.rotated(torch.from_numpy(stored.astype(np.float32)), angle)
    assert np.abs(got.numpy() - expected).max() < 1e-2
    rounded = shifts.rotated(torch.from_numpy(stored), angle)
    assert rounded.dtype == torch.uint8 and np.abs(rounded.numpy() - expected).max() < 0.52
    assert shifts.rotated(torch.from_numpy(stored[:0]), angle).shape == (0, 1, 5, 8)


@pytest.mark.parametrize("stored", [np.uint8, np.float32])
def test_inversion_of_half_of_the_clients(stored: Any) -> None:
    x = (SQUARE.x // 16).astype(stored) - (stored(3) if stored is np.float32 else 0)
    data = replace(SQUARE, x=x, scale=16.0)
    total = 16 if stored is np.uint8 else x.min() + x.max()
    shift = shift_of(shifts.inversion, data)
    assert sorted(shift.groups) == [0, 0, 1, 1]
    for group, own, other in zip(shift.groups, shards(data, shift), plain_shards(data), strict=True):
        assert own.train.x.dtype == other.train.x.dtype
        assert np.array_equal(own.train.x, total - other.train.x.numpy() if group else other.train.x)


def test_noise_belongs_to_the_example() -> None:
    shift = shift_of(shifts.noise, SQUARE, sigma=0.8)
    assert [change.deviation for change in shift.changes] == pytest.approx([0, 0.2, 0.4, 0.6])
    for group, own, other in zip(shift.groups, shards(SQUARE, shift), plain_shards(SQUARE), strict=True):
        stored = other.train.batch(slice(None))[0]
        added = own.train.batch(slice(None))[0] - stored
        assert own.train.x.dtype == torch.float32
        assert abs(added.std() - 0.2 * group) < 0.02 and abs(added.mean()) < 0.05
        assert group == 0 or len(added.flatten().unique()) > 0.9 * added.numel()
    noise, rows = shift.changes[3], np.array([4, 9, 30])
    together = noise.inputs(SQUARE, rows)
    assert torch.equal(together[2], noise.inputs(SQUARE, rows[2:])[0])
    assert not torch.equal(together, replace(noise, seed=0).inputs(SQUARE, rows))
    moved = replace(SQUARE, x=SQUARE.x[::-1].copy(), y=SQUARE.y[::-1].copy())  # stored in another order
    assert torch.equal(together, noise.inputs(moved, len(SQUARE.y) - 1 - rows))


def test_labels_are_permuted_by_group_in_every_split_and_count() -> None:
    data = replace(SQUARE, num_classes=3)
    shift = shift_of(shifts.permuted_labels, data, groups=4)
    found = [change.permutation for change in shift.changes]
    assert found[0] == (0, 1, 2) and len(set(found)) == 4 and all(sorted(each) == [0, 1, 2] for each in found)
    rows = replace(federate(data, partitions.iid, splits.official, 4, 0), shift=shift)
    for client, (own, other) in enumerate(zip(shards(data, shift), plain_shards(data), strict=True)):
        for split in ("train", "val", "test"):
            permuted = [found[shift.groups[client]][label] for label in other.split(split).y.tolist()]
            assert own.split(split).y.tolist() == permuted
            assert class_counts(data, rows, split)[client].tolist() == [permuted.count(c) for c in range(3)]
        assert torch.equal(own.train.x, other.train.x)


def test_normalisation_follows_the_shift() -> None:
    data = replace(SQUARE, mean=(0.5, 0.25), std=(2.0, 4.0))
    inverted = shards(data, Shift((0,), (shifts.Inversion(255),)))[0].train
    mean, std = np.array([0.5, 0.25])[:, None, None], np.array([2.0, 4.0])[:, None, None]
    expected = (1 - plain_shards(data, 1)[0].train.x.numpy() / 255 - mean) / std
    assert np.abs(inverted.batch(slice(None))[0].numpy() - expected).max() < 1e-6


def test_the_record_has_the_groups_and_serves_as_a_partition(tmp_path: Path) -> None:
    rows = federate(SQUARE, partitions.iid, splits.official, 4, 0)
    shift = shift_of(shifts.rotation, SQUARE)
    shifted = replace(rows, shift=shift)
    digests = [
        write_partition(tmp_path / name, SQUARE, p, {"partition": "", "split": "", "shift": name})
        for name, p in (("", rows), ("r", shifted))
    ]
    without, record = (json.loads((tmp_path / name / "partition.json").read_text()) for name in ("", "r"))
    assert record["shift"] == {
        "name": "r", "groups": list(shift.groups), "changes": [{"angle": 90.0 * g} for g in range(4)]
    }  # fmt: skip
    assert "shift" not in without and record.keys() - without.keys() == {"shift", "unshifted_hash"}
    assert record["unshifted_hash"] == without["hash"] == digests[0] != digests[1] == record["hash"]
    again = explicit(SQUARE, 4, path=str(tmp_path / "r" / "partition.json"))
    assert partition_hash(SQUARE, replace(again, shift=shift)) == digests[1]
    assert partition_hash(SQUARE, replace(rows, shift=replace(shift, groups=shift.groups[::-1]))) not in digests
    with pytest.raises(SettingsError, match="hash"):
        explicit(WIDE, 4, path=str(tmp_path / "r" / "partition.json"))
    assert (tmp_path / "r" / "partition.png").read_bytes() != (tmp_path / "partition.png").read_bytes()


def shifted(**given: Any) -> World:
    """Clients of two groups with noise and crops."""
    training = Training(lr=0.1, batch_size=4, local_epochs=2)
    made = world(FedAvg, FedAvgServer(), training=training, data=SQUARE, augment="crop_flip", **given)
    shift = Shift((0, 1, 0, 1), (shifts.Noise(0, 3), shifts.Noise(0.5, 3)))
    return replace(made, partition=replace(made.partition, shift=shift))


def test_lockstep_trains_on_the_examples_of_the_loop() -> None:
    loop = shifted()
    found = stacks(Settings(lockstep=True), "fedavg", loop.factory.build(), "cpu", [12, 7, 20, 9])
    assert found and len(found[0]) == 4
    trained = []
    for each in (loop, shifted(stacks=found), replace(loop, partition=replace(loop.partition, shift=Shift()))):
        executor = each.inline()
        rounds(executor, 2, 4)
        trained.append(states(executor)[1]["net.head.weight"])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-5)
    assert (trained[2] - trained[0]).abs().max() > 1e-3


CHOSEN = ("clients=4", "partition=iid", "method=fedavg")


def test_a_prepared_run_has_the_shift_of_its_seed_on_an_unchanged_partition() -> None:
    runs = [prepared(*CHOSEN, *given) for given in ([], ["shift=rotation"], ["shift=rotation", "seed=1"])]
    parts = [run.partition for run in runs]
    assert not parts[0].shift.groups and runs[0].meta.partition == "iid"
    assert all(np.array_equal(a, b) for a, b in zip(parts[0].train, parts[1].train, strict=True))
    assert parts[1].shift == shift_of(shifts.rotation, SQUARE) and runs[1].meta.partition == "iid, rotation(groups=4)"
    assert parts[2].shift == shift_of(shifts.rotation, SQUARE, seed=1)
    assert len({run.meta.partition_hash for run in runs}) == 3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("shift=rotation data=wine model=tabular_mlp", "images.*wine"),
        ("shift=rotation shift.groups=5", "shift.groups=5: .*4"),
        ("shift=permuted_labels shift.groups=0", "shift.groups=0"),
        ("shift=permuted_labels data=breast_cancer model=tabular_mlp shift.groups=3", "shift.groups=3"),
        ("shift=noise shift.sigma=-1", "shift.sigma=-1"),
        ("shift=blur", "rotation"),
    ],
)
def test_what_cannot_be_shifted_is_refused(overrides: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        prepared(*CHOSEN, *overrides.split())


def test_tables_and_sequences_take_permuted_labels() -> None:
    tokens = Dataset("words", np.ones((8, 3), np.int64), np.arange(8) % 2, 2, 6)
    assert shift_of(shifts.permuted_labels, tokens).changes[1].labels(tokens, np.arange(2)).tolist() == [1, 0]
    with pytest.raises(SettingsError, match="token sequences"):
        shift_of(shifts.noise, tokens)
