"""A state is rebuilt by the types of its fields; what does not fit is refused with a message."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pflsim.errors import SettingsError
from pflsim.messages import Prototypes
from pflsim.records.checkpoint.state import plain, restored
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
    nothing: tuple[Tensors, ...] = ()
    on: bool = True
    scale: float = 1.0
    either: int | str | None = 3


def state(**changes: Any) -> State:
    values: dict[str, Any] = {
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
    return State(**(values | changes))


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(plain(value), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_it_comes_back_as_it_was() -> None:
    example = State({}, (), None, None, "entry", (0, 0.0), [], (), ())
    back = restored(example, through_a_file(state()))
    assert type(back) is State
    assert list(back.table) == [7, 2] and list(back.table[2]) == ["w", "n"]
    assert torch.equal(back.table[7]["w"], torch.arange(3.0)) and back.table[2]["w"].dtype == torch.float64
    assert back.table[2]["n"].shape == () and back.table[2]["n"].item() == 4
    assert back.units == (Unit("a", ("x", "y"), ("z",)), Unit("b", ()))
    assert back.means is None and type(back.late) is Prototypes and back.late.means.shape == (2, 0)
    assert (back.kind, back.pair, back.names, back.shapes) == ("norm", (1, 0.5), ["p", "q"], ((2, 3), ()))
    assert type(back.pair[1]) is float and type(back.rows) is tuple and back.rows[0].dtype == torch.bool
    assert (back.nothing, back.on, back.scale, back.either) == ((), True, 1.0, 3)


@pytest.mark.parametrize("value", [3, "three", None])
def test_one_of_several_types(value: object) -> None:
    assert restored(state(), through_a_file(state(either=value))).either == value


def test_tensors_keep_their_strides() -> None:
    """A sum over a turned matrix may have other last bits than over a straight one."""
    turned = torch.arange(6.0).view(2, 3).T
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    back = restored(state(), through_a_file(state(rows=(turned, image))))
    assert [row.stride() for row in back.rows] == [(1, 3), image.stride()]
    assert torch.equal(back.rows[0], turned)


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"scale": "drop"}, "state was saved without scale"),
    "unknown": ({"new": 1}, "state was saved with new"),
    "both": ({"scale": "drop", "new": 1}, "state was saved without scale and with new"),
    "nested": ({"late": {"means": torch.zeros(1)}}, "state.late was saved without counts"),
    "None": ({"on": None}, "state.on was saved as NoneType; expected bool"),
    "number": ({"pair": [1, "x"]}, r"state.pair\[1\] was saved as str; expected float"),
    "fewer": ({"pair": [1]}, "state.pair was saved with 1 items instead of 2"),
    "no list": ({"names": "pq"}, "state.names was saved as str; expected list"),
    "key": ({"table": {"7": {}}}, "a key of state.table was saved as str; expected int"),
    "tensor": ({"table": {7: {"w": 1.0}}}, r"state.table\[7\]\['w'\] was saved as float; expected Tensor"),
    "literal": ({"kind": "other"}, "state.kind was saved as str; expected Literal"),
    "no mapping": ({"table": []}, "state.table was saved as list; expected Mapping"),
    "no state": ({"units": [3]}, r"state.units\[0\] was saved as int; expected Unit"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_with_a_message(case: str) -> None:
    changes, message = MISFITS[case]
    saved = {
        key: value for key, value in (plain(state()) | changes).items() if not isinstance(value, str) or value != "drop"
    }
    with pytest.raises(SettingsError, match=f"the server's state cannot be restored: {message}"):
        restored(state(), saved)
    with pytest.raises(SettingsError, match="state was saved as list; expected State"):
        restored(state(), [])


@dataclass(frozen=True)
class Vague:
    what: Any = None
    many: tuple = field(default=())


@pytest.mark.parametrize("value", [{"what": 1, "many": []}, {"what": None, "many": [1]}])
def test_a_type_that_says_too_little_is_the_authors_mistake(value: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="state.what: the annotation typing.Any is not supported"):
        restored(Vague(), value)
