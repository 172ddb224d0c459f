"""Runs a benchmark module in its own process and samples its memory. Failures are returned, not raised."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cases import ROOT
from pflsim.records.tracker import MemorySampler, held_mb


def run_module(
    module: str, arguments: Sequence[str], log: Path, limit_s: float, sampling: float | None = None
) -> dict[str, Any]:
    """Return what `python -m module ... --out FILE` writes, with its peak memory, or `{"error": ...}`.

    Args:
        module: writes a JSON object to the file of `--out`.
        arguments: the other arguments of its command line.
        log: the file for its output.
        limit_s: the time limit in seconds.
        sampling: the largest fraction of the time for sampling the memory; None: the default.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, log.open("w", encoding="utf-8") as output:
        out, start = Path(folder) / "out.json", time.perf_counter()
        before, sampler = held_mb(), MemorySampler() if sampling is None else MemorySampler(sampling)
        command = [sys.executable, "-m", module, *arguments, "--out", str(out)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = _watch(process, sampler, start + limit_s)
        finally:
            _end(process)
        seconds = time.perf_counter() - start
        if code == 0 and out.exists():
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            peak = max([sampler.peak_mb - before, *found.get("held_mb", [])])
            return {**found, "peak_mb": peak, "wall": seconds}
    reason = f"no end after {limit_s:.0f} s" if code is None else _last_line(log)
    return {"error": f"status {code}: {reason}" if code else reason, "wall": seconds}


def _watch(process: subprocess.Popen[bytes], sampler: MemorySampler, until: float) -> int | None:
    """Return the exit status, or None after the time limit."""
    while process.poll() is None:
        if time.perf_counter() > until:
            return None
        sampler.sample()
        time.sleep(0.05)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that still runs, and its children."""
    if process.poll() is None:
        processes = [*psutil.Process(process.pid).children(recursive=True), process]
        for one in processes:
            try:
                one.kill()
            except psutil.Error:
                continue
        process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"
