"""Lines about what takes long: when they are due, what they say, and who wants none."""

import threading

import pytest

from pflsim.progress import watched


@pytest.mark.parametrize(("setting", "threads"), [(None, 1), ("none", 0), ("quiet", 0)])
def test_who_asks_for_no_output_gets_none(setting: str | None, threads: int) -> None:
    """The thread that prints ends with the block, also after an error."""
    before = {*threading.enumerate()}
    with pytest.raises(ValueError), watched(setting):
        found = {*threading.enumerate()} - before
        assert len(found) == threads
        raise ValueError
    for thread in found:
        thread.join()
