"""Runs the parts of the check, each in processes of its own: `bash benchmarks/gpu_check.sh`."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.cases import OUT, ROOT
from benchmarks.speed.report import table

PARTS = {1: "right", 2: "fast", 3: "memory", 4: "fractions"}
SHARES = {1: 0.45, 2: 0.3, 3: 0.1, 4: 0.15}
"""Of the time; what a part leaves over goes to the next ones."""
SHARDS = {1: min(5, len(os.sched_getaffinity(0)) // 2 or 1)}
"""Processes among which the checks of a part are divided; the other parts measure, and have one."""
WORDS = {True: "ok", False: "FAILED", None: "skipped"}
DEVICES = {"cuda": "cuda:0", "cpu": "cpu"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, or print the page of earlier results.

    Returns:
        The exit status: 1 if a check failed or did not run.
    """
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_check.sh", description="Checks a GPU; see docs/gpu.md.")
    parts = "1 right, 2 fast, 3 memory, 4 fractions of a GPU"
    parser.add_argument("--parts", type=numbers, default=[*PARTS], help=parts)
    parser.add_argument("--seconds", type=float, default=420, help="for all parts together")
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="cpu tries the check itself, at small sizes")
    parser.add_argument("--only", default="", help="parts of the names of checks, with commas")
    parser.add_argument("--out", type=Path, default=OUT / "gpu", help="folder of results.jsonl, which is appended to")
    parser.add_argument("--page", type=Path, nargs="+", help="print the page of these files of results")
    parser.add_argument("--shard", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if not set(given.parts) <= set(PARTS):
        parser.error(f"argument --parts: expected numbers from {parts}")
    if given.page:
        print(page([json.loads(line) for path in given.page for line in path.read_text().splitlines()]))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    if given.shard:
        return run_part(given.parts[0], given.device, given.only, given.out, *given.shard)
    end, failed = time.monotonic() + given.seconds, False
    for number, part in enumerate(given.parts):
        left = end - time.monotonic()
        limit = left * SHARES[part] / sum(SHARES[later] for later in given.parts[number:])
        failed |= not finished(part, given, limit)
    print(f"results: {given.out / 'results.jsonl'}")
    return int(failed)


def numbers(text: str) -> list[int]:
    """Parse 1,2."""
    return [int(part) for part in text.split(",")]


def finished(part: int, given: argparse.Namespace, limit: float) -> bool:
    """Run a part in processes that end after `limit` seconds at the latest; return whether all went well."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--parts", str(part), "--device", given.device]
    command += ["--only", given.only, "--out", str(given.out.absolute())]
    shards, end, good = SHARDS.get(part, 1), time.monotonic() + limit, True
    children = [
        subprocess.Popen([*command, "--shard", str(k), str(shards)], cwd=ROOT, start_new_session=True)
        for k in range(shards)
    ]
    try:
        for child in children:
            try:
                status = child.wait(max(end - time.monotonic(), 0))
                why = f"exit status {status}"
            except subprocess.TimeoutExpired:
                status, why = -1, f"stopped after {limit:.0f} s"
            if status not in (0, 1):
                write(given.out, row(given.device, part, "the rest", False, why, limit))
            good &= status == 0
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    return good


def run_part(part: int, device: str, only: str, out: Path, shard: int, shards: int) -> int:
    """Run every `shards`-th check of a part, beginning with number `shard`, in this process."""
    start = time.perf_counter()
    import torch

    from benchmarks.gpu_check.runs import Skipped
    from lightning_modules.hosts.devices import claim_device
    from pflsim.records.environment import code, machine, versions

    if device != "cpu" and not torch.cuda.is_available():
        write(out, row(device, part, "start", False, "torch sees no GPU", 0))
        return 1
    logging.getLogger().addHandler(logging.NullHandler())  # results say what failed
    claim_device(DEVICES[device], 1.0)
    where = {**versions(), **code(), **machine()}
    where = {name: where[name] for name in ("python", "torch", "commit", "dirty", "processor", "cpus") if name in where}
    where["gpu"] = torch.cuda.get_device_name() if device != "cpu" else None
    write(out, row(device, part, "start", True, json.dumps(where), time.perf_counter() - start))
    found = import_module(f"benchmarks.gpu_check.{PARTS[part]}").checks(DEVICES[device])
    chosen = [check for check in found if any(text in check[0] for text in only.split(","))]
    if not chosen:
        write(out, row(device, part, only, False, "no check has such a name", 0))
    failed = not chosen
    for name, check in chosen[shard::shards]:
        start, passed, text = time.perf_counter(), True, ""
        try:
            text = check()
        except Skipped as reason:
            passed, text = None, str(reason)
        except Exception as error:
            passed, text = False, f"{type(error).__name__}: {error}"
            with (out / "errors.txt").open("a", encoding="utf-8") as file:
                file.write(f"part {part}, {name}\n{traceback.format_exc()}\n")
        failed |= passed is False
        write(out, row(device, part, name, passed, text, time.perf_counter() - start))
        gc.collect()  # executors contain cycles, which would keep their memory
        if device != "cpu":
            torch.cuda.empty_cache()
    return int(failed)


def row(device: str, part: int, name: str, passed: bool | None, text: str, seconds: float) -> dict[str, Any]:
    """Return the result of a check."""
    found = dict(device=device, part=part, check=name, result=WORDS[passed], found=text[:400])
    return {**found, "seconds": round(seconds, 1)}


def write(out: Path, result: dict[str, Any]) -> None:
    """Print a result, and append it to the file."""
    sys.stdout.write("  ".join(str(value) for value in result.values()) + "\n")
    sys.stdout.flush()
    with (out / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def page(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the newest result of each check."""
    newest = {(result["device"], result["part"], result["check"]): result for result in results}
    ordered = sorted(newest.values(), key=lambda result: (result["device"], result["part"]))
    rows = [[str(value).replace("|", "/").replace("\n", " ") for value in result.values()] for result in ordered]
    return table(("device", "part", "check", "result", "found", "seconds"), rows)


if __name__ == "__main__":
    sys.exit(main())
