"""`pflsim probe` on ten settings whose right answers are known from long runs.

Of each method, the trial that is best by validation after 120 rounds ran for 240, with five seeds; trials are `OPTIONS`
with the learning rate times 0.2, 1 and 5. Approaches whose mean is within 1 point of accuracy, or 1% of the RMSE, of
the best one are right.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from support import in_this_process

from pflsim.analysis.probe import Answer
from pflsim.commands import probe
from pflsim.config.compose import parse

SMALL = "split=merged model=linear local_steps=10 eval.every=2 progress=none"
DIGITS = f"data=digits clients=8 {SMALL} lr=0.2"
WORDS = {
    "one population": f"{DIGITS} partition=iid",
    "two rotations": f"{DIGITS.replace('clients=8', 'clients=24')} partition=iid shift=rotation shift.groups=2",
    "four permutations": f"{DIGITS} partition=iid shift=permuted_labels shift.groups=4",
    "label skew": f"{DIGITS} partition=classes_per_client partition.classes=2",
    "Dirichlet": f"{DIGITS} partition=dirichlet partition.alpha=0.3",
    "small client variance": "",
    "large client variance": "",
    "logistic": "",
    "feature shift": "",
    "one outlying client": "",
}
"""The settings of each; those without are a table."""
RIGHT = {
    "one population": {"together", "personal", "in groups"},  # FedAvg .967, Ditto .967, IFCA .958, Local .919
    "two rotations": {"in groups"},  # IFCA .958, FedAvg .874, Ditto .869, Local .826
    "four permutations": {"alone"},  # Local .914, Ditto .797, IFCA .739: pairs of clients are not found, FedAvg .318
    "label skew": {"alone", "personal"},  # Local .997, Ditto .993, IFCA .983, FedAvg .963
    "Dirichlet": {"personal"},  # fine-tuning .972, FedAvg .953, Local .949, IFCA .931
    "small client variance": {"together", "personal"},  # RMSE: FedAvg .775, fine-tuning .778, IFCA .784, Local .843
    "large client variance": {"alone", "personal"},  # RMSE: Ditto .831, Local .834, IFCA 1.248, FedAvg 1.438
    "logistic": {"alone", "personal"},  # fine-tuning .762, Local .758, IFCA .715, FedAvg .663
    "feature shift": {"alone"},  # Local .898, Ditto .781, IFCA .755, FedAvg .559
    "one outlying client": {"alone", "personal", "in groups"},  # Ditto .908, IFCA .907, Local .902, FedAvg .825
}
"""The approaches that are right, with the means of the long runs."""


def words_of(name: str, folder: Path) -> list[str]:
    """Return the settings of one of `WORDS`, after writing its table."""
    if WORDS[name]:
        return WORDS[name].split()
    rng, lines = np.random.default_rng(1), ["client,a,b,c,y"]
    for client in range(10):
        rows = 96 if name == "feature shift" else 48
        x, own, n = rng.normal(size=(rows, 3)), rng.normal(size=4), rng.normal(size=rows)
        score = x @ [1.0, 0.6, -0.4]
        if "variance" in name:
            size = 0.05 if name.startswith("small") else 0.8
            y = score + size * (own[3] + x @ own[:3]) + 0.8 * n
        elif name == "logistic":
            y = np.int64(score + 1.5 * own[3] + 0.7 * x @ own[:3] + rng.logistic(0, 1, 48) > 0)
        elif name == "feature shift":
            y, x = np.int64(3 * score + n > 0), x + 4 * own[:3]
        else:
            y = np.int64((-1 if client == 7 else 1) * 3 * score + n > 0)
        lines += [f"c{client:02},{','.join(f'{v:.3f}' for v in row)},{t:.3f}" for row, t in zip(x, y, strict=True)]
    if "variance" not in name:
        lines = [line.removesuffix(".000") for line in lines]
    (folder / "table.csv").write_text("\n".join(lines))
    return f"data=table data.path={folder}/table.csv data.label=y data.client=client {SMALL} lr=0.05".split()


def without_pictures(patch: pytest.MonkeyPatch) -> None:
    """They take half of the time of a small run."""
    patch.setattr("pflsim.data.record.partition_figure", lambda *counts: Mock())
    patch.setattr("pflsim.records.tensorboard.TensorBoard._draw", lambda *figure: None)


def probed(name: str, folder: Path) -> Answer:
    """Return the answer of a probe in this process."""
    options = {"settings": parse([*words_of(name, folder), "rounds=20"]), "seeds": 3, "minutes": 60.0, "config_dir": []}
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        patch.setattr(probe, "side_by_side", in_this_process)
        patch.setattr(probe, "FACTORS", (1, 5, 2.2))  # fewer trials
        return probe.run_probe(folder / "probe", options)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_known_answers(name: str, tmp_path: Path) -> None:
    """With 20 rounds in the trials and three seeds, the approach that is named is right, and none still rises."""
    answer = probed(name, tmp_path)
    assert not answer.rises and answer.best in RIGHT[name], answer
