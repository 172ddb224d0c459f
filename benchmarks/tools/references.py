"""Writes digests of what runs compute: `python -m benchmarks.tools.references OUT [--only NAME] [--compare OTHER]`.

Compare them before and after a change of the code that must not change a result. They depend on the CPU and on torch,
not on formats of files. Every method runs inline and on two actors: with its defaults, resumed after round 2, with
faults and new clients, and on augmented images without lockstep. FedAvg runs with every shift, partition, split and
optimiser, FedProto with model variants. Every data source is loaded.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir
from fnmatch import fnmatch
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.tools import small_data
from pflsim.config.compose import CONFIGS

Digests = dict[str, dict[str, str]]
"""A text for every value by its name, for every run by its name, which starts with what `--only` selects."""
SMALL = ["data=digits", "seed=37", "clients=6", "rounds=3", "batch_size=50", "progress=none"]
"""With this seed clients drop out in rounds 2 and 3 of runs with faults, and L2GD aggregates in round 2."""
PLACES = {"inline": ["executor=inline"], "actors": ["executor=ray", "placement.actors=2"]}
CONVOLUTIONS = ["model.channels=[2,3]", "model.kernel=3", "model.padding=1", "model.hidden=6"]
KINDS = {
    "default": ["lockstep_clients=3", "checkpoint.every=1", "checkpoint.keep=3"],
    "faults": ["model=cnn_bn", *CONVOLUTIONS, "clients=8", "fraction=0.5", "faults.dropout=0.2", "momentum=0.5",
               "eval.holdout_clients=2", "eval.metrics=[balanced_accuracy,macro_f1,nll,ece]"],
    "images": ["model=cnn", *CONVOLUTIONS, "lockstep=false", "init=per_client", "augment=crop_flip"],
}  # fmt: skip
REFUSED = {"scaffold faults": ["momentum=0"]}
"""Changes where a method refuses a setting."""
ONCE = ("shift", "partition", "split", "optimizer")
"""Groups of which every option runs once."""
NEEDED = {
    "data=synthetic": ["partition=by_client", "split.test_by=clients"],
    "partition=by_client": ["data=synthetic", "model=tabular_mlp", "split.test_by=clients"],
    "partition=explicit": ["partition.path=explicit.json"],
    "partition=listed_classes": [f"partition.held={[[i, i + 1] for i in range(6)]}"],
    "partition=n_way_k_shot": ["partition.k=20"],
    "split=counts": ["split.train=30", "split.test=10", "split.stratify=true"],
}
"""Further settings of these options."""
VARIANTS = ["method=fedproto", "model.variants=[{hidden:[12,8]},{hidden:[8]}]"]
ROWS = {part: [[*range(9 * i, 9 * i + 9)] for i in range(6)] for part in ("train", "test")}
IDENTITY = ("round", "client", "split", "model", "phase")
"""Columns of per_client.csv that tell its rows apart."""
COLUMNS = (*IDENTITY, "correct", "total", "loss", "up_bytes", "down_bytes", "fault",
           "balanced_accuracy", "macro_f1", "nll", "ece")  # fmt: skip


# Nothing else here depends on modules of pflsim or on the form of checkpoints.


def settings_of(overrides: Sequence[str]) -> Any:
    """Return the settings of a run."""
    from pflsim.config.compose import composed, parse, to_settings

    return to_settings(composed(parse([*SMALL, *overrides]), [CONFIGS]))


def load_data(overrides: Sequence[str]) -> Any:
    """Return a data set."""
    from pflsim.config.components import bind
    from pflsim.data.dataset import Loader

    return bind(settings_of(overrides).data, field="data", kind=Loader)()


def runner() -> Any:
    """Return a context manager that runs and resumes, always with the same actors."""
    from ray_actors.run import Runner

    return Runner()


def read_states(folder: Path) -> Any:
    """Return the states in the last checkpoint of a run."""
    from pflsim.records.checkpoint_read import choose_checkpoint

    checkpoint = choose_checkpoint(folder / "checkpoints", "last")
    return {"server": checkpoint.server(), "client": dict(checkpoint.clients())}


def repeat_last_round(run: Any, folder: Path) -> None:
    """Leave what remains of a run that is killed before its last checkpoint, and resume it."""
    from pflsim.records.saved_settings import saved_settings

    shutil.rmtree(max((folder / "checkpoints").glob("round_*")))
    (folder / "summary.json").unlink()
    run.resume(folder, saved_settings(folder))


# Digests.


def leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each value in nested containers and dataclasses: of a tensor, its digest."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.array(value, order="C"))
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{name}/{key}")
    elif not callable(value):
        yield name, tensor_digest(value) if isinstance(value, torch.Tensor) else repr(value)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's type, shape, strides and bytes."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} "
    return sha256(head.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def run_digests(folder: Path) -> dict[str, str]:
    """Return the digests of a run: its last states, rows by client, traffic, losses and partition."""
    found = dict(leaves(read_states(folder), "state"))
    with (folder / "per_client.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            texts = json.dumps([row.get(column) for column in COLUMNS])
            found[" ".join(["row", *(row[column] for column in IDENTITY)])] = sha256(texts.encode()).hexdigest()
    for line in map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        found |= leaves({key: line[key] for key in ("traffic", "losses")}, f"round {line['round']}")
    return found | {"partition": json.loads((folder / "partition.json").read_text(encoding="utf-8"))["hash"]}


# Runs.


def options(group: str) -> list[str]:
    """Return the options of a group of settings, found on disk."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def runs() -> dict[str, list[str]]:
    """Return the settings of all runs by name."""
    found = {"variants": [*PLACES["inline"], *VARIANTS]}
    methods = [name for name in options("method") if not name.endswith("lora")]  # which need adapters
    for method, place, kind in product(methods, PLACES, KINDS):
        own = [f"method={method}", *REFUSED.get(f"{method} {kind}", [])]
        found[f"{method} {place} {kind}"] = [*PLACES[place], *KINDS[kind], *own]
    for option in (f"{group}={name}" for group in ONCE for name in options(group)):
        found[option] = [*PLACES["inline"], "method=fedavg", option, *NEEDED.get(option, [])]
    return found


def selected(named: Mapping[str, Any], only: str) -> dict[str, Any]:
    """Return what has a name whose first word matches a pattern."""
    return {name: value for name, value in named.items() if fnmatch(name.partition(" ")[0], only)}


def record(only: str) -> Digests:
    """Run and load everything that is selected, in the current folder, which is empty; return the digests."""
    found: Digests = {}
    Path("explicit.json").write_text(json.dumps(ROWS))
    with runner() as run:
        for name, overrides in selected(runs(), only).items():
            begin = time.perf_counter()
            folder = run.run(settings_of([*overrides, f"run_dir=run{len(found)}"]))
            found[name] = run_digests(folder)
            if name.endswith("default"):
                repeat_last_round(run, folder)
                found[name.replace("default", "resumed")] = run_digests(folder)
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
    sources = {f"data={name}": [f"data={name}"] for name in options("data")}
    for name, overrides in small_data.write(Path("data").absolute()).items():
        sources[f"data={name}"] = [f"data={name.partition(' ')[0]}", *overrides]
    # torchvision compares CIFAR's and SVHN's files with checksums of the real ones.
    with ExitStack() as stack:
        for module in ("cifar", "svhn"):
            check = f"torchvision.datasets.{module}.check_integrity"
            stack.enter_context(mock.patch(check, lambda path, md5=None: Path(path).is_file()))
        for name, overrides in selected(sources, only).items():
            found[name] = dict(leaves(load_data([*overrides, *NEEDED.get(name, [])]), "data"))
    return found


def compare(title: str, ours: Digests, theirs: Digests) -> bool:
    """Print the differences of each run; return whether ours has everything of theirs, with the same digests."""
    equal = True
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name, {}), theirs.get(name, {})
        found = {
            "different": [key for key in one if one[key] != other.get(key, one[key])],
            "missing": [key for key in other if key not in one],
            "new": [key for key in one if key not in other],
        }
        equal = equal and not found["different"] and not found["missing"]
        for what, keys in found.items():
            if keys:
                more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
                print(f"{name}: {len(keys)} of {len(one.keys() | other)} {what}: {', '.join(keys[:3])}{more}")
    print(f"{title}: {'equal' if equal else 'different'}")
    return equal


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the digests; return 1 if those inline and on actors differ, or ours and the other file's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tools.references", description=__doc__)
    parser.add_argument("out", type=lambda path: Path(path).absolute(), help="file to write")
    parser.add_argument("--only", default="*", help="what to run: a method, variants, or e.g. partition=iid, data=*")
    parser.add_argument("--compare", type=Path, help="file of an earlier call; what is new in ours is no difference")
    given = parser.parse_args(arguments)
    other: Digests = json.loads(given.compare.read_text()) if given.compare else {}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        found = record(given.only)
    if not found:
        parser.error(f"--only {given.only}: nothing has this name")
    given.out.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    by_place = [{name.replace(f" {at} ", " "): found[name] for name in found if f" {at} " in name} for at in PLACES]
    equal = compare("actors and inline", by_place[1], by_place[0])
    if given.compare:
        equal &= compare(f"{given.out.name} and {given.compare}", found, selected(other, given.only))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
