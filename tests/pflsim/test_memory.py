import os
import subprocess
import sys

import pytest

from pflsim import memory
from pflsim.memory import MemorySampler, held_mb

HOLD = "import sys; block = bytearray(b'x') * 100_000_000; print(flush=True); sys.stdin.read()"


def test_a_child_process_counts_and_the_peak_stays():
    sampler = MemorySampler()
    before = sampler.sample(force=True)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = sampler.sample(force=True)
        child.communicate()
    assert 95 < during - before < 140
    assert sampler.sample(force=True) < during - 90
    assert sampler.peak_mb == during


def test_without_smaps_the_resident_set_counts(monkeypatch):
    def refuse(self):
        raise PermissionError

    monkeypatch.setattr(memory.Path, "read_text", refuse)
    resident = memory.psutil.Process(os.getpid()).memory_info().rss / 1e6
    assert held_mb() == pytest.approx(resident, rel=0.05)


def test_calls_that_come_too_soon_are_skipped(monkeypatch):
    taken = []
    monkeypatch.setattr(memory, "held_mb", lambda: taken.append(1) or sum(range(100_000)) / 1e9)
    sampler = MemorySampler()
    for _ in range(10):
        sampler.sample()
    assert len(taken) == 1
    sampler.sample(force=True)
    assert len(taken) == 2
