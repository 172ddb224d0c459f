"""Kills processes of a run again and again, and checks that the result stays equal to the bit: `make soak`.

The test runs the settings once without Ray, and then again on Ray. At times drawn from a seed it kills processes of the
second run: client actors, the server actor, several at once, an actor and then its replacement, Ray's own processes, or
the whole run. If the run ends, it is resumed. Only descendants of processes that this test starts are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cases import ROOT
from benchmarks.speed.report import put, table
from benchmarks.tools.references import run_digests
from pflsim.records.environment import code

PAGE = ROOT / "docs" / "reliability.md"
KINDS = {
    "client": "a client actor",
    "server": "the server actor",
    "several": "several actors at once",
    "again": "a client actor, and then its replacement",
    "raylet": "Ray's raylet, which ends Ray",
    "killed": "the whole run, kill -9",
    "terminated": "the whole run, SIGTERM",
}
DECK = {"client": 8, "server": 3, "several": 3, "again": 2, "raylet": 1, "killed": 2, "terminated": 2}
"""How often each kind is in the deck. The deck is shuffled, drawn to its end, and shuffled again."""
ROLES = {"ray::ClientActor": "client", "ray::ServerActor": "server", "raylet": "raylet"}
ENDS = {"killed": -signal.SIGKILL, "terminated": 128 + signal.SIGTERM, "raylet": 1}
"""The exit status of the run for each kind that ends it."""
POLL_INTERVAL_S = 0.02
ROUND_TIMEOUT_S = 240.0
EXIT_TIMEOUT_S = 90.0
"""How long the processes of the run may take to end after it; after kill -9, Ray's agents take a minute."""
FORMATS = {"every": "g"}
"""The formats of options in the command of the report."""


class SoakError(RuntimeError):
    """The run did not continue as expected."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What to kill, and when.

    Args:
        after: the number of recorded rounds.
        moment: the time to wait after that, in rounds.
        kind: one of `KINDS`.
        draw: chooses one of several processes; in [0, 1).
    """

    after: int
    moment: float
    kind: str
    draw: float


@dataclass(slots=True)
class Tally:
    """Counts of what has happened.

    Args:
        kills: how often each kind was killed.
        killed: the number of processes.
        lost: seconds by kind, compared with undisturbed rounds.
        resumes: how often the run was resumed.
        left: processes and folders that were left behind.
    """

    kills: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    lost: dict[str, float] = field(default_factory=dict)
    resumes: int = 0
    left: list[str] = field(default_factory=list)


def draw_kills(rounds: int, every: float, seed: int) -> list[Kill]:
    """Draw what to kill: on average one kill in `every` rounds, none in the last two rounds."""
    draw = random.Random(seed)
    kills: list[Kill] = []
    deck: list[str] = []
    after = 0
    while True:
        after += 1 + round(draw.expovariate(1 / (every - 1))) if every > 1 else 1
        if after >= rounds - 1:
            return kills
        if not deck:
            deck = [kind for kind, times in DECK.items() for _ in range(times)]
            draw.shuffle(deck)
        kills.append(Kill(after, draw.random(), deck.pop(), draw.random()))


def role_of(words: Sequence[str]) -> str:
    """Return the role of a process from its command line; empty if it has none."""
    first = words[0] if words else ""
    found = [role for start, role in ROLES.items() if first.startswith(start) or Path(first).name == start]
    return found[0] if found else ""


def choose_processes(kill: Kill, by_role: Mapping[str, Sequence[psutil.Process]]) -> list[psutil.Process]:
    """Return the processes to kill."""
    clients, servers = list(by_role.get("client", ())), list(by_role.get("server", ()))
    if kill.kind in ("client", "again"):
        return [clients[int(kill.draw * len(clients))]] if clients else []
    if kill.kind == "several":
        processes = [*clients, *servers]
        random.Random(kill.draw).shuffle(processes)
        return processes[: max(2, round(kill.draw * len(processes)))]
    return list(by_role.get(kill.kind, ()))


class Soak:
    """Runs settings on Ray while killing its processes.

    Args:
        settings: the settings of the run, as for launch.py.
        folder: a new run folder.
        kills: what to kill, in the order of their rounds.
        log: the file for the output of the run.
        report: called with a line for each kill.
    """

    def __init__(
        self, settings: Sequence[str], folder: Path, kills: Sequence[Kill], log: Path, report: Callable[[str], None]
    ):
        self.settings, self.folder, self.log, self.report = settings, folder, log, report
        self.kills = list(kills)
        self.tally = Tally()
        self._quiet: list[float] = []
        self._since: tuple[str, float, int] = ("", time.monotonic(), 0)  # the last kill, its time, and its round
        self._drivers: list[int] = []
        self._seen: set[psutil.Process] = set()

    def run(self) -> None:
        """Run to the end, and resume the run whenever it is killed.

        Raises:
            SoakError: the run ended with an unexpected status, or did not continue.
        """
        arguments = [*self.settings, f"run_dir={self.folder}"]
        while True:
            ended_by, status = self._session(arguments)
            if ended_by is None and status == 0:
                break
            if ended_by is None or status != ENDS[ended_by]:
                raise SoakError(f"the run ended with status {status} after {ended_by or 'no kill'}")
            arguments = [f"resume={self.folder}"]
            self.tally.resumes += 1
        self._settle_up(time.monotonic(), self._rounds())
        self.tally.left = [*self.tally.left, *self._folders_left()]

    @property
    def quiet(self) -> float:
        """The median seconds of a round in which nothing was killed."""
        return statistics.median(self._quiet) if self._quiet else 0.0

    def _session(self, arguments: Sequence[str]) -> tuple[str | None, int]:
        """Run one process to its end; return the kind of kill that ended it, or None, and the exit status."""
        with self.log.open("a", encoding="utf-8") as output:
            driver = psutil.Popen(
                [sys.executable, str(ROOT / "launch.py"), *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._drivers.append(driver.pid)
        ended_by, last_round, rounds, disturbed = None, time.monotonic(), self._rounds(), True
        try:
            while driver.poll() is None:
                time.sleep(POLL_INTERVAL_S)
                now, count = time.monotonic(), self._rounds()
                if count != rounds:
                    if count == rounds + 1 and not disturbed:
                        self._quiet.append(now - last_round)
                    last_round, rounds, disturbed = now, count, False
                    self._seen.update(_descendants(driver))
                if now - last_round > ROUND_TIMEOUT_S:
                    raise SoakError(f"no new round for {ROUND_TIMEOUT_S:.0f} seconds after round {count}")
                if ended_by is None and self.kills and count >= self.kills[0].after:
                    disturbed = True
                    ended_by = self._strike(driver, self.kills.pop(0), count)
        finally:
            self._end(driver)
        return ended_by, driver.returncode

    def _strike(self, driver: psutil.Popen, kill: Kill, count: int) -> str | None:
        """Kill processes; return the kind if it ends the run, else None."""
        time.sleep(kill.moment * self.quiet)
        self._settle_up(time.monotonic(), count)
        processes = _descendants(driver)
        self._seen.update(processes)
        if kill.kind in ("killed", "terminated"):
            hit: list[psutil.Process] = [driver]
            driver.send_signal(signal.SIGKILL if kill.kind == "killed" else signal.SIGTERM)
        else:
            hit = _kill(choose_processes(kill, _by_role(processes)))
            if kill.kind == "again" and hit:
                hit += _kill(self._next(driver, set(processes)))
        if not hit:
            return None
        self.tally.kills[kill.kind] += 1
        self.tally.killed += len(hit)
        self._since = kill.kind, time.monotonic(), count
        self.report(f"after round {count}: {KINDS[kill.kind]} ({len(hit)})")
        return kill.kind if kill.kind in ENDS else None

    def _next(self, driver: psutil.Popen, before: set[psutil.Process]) -> list[psutil.Process]:
        """Wait for a new client actor and return its process."""
        until = time.monotonic() + ROUND_TIMEOUT_S
        while driver.poll() is None and time.monotonic() < until:
            new = [one for one in _descendants(driver) if one not in before]
            if found := _by_role(new).get("client"):
                return found[:1]
            time.sleep(POLL_INTERVAL_S)
        return []

    def _settle_up(self, now: float, count: int) -> None:
        """Add the seconds lost since the last kill: those beyond what undisturbed rounds would have taken."""
        kind, then, rounds = self._since
        if kind:
            spent = max(0.0, now - then - max(0, count - rounds) * self.quiet)
            self.tally.lost[kind] = self.tally.lost.get(kind, 0.0) + spent

    def _rounds(self) -> int:
        """Return the number of recorded rounds."""
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def _end(self, driver: psutil.Popen) -> None:
        """Wait for the processes of the run to end; record and kill those that are left."""
        if driver.poll() is None:  # only after an error
            self._seen.update(_descendants(driver))
            driver.kill()
            driver.wait()
        _, left = psutil.wait_procs(list(self._seen), timeout=EXIT_TIMEOUT_S)
        for one in left:
            self.tally.left.append(f"process {_words(one)[:1]}")
        _kill(left)
        self._seen = set()

    def _folders_left(self) -> list[str]:
        places = {Path(tempfile.gettempdir()), Path("/tmp")}
        return [str(p) for pid in self._drivers for place in places for p in place.glob(f"pflsim-ray-{pid}-*")]


def _descendants(driver: psutil.Process) -> list[psutil.Process]:
    try:
        return driver.children(recursive=True)
    except psutil.Error:
        return []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _by_role(processes: Iterable[psutil.Process]) -> dict[str, list[psutil.Process]]:
    found: dict[str, list[psutil.Process]] = {}
    for one in sorted(processes, key=lambda process: process.pid):
        found.setdefault(role_of(_words(one)), []).append(one)
    return found


def _kill(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Kill processes; return those that were still running. psutil checks that an id was not reused."""
    hit = []
    for one in processes:
        try:
            one.kill()
            hit.append(one)
        except psutil.Error:
            continue
    return hit


def differences(one: Path, other: Path) -> list[str]:
    """Return the differences, to the bit, of the records and the last checkpoints of two runs; times are ignored."""
    own, others = run_digests(one), run_digests(other)
    return sorted(key for key in own.keys() | others.keys() if own.get(key) != others.get(key))


def report(
    command: str,
    measured: Mapping[str, Any],
    rounds: int,
    restarts: int,
    quiet: float,
    tally: Tally,
    different: list[str],
) -> str:
    """Return the result as Markdown."""
    commit = str(measured["commit"])[:7] + (" and changes" if measured["dirty"] else "")
    rows_of_run = {
        "commit": commit,
        "rounds": str(rounds),
        "processes killed": str(tally.killed),
        "actors replaced, as the run counts them": str(restarts),
        "times the run was resumed": str(tally.resumes),
        "an undisturbed round": f"{quiet:.2f} s",
        "left behind": ", ".join(tally.left) or "nothing",
        "against the straight run": f"**different**: {', '.join(different[:9])}" if different else "equal to the bit",
    }
    rows = []
    for kind, words in KINDS.items():
        if times := tally.kills[kind]:
            rows.append((words, str(times), f"{(lost := tally.lost.get(kind, 0.0)):.0f}", f"{lost / times:.1f}"))
    rows.append(("all", str(tally.kills.total()), f"{sum(tally.lost.values()):.0f}", ""))
    kills = table(("killed", "times", "seconds lost", "each"), rows)
    return f"`{command}`\n\n{table(('what', ''), rows_of_run.items())}\n\n{kills}"


def settings_of(given: argparse.Namespace) -> list[str]:
    """Return the settings of the run: with client and server state, faults, and a checkpoint every 10 rounds."""
    return [
        f"method={given.method}", "data=digits", f"clients={given.clients}", f"rounds={given.rounds}",
        f"seed={given.seed}", "fraction=0.8", f"local_epochs={given.local_epochs}", "momentum=0.5", "init=per_client",
        "faults.dropout=0.1", "faults.straggler=0.1", "checkpoint.every=10", "placement.cpus=2",
        f"placement.actors={given.actors}", *given.settings,
    ]  # fmt: skip


def command_of(given: argparse.Namespace) -> str:
    """Return the command that repeats the test."""
    names = ("rounds", "seed", "every", "method", "clients", "actors", "local_epochs")
    options = [f"--{name.replace('_', '-')} {getattr(given, name):{FORMATS.get(name, '')}}" for name in names]
    return f'make soak ARGS="{" ".join([*options, *given.settings])}"'


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test and print the result; return the exit status: 1 if the runs differ or something is left behind."""
    given = _options(arguments)
    measured, settings = code(), settings_of(given)
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        folder = Path(given.keep or place).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        straight, soaked, log = folder / "straight", folder / "soaked", folder / "soak.log"
        print(f"without Ray: {' '.join(settings)}", flush=True)
        launch = [sys.executable, str(ROOT / "launch.py"), *settings, "executor=inline", f"run_dir={straight}"]
        with log.open("w", encoding="utf-8") as output:
            subprocess.run(launch, stdout=output, stderr=subprocess.STDOUT, check=True)
        kills = draw_kills(given.rounds, given.every, given.seed)
        print(f"on Ray, with {len(kills)} kills", flush=True)
        soak = Soak(settings, soaked, kills, log, lambda text: print(text, flush=True))
        try:
            soak.run()
        except SoakError as error:
            print(f"error: {error}; the last lines of its output:\n{_end_of(log)}", file=sys.stderr)
            return 1
        different = differences(straight, soaked)
        summary = json.loads((soaked / "summary.json").read_text(encoding="utf-8"))
        restarts = summary.get("actor_restarts", 0)
        made = report(command_of(given), measured, given.rounds, restarts, soak.quiet, soak.tally, different)
    print(made)
    if given.page:
        PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), {"soak": made}), encoding="utf-8")
        print(f"written to {PAGE.relative_to(ROOT)}")
    return 1 if different or soak.tally.left else 0


def _end_of(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tools.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the run and of the kills")
    parser.add_argument("--every", type=float, default=8, help="the average number of rounds between kills")
    parser.add_argument("--method", default="pfedla")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--local-epochs", type=int, default=60, help="local epochs, which decide how long a round is")
    parser.add_argument("--keep", help="keep both runs and the output in this folder")
    parser.add_argument("--page", action="store_true", help=f"write the result to {PAGE.relative_to(ROOT)}")
    parser.add_argument("settings", nargs="*", help="more settings of the run, as for launch.py")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
