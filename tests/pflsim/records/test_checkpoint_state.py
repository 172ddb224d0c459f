"""A state is rebuilt by the types of its fields; what does not fit is refused with a message."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from support import agree, refusing
from torch import Tensor

from pflsim.messages import Prototypes
from pflsim.records.checkpoint_read import from_containers
from pflsim.records.checkpoint_write import to_containers
from pflsim.types import Tensors, Unit


@dataclass(frozen=True, slots=True)
class State:
    table: Mapping[int, Tensors]
    units: tuple[Unit, ...]
    means: Prototypes | None
    late: Prototypes | None
    kind: Literal["norm", "entry"]
    pair: tuple[int, float]
    names: list[str]
    shapes: tuple[tuple[int, ...], ...]
    rows: Sequence[Tensor]
    on: bool = True
    scale: float = 1.0
    either: int | str | None = 3


VALUES: dict[str, Any] = {
    "table": {7: {"w": torch.arange(3.0)}, 2: {"w": torch.ones(3, dtype=torch.float64), "n": torch.tensor(4)}},
    "units": (Unit("a", ("x", "y"), ("z",)), Unit("b", ())),
    "means": None,
    "late": Prototypes(torch.zeros(2, 0), torch.tensor([1, 2])),
    "kind": "norm",
    "pair": (1, 0.5),
    "names": ["p", "q"],
    "shapes": ((2, 3), ()),
    "rows": (torch.zeros(0, 2, dtype=torch.bool),),
}


def through_a_file(**changes: Any) -> State:
    file = io.BytesIO()
    torch.save(to_containers(State(**(VALUES | changes))), file)
    file.seek(0)
    return from_containers(State, torch.load(file, weights_only=True))


def test_it_comes_back_as_it_was() -> None:
    for changes in ({}, {"either": "three"}, {"either": None}):
        agree(through_a_file(**changes), State(**(VALUES | changes)))


def test_tensors_keep_their_strides() -> None:
    """A sum over a turned matrix may have other last bits than over a straight one."""
    turned = torch.arange(6.0).view(2, 3).T
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    agree(through_a_file(rows=(turned, image)).rows, (turned, image))


MISFITS: dict[str, dict[str, Any]] = {
    r"state\.names": {"names": ...},
    r"state\.new": {"new": 1},
    r"state\.late\.counts": {"late": {"means": torch.zeros(1)}},
    r"state\.table\.7\.w": {"table": {7: {"w": 1.0}}},
}


@pytest.mark.parametrize("place", MISFITS)
def test_what_does_not_fit_is_refused_with_its_place(place: str) -> None:
    saved = to_containers(State(**VALUES)) | MISFITS[place]
    with refusing(match=place):
        from_containers(State, {key: value for key, value in saved.items() if value is not ...})


def test_containers_are_copies_without_the_base_of_a_view() -> None:
    base, weight = torch.zeros(1000), torch.nn.Parameter(torch.ones(2))
    views = {"slice": base[:2], "spread": base[:1].expand(3), "turned": base[:6].view(2, 3).T, "scalar": base[0]}
    saved = to_containers({**views, "weight": weight})
    assert all(saved[name].untyped_storage().nbytes() == 4 * views[name].numel() for name in views)
    with torch.no_grad():
        weight.zero_()
    assert saved["weight"].tolist() == [1, 1] and type(saved["weight"]) is torch.Tensor


def test_types_that_weights_only_does_not_read() -> None:
    """A NumPy float is a Python float, so it becomes one; others are refused."""
    assert {type(value) for value in to_containers([np.float64(0.5), 0.5])} == {float}
    for value in ({1, 2}, np.zeros(2), torch.Generator(), Unit, {np.int64(1): 2}):
        with pytest.raises(TypeError):
            to_containers({"state": [value]})
