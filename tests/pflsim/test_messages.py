"""Bytes against closed forms."""

from __future__ import annotations

import pytest
import torch

from pflsim.messages import Message, Prototypes, Uplink, payload_bytes


def test_an_empty_message_costs_nothing() -> None:
    assert payload_bytes(Message()) == 0
    assert payload_bytes(Uplink(client=3, num_examples=100)) == 0  # the header is no traffic


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8), (torch.float16, 2)])
def test_weights_and_extra_by_element_size(dtype: torch.dtype, size: int) -> None:
    weights = {"w": torch.zeros(3, 5, dtype=dtype), "b": torch.zeros((), dtype=dtype)}
    assert payload_bytes(Message(weights=weights)) == 16 * size
    assert payload_bytes(Message(weights=weights, extra={"e": torch.zeros(7, dtype=torch.uint8)})) == 16 * size + 7


def test_a_view_costs_what_it_shows() -> None:
    base = torch.zeros(1000)
    assert payload_bytes(Message(weights={"slice": base[:3], "spread": base[:1].expand(5)})) == 8 * 4


@pytest.mark.parametrize("held", [0, 1, 4, 10])
def test_prototypes_of_the_classes_held(held: int) -> None:
    width = 17
    counts = torch.zeros(10, dtype=torch.int64)
    counts[torch.arange(held)] = torch.arange(1, held + 1)
    assert payload_bytes(Message(prototypes=Prototypes(torch.zeros(10, width), counts))) == held * (width + 1) * 4


def test_numbers_are_eight_bytes_and_sections_add_up() -> None:
    prototypes = Prototypes(torch.zeros(2, 3), torch.tensor([1, 0]))
    message = Uplink({"w": torch.zeros(2)}, prototypes, {"e": torch.zeros(1)}, {"a": 1, "b": 2.5}, 0, 5)
    assert payload_bytes(message) == 8 + 16 + 4 + 16
