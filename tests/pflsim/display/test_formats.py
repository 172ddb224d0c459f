"""Numbers as text: bytes, durations, metrics, and intervals of differences."""

import pytest

from pflsim.display.formats import format_bytes, format_seconds
from pflsim.display.metrics import rounded, signed, steady


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_994, "9.99 kB"), (9_996, "10.0 kB"), (99_960, "100 kB"),
     (999_499, "999 kB"), (999_500, "1.00 MB"), (1_234_567_890, "1.23 GB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_bytes_have_three_digits(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (0.0001, "1 ms"), (0.0994, "99 ms"), (0.0996, "0.1 s"),
     (9.94, "9.9 s"), (9.96, "10 s"), (99.4, "99 s"), (99.6, "1m40s"), (3599.4, "59m59s"),
     (3599.6, "1h00m"), (7505, "2h05m")],
)  # fmt: skip
def test_durations_are_short(seconds, text):
    assert format_seconds(seconds) == text


def test_numbers_have_the_digits_of_their_size() -> None:
    assert [rounded(x) for x in (0.0, 0.4464, 2.7461, 72.0154, 230.4171, 12345.6, 445387993.0)] == [
        "0.000", "0.446", "2.746", "72.02", "230.4", "12346", "4.45e8"
    ]  # fmt: skip
    assert [signed(x) for x in (158.402, -0.446, -1.2345e6, 0.0, None)] == [
        "+158.4", "−0.446", "−1.23e6", "0.000", "—"
    ]  # fmt: skip
    assert [signed(x, 1) for x in (0.04, -0.004, 24.6, 0.0)] == ["+0.04", "−0.004", "+24.6", "0.0"]


@pytest.mark.parametrize(
    ("low", "high", "decimals", "text"),
    [
        (0.0414, 0.0538, 1, "[+4.1, +5.4]"),
        (0.0414, 0.0738, 1, "[+4, +7]"),
        (-0.0731, 0.0004, 1, "[−7, +0]"),  # the side of 0 stays
        (0.00003, 0.00008, 1, "[+0.003, +0.008]"),
        (0.01, 0.01, 1, "[+1.0, +1.0]"),
        (-0.0863, -0.0723, None, "[−8.6, −7.2]"),
        (12.344, 98.765, None, "[+1000, +10000]"),
    ],
)
def test_digits_that_do_not_depend_on_the_seed_of_the_bootstrap(
    low: float, high: float, decimals: int | None, text: str
) -> None:
    assert steady(low, high, 100, decimals) == text
