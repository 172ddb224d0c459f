"""Damages the files of run folders, and resumes, compares, reports and loads what is left.

    python -m benchmarks.tools.damage --seed 0 --mutations 60

No command may end with a status other than 0, 1 and 2, print a traceback, or take longer than `LIMIT_S`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import pflsim
from pflsim import cli
from pflsim.terminal.exit_status import exit_status
from ray_actors import run

LIMIT_S = 60
RUN = ["method=fedavg", "data=digits", "clients=4", "rounds=4", "model.hidden=[4]", "executor=inline", "fraction=0.5",
       "checkpoint.every=1", "checkpoint.keep=2", "faults.dropout=0.3", "progress=none"]  # fmt: skip
WRONG = (None, "x", -1, 1.5, [], {}, True, ["x"], {"x": 1})


def change_field(path: Path, draw: Any) -> None:
    """Give a field of a JSON file, or of a line of one, another type, or remove it."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = draw.randrange(len(lines))
    whole: dict[str, Any] = json.loads(lines[number])
    found = whole
    while isinstance(found[key := draw.choice(list(found))], dict) and found[key] and draw.random() < 0.7:
        found = found[key]
    if draw.random() < 0.3:
        del found[key]
    else:
        found[key] = draw.choice(WRONG)
    lines[number] = json.dumps(whole)
    path.write_text("\n".join(lines) + "\n")


def mutate(path: Path, draw: Any) -> str:
    """Damage a file, and return how."""
    data, text = path.read_bytes(), path.suffix in (".jsonl", ".csv", ".yaml")
    kinds = ["truncate", "empty", "flip", "delete", *(["duplicate", "reverse"] if text else [])]
    kind = draw.choice([*kinds, *(["field"] * 3 if path.suffix in (".json", ".jsonl") else [])])
    lines, place = data.splitlines(keepends=True), draw.randrange(max(len(data), 1))
    if kind == "field":
        change_field(path, draw)
    elif kind == "delete":
        path.unlink()
    elif kind == "flip":
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
    else:
        twice = draw.randrange(max(len(lines), 1))
        path.write_bytes({
            "truncate": data[:place], "empty": b"", "reverse": b"".join(reversed(lines)),
            "duplicate": b"".join(lines[: twice + 1] + lines[twice:]),
        }[kind])  # fmt: skip
    return kind


def interrupted(folder: Path) -> None:
    """Run until round 3 is being recorded, as if a signal came then."""
    real = run._Listener.round

    def stop(self: run._Listener, record: object) -> None:
        if getattr(record, "round", 0) == 3:
            raise KeyboardInterrupt
        real(self, record)  # type: ignore[arg-type]

    run._Listener.round = stop  # type: ignore[method-assign, assignment]
    cli.main([*RUN, f"run_dir={folder}"])
    run._Listener.round = real  # type: ignore[method-assign]


def main() -> int:
    """Damage files, one after another; return 1 if a command did what it may not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutations", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, statuses, bad, start = random.Random(options.seed), Counter[str](), 0, time.monotonic()
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(SystemExit("took too long")))
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        root = Path(name)
        with contextlib.redirect_stderr(io.StringIO()):
            cli.main([*RUN, f"run_dir={root / 'finished'}"])
            interrupted(root / "interrupted")
        for number in range(options.mutations):
            folder = Path(shutil.copytree(root / ("finished", "interrupted")[number % 2], root / "damaged"))
            files = sorted(
                path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".csv", ".yaml", ".pt")
            )
            path = draw.choice(files)
            done = f"{('finished', 'interrupted')[number % 2]}: {mutate(path, draw)} {path.relative_to(folder)}"
            commands = {
                "compare": lambda f=folder: cli.main(["compare", str(f)]),
                "report": lambda f=folder: cli.main(["report", str(f)]),
                "load": lambda f=folder: exit_status(lambda: pflsim.load_model(f, 1) and None),
                "resume": lambda f=folder: cli.main([f"resume={f}", "checkpoint.every=1"]),
            }
            for command, call in commands.items():
                with contextlib.redirect_stderr(io.StringIO()) as errors:
                    signal.alarm(LIMIT_S)
                    try:
                        status = call()
                    except BaseException as error:
                        status = f"{type(error).__name__}: {error}"
                    signal.alarm(0)
                said = errors.getvalue()
                statuses[f"{command} {status}"] += 1
                if status not in (0, 1, 2) or "Traceback" in said or "unexpected error" in said:
                    bad += 1
                    print(f"{done}: {command} ends with {status}: {said.strip()[-300:]}", file=sys.stderr)
            shutil.rmtree(folder)
    print(f"seed {options.seed}, {options.mutations} mutations, {time.monotonic() - start:.0f} s: ", end="")
    print(", ".join(f"{what} × {times}" for what, times in sorted(statuses.items())), f"; {bad} unexpected")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
