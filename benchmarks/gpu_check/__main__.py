"""Runs the parts of the check, each in a process of its own: `bash benchmarks/gpu_check.sh`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.cases import OUT, ROOT

PARTS = {1: "right", 2: "fast", 3: "memory", 4: "fractions"}
SHARES = {1: 0.45, 2: 0.3, 3: 0.1, 4: 0.15}
"""Of the time; what a part leaves over goes to the next ones."""
SHARDS = {1: min(6, len(os.sched_getaffinity(0)) // 2 or 1)}
"""Processes among which the checks of a part are divided; the other parts measure, and have one."""
WORDS = {True: "ok", False: "FAILED", None: "skipped"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, or print the page of earlier results; the exit status is 1 if a check failed or did not run."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_check.sh", description="Checks a GPU; see docs/gpu.md.")
    parser.add_argument("--parts", default="1,2,3,4", help="1 right, 2 fast, 3 memory, 4 fractions of a GPU")
    parser.add_argument("--seconds", type=float, default=420, help="for all parts together")
    parser.add_argument("--device", default="cuda:0", help="cpu tries the check itself, with small sizes")
    parser.add_argument("--only", default="", help="parts of the names of checks, with commas")
    parser.add_argument("--out", type=Path, default=OUT / "gpu", help="folder of results.jsonl, which is appended to")
    parser.add_argument("--page", type=Path, nargs="+", help="print the page of these files of results")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.page:
        print(page([json.loads(line) for path in given.page for line in path.read_text().splitlines()]))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part:
        return run_part(given.part, given.device, given.only, given.out, *given.shard)
    end, status = time.monotonic() + given.seconds, 0
    parts = [int(part) for part in given.parts.split(",")]
    for number, part in enumerate(parts):
        left = end - time.monotonic()
        limit = left * SHARES[part] / sum(SHARES[later] for later in parts[number:])
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", str(part), "--device", given.device]
        command += ["--only", given.only, "--out", str(given.out.absolute())]
        shards = SHARDS.get(part, 1)
        children = [
            subprocess.Popen([*command, "--shard", str(k), str(shards)], cwd=ROOT, start_new_session=True)
            for k in range(shards)
        ]
        until = time.monotonic() + limit
        for child in children:
            try:
                status = max(status, int(child.wait(max(until - time.monotonic(), 0)) != 0))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                write(given.out, row(part, "the rest", False, f"stopped after {limit:.0f} s", limit))
                status = 1
    print(f"results: {given.out / 'results.jsonl'}")
    return status


def run_part(part: int, device: str, only: str, out: Path, shard: int, shards: int) -> int:
    """Run every `shards`-th check of a part, beginning with number `shard`, in this process."""
    start = time.perf_counter()
    import torch

    from benchmarks.gpu_check.runs import Skipped
    from pflsim.run_folder.environment import code, machine, versions
    from ray_actors.hosts.gpu import claim_device

    if device != "cpu" and not torch.cuda.is_available():
        write(out, row(part, "start", False, "torch sees no GPU", 0))
        return 1
    logging.getLogger().addHandler(logging.NullHandler())  # results say what failed
    claim_device(device, 1.0)
    found = versions()
    where = {"device": device, "torch": found["torch"], "python": found["python"], **code(), **machine()}
    write(out, row(part, "start", True, json.dumps(where), time.perf_counter() - start))
    failed = 0
    for name, check in import_module(f"benchmarks.gpu_check.{PARTS[part]}").checks(device)[shard::shards]:
        if not any(text in name for text in only.split(",")):
            continue
        start, passed, text = time.perf_counter(), True, ""
        try:
            text = check()
        except Skipped as reason:
            passed, text = None, str(reason)
        except Exception as error:
            passed, text = False, f"{type(error).__name__}: {error}"
        failed += passed is False
        write(out, row(part, name, passed, text, time.perf_counter() - start))
    return int(failed > 0)


def row(part: int, name: str, passed: bool | None, text: str, seconds: float) -> dict[str, Any]:
    """Return the result of a check."""
    return dict(part=part, check=name, result=WORDS[passed], found=text[:400], seconds=round(seconds, 1))


def write(out: Path, result: dict[str, Any]) -> None:
    """Print a result, and append it to the file."""
    print("  ".join(str(value) for value in result.values()), flush=True)
    with (out / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def page(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the newest result of each check."""
    newest = {(result["part"], result["check"]): result for result in results}
    ordered = sorted(newest.values(), key=lambda result: result["part"])
    rows = [[str(value).replace("|", "/").replace("\n", " ") for value in result.values()] for result in ordered]
    lines = [["part", "check", "result", "found", "seconds"], ["---"] * 5, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
