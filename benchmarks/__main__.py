"""Runs the benchmarks and writes their tables: `make bench`, or `python -m benchmarks --cases mlp-20,cnn-20`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cases import CASES, OUT, ROOT, WAYS, Case
from benchmarks.speed.per_client import MODELS
from benchmarks.speed.report import put, tables
from benchmarks.speed.results import Results
from benchmarks.speed.targets import verdicts
from pflsim.records.environment import code, machine, versions
from pflsim.records.tracker import MemorySampler, held_mb

PAGE, FIGURES = ROOT / "docs" / "performance.md", ROOT / "docs" / "performance.json"
DATASETS = ("FashionMNIST", "MNIST")
"""The folders that --root must contain."""
LIMIT_S = 2400
MAX_SAMPLING = 0.3
"""The largest fraction of the time that a memory case spends on sampling the memory."""
QUICK_ROUNDS, QUICK_GROWTH_ROUNDS = 1, 6
EPILOG = """All cases take 40 to 90 minutes on two idle cores: the CNN cases 8 to 20 minutes each, ResNet 4 to 9 each,
the others 1 to 5 each. --quick takes about 15 minutes and only shows that everything works. The figures of --quick and
--ways go to out/trial.json."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; return the exit status: 1 if a case failed, after the others were written."""
    given = _options(arguments)
    needed = DATASETS if {*given.cases} - {"start", "per-client"} else ()
    missing = [name for name in needed if not (Path(given.root) / name / "raw").is_dir()]
    if missing:
        print(f"error: no {missing[0]}/raw in {Path(given.root).resolve()}: set --root", file=sys.stderr)
        return 2
    trial = given.quick or bool(given.ways)  # incomplete figures do not go into the docs
    path, results = (OUT / "trial.json", Results({}, {})) if trial else (FIGURES, Results.read(FIGURES))
    results.environment.update({"versions": versions(), "machine": machine()})
    measured = code()  # before writing the page, which changes the repository
    failed: list[tuple[str, str, str]] = []
    for name in given.cases:
        found = _measure(CASES[name], given, measured)
        failed += Results({name: found}, {}).errors()
        results.replace(name, found)
        results.write(path)
        if not trial:
            PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), tables(results)), encoding="utf-8")
    print()
    for verdict in verdicts(results) if not given.quick else ():
        status = f"{verdict.measured}: {'met' if verdict.met else 'MISSED'}" if verdict.measured else "not measured"
        print(f"{verdict.what}: {verdict.target}; {status}")
    for case, way, error in failed:
        print(f"FAILED {case}, {WAYS[way]}: {error} (out/logs/{case}-{way}.log)", file=sys.stderr)
    print(f"written to {path.relative_to(ROOT)}" + ("" if trial else f" and {PAGE.relative_to(ROOT)}"))
    return 1 if failed else 0


def _measure(case: Case, given: argparse.Namespace, measured: dict[str, Any]) -> dict[str, Any]:
    """Measure the machine, then each way of a case in a new process; return the figures by way."""
    print(f"{case.name}: {case.about}", flush=True)
    found: dict[str, Any] = {}
    logs, head = OUT / "logs", {"at": datetime.now(UTC).isoformat(timespec="seconds"), **measured}
    if case.name != "start":
        head["rates"] = _run_module("benchmarks.speed.machine", [], logs / "machine.log", 300)
        print(f"  machine: {_brief(head['rates'])}", flush=True)
    rounds = case.rounds if case.growth else given.rounds or case.rounds
    if given.quick:
        rounds = QUICK_GROWTH_ROUNDS if case.growth else given.rounds or QUICK_ROUNDS
    options = ["--rounds", str(rounds), "--root", given.root, *(["--quick"] if given.quick else [])]
    for way in case.ways:
        if given.ways and way not in given.ways:
            continue
        done = _run_module(
            "benchmarks.speed.one",
            [case.name, way, *options],
            logs / f"{case.name}-{way}.log",
            given.limit,
            MAX_SAMPLING if case.growth else None,
        )
        found[way] = {**done, **head}
        print(f"  {WAYS[way]}: {_brief(done)}", flush=True)
    return found


def _run_module(
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
            status = _watch(process, sampler, start + limit_s)
        finally:
            _end(process)
        seconds = time.perf_counter() - start
        if status == 0 and out.exists():
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            peak = max([sampler.peak_mb - before, *found.get("held_mb", [])])
            return {**found, "peak_mb": peak, "wall": seconds}
    reason = f"no end after {limit_s:.0f} s" if status is None else _last_line(log)
    return {"error": f"status {status}: {reason}" if status else reason, "wall": seconds}


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
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.Error):
                one.kill()
        process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


def _brief(done: dict[str, Any]) -> str:
    if "error" in done:
        return f"FAILED: {done['error']}"
    if "one" in done:
        return f"{done['one']:.0f} GFLOP/s on one core, {done['two']:.0f} on two"
    if "linear" in done:
        return ", ".join(f"{model} {done[model]['training and reply']:.3f} ms to train" for model in MODELS)
    if "help" in done:
        return f"help {done['help']:.2f} s, first round {done['first_round']:.1f} s"
    each, steps = done["round"]["total"], done["round"]["steps"]
    return f"{each:.2f} s a round of {steps:.0f} steps, first {done['first']:.2f} s, peak {done['peak_mb']:.0f} MB"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", epilog=EPILOG)
    names = lambda known: lambda text: _chosen(text, known)  # noqa: E731
    parser.add_argument("--cases", type=names(list(CASES)), default=list(CASES), help=f"from {', '.join(CASES)}")
    parser.add_argument("--ways", type=names(list(WAYS)), default=[], help=f"only these, from {', '.join(WAYS)}")
    parser.add_argument(
        "--rounds",
        type=_positive,
        help="measured rounds of each case but the memory cases, after a first round",
    )
    parser.add_argument("--quick", action="store_true", help="use few images and measure one round")
    parser.add_argument("--root", default="data", help="folder with FashionMNIST/raw and MNIST/raw")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="time limit of a run in seconds")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: expected an integer of at least 1")
    return int(text)


def _chosen(text: str, known: Sequence[str]) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name}: expected one of {', '.join(known)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
