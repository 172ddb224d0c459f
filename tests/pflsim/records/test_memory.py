import subprocess
import sys
from pathlib import Path

import pflsim
from pflsim.records import tracker as memory
from pflsim.records.tracker import MemorySampler

SCRIPT = """
import subprocess, sys
from pflsim.records.tracker import MemorySampler

hold = "import sys; block = bytearray(b'x') * 100_000_000; print(flush=True); sys.stdin.read()"
sampler = MemorySampler()
print(sampler.sample(force=True))
with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print(sampler.sample(force=True))
    child.communicate()
print(sampler.sample(force=True))
print(sampler.peak_mb)
"""


def test_a_child_process_counts_and_the_peak_stays():
    root = Path(pflsim.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, cwd=root)
    before, during, after, peak = map(float, done.stdout.split())
    assert 95 < during - before < 140
    assert after < during - 90
    assert peak == during


def test_calls_that_come_too_soon_are_skipped(monkeypatch):
    taken = []
    monkeypatch.setattr(memory, "held_mb", lambda: taken.append(1) or sum(range(100_000)) / 1e9)
    sampler = MemorySampler(share=1e-6)
    for _ in range(10):
        sampler.sample()
    assert len(taken) == 1
    sampler.sample(force=True)
    assert len(taken) == 2
