import subprocess
import sys

from pflsim.records.tracker import MemorySampler


def test_a_child_process_counts_and_the_peak_stays():
    hold = "import sys; block = bytearray(b'x') * 100_000_000; print(flush=True); sys.stdin.read()"
    sampler = MemorySampler()
    before = sampler.sample(force=True)
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        during = sampler.sample(force=True)
        child.communicate()
    assert 80 < during - before < 160 and sampler.sample(force=True) < during - 80
    assert sampler.peak_mb == during
