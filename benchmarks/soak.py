"""A run whose processes are killed again and again, and whose result must not change by a bit: `make soak`.

First the run without Ray, undisturbed. Then the same run on Ray, as a process of its own, in which something is killed
from outside at moments drawn from a seed: client actors, the server actor, several at once, an actor and then the one
that took its place, Ray's own processes, the whole run. Where the run ends with it, it is taken up with `resume=`. Only
descendants of the processes that are started here are ever killed.
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
from benchmarks.report import table
from pflsim.run_folder.environment import code

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- soak:begin -->", "<!-- soak:end -->"
KINDS = {
    "client": "a client actor",
    "server": "the server actor",
    "several": "several actors at once",
    "again": "a client actor, and at once the one that takes its place",
    "raylet": "Ray's raylet, without which there is no Ray",
    "killed": "the whole run, kill -9",
    "terminated": "the whole run, SIGTERM",
}
DECK = {"client": 8, "server": 3, "several": 3, "again": 2, "raylet": 1, "killed": 2, "terminated": 2}
"""How often each comes in one shuffled deck; all of them come before any comes more often."""
ROLES = {"ray::RemoteHost": "client", "ray::RemoteServer": "server", "raylet": "raylet"}
ENDS = {"killed": -signal.SIGKILL, "terminated": 128 + signal.SIGTERM, "raylet": 1}
"""The exit status of a run that ends with it."""
LOOK_S, PATIENCE_S, GONE_S = 0.02, 240.0, 30.0
"""How often the run is looked at; how long a round may take; how long what the run has started may take to end."""


FORMATS = {"every": "g"}
"""How options are written."""


class SoakError(RuntimeError):
    """The run did not go on as it should."""


@dataclass(frozen=True, slots=True)
class Blow:
    """Something that is killed.

    Args:
        after: as soon as so many rounds are written down.
        moment: how much later, in rounds.
        kind: what.
        draw: decides who, where there are several; in [0, 1).
    """

    after: int
    moment: float
    kind: str
    draw: float


@dataclass(slots=True)
class Tally:
    """What has happened.

    Args:
        blows: how often each kind came.
        killed: how many processes.
        lost: seconds by kind, against undisturbed rounds.
        resumes: how often the run was taken up.
        left: processes and folders that stayed behind.
    """

    blows: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    lost: dict[str, float] = field(default_factory=dict)
    resumes: int = 0
    left: list[str] = field(default_factory=list)


def drawn_blows(rounds: int, every: float, seed: int) -> list[Blow]:
    """What is killed when: about every so many rounds, none after the last but one."""
    draw = random.Random(seed)
    blows: list[Blow] = []
    deck: list[str] = []
    after = 0
    while True:
        after += 1 + round(draw.expovariate(1 / (every - 1))) if every > 1 else 1
        if after >= rounds - 1:
            return blows
        if not deck:
            deck = [kind for kind, times in DECK.items() for _ in range(times)]
            draw.shuffle(deck)
        blows.append(Blow(after, draw.random(), deck.pop(), draw.random()))


def role_of(words: Sequence[str]) -> str:
    """What a process is for, from its command line; empty: nothing that is killed by itself."""
    first = words[0] if words else ""
    found = [role for start, role in ROLES.items() if first.startswith(start) or Path(first).name == start]
    return found[0] if found else ""


def victims(blow: Blow, by_role: Mapping[str, Sequence[psutil.Process]]) -> list[psutil.Process]:
    """Whom a blow hits, of those that are there."""
    clients, servers = list(by_role.get("client", ())), list(by_role.get("server", ()))
    if blow.kind in ("client", "again"):
        return [clients[int(blow.draw * len(clients))]] if clients else []
    if blow.kind == "several":
        everyone = [*clients, *servers]
        random.Random(blow.draw).shuffle(everyone)
        return everyone[: max(2, round(blow.draw * len(everyone)))]
    return list(by_role.get(blow.kind, ()))


class Soak:
    """A run on Ray under blows.

    Args:
        settings: of the run, as for launch.py.
        folder: its run folder, new.
        blows: in the order of their rounds.
        log: where its output goes.
        tell: is told what happens.
    """

    def __init__(
        self, settings: Sequence[str], folder: Path, blows: Sequence[Blow], log: Path, tell: Callable[[str], None]
    ):
        self.settings, self.folder, self.log, self.tell = settings, folder, log, tell
        self.blows = list(blows)
        self.tally = Tally()
        self._quiet: list[float] = []
        self._since: tuple[str, float, int] = ("", time.monotonic(), 0)  # the last blow, when, after which round
        self._drivers: list[int] = []
        self._seen: set[psutil.Process] = set()

    def run(self) -> None:
        """From the beginning to the end, however often it is taken up.

        Raises:
            SoakError: it ended otherwise than it should, or not at all.
        """
        arguments = [*self.settings, f"run_dir={self.folder}"]
        while True:
            ended_by, status = self._session(arguments)
            if ended_by is None and status == 0:
                break
            if ended_by is None or status != ENDS[ended_by]:
                raise SoakError(f"the run ended with status {status} after {ended_by or 'nothing that ends it'}")
            arguments = [f"resume={self.folder}"]
            self.tally.resumes += 1
        self._settle_up(time.monotonic(), self._rounds())
        self.tally.left = [*self.tally.left, *self._folders_left()]

    @property
    def quiet(self) -> float:
        """Seconds of a round in which nothing was killed, the median."""
        return statistics.median(self._quiet) if self._quiet else 0.0

    def _session(self, arguments: Sequence[str]) -> tuple[str | None, int]:
        """One process from its start to its end: what has ended it, if anything here has, and its exit status."""
        with self.log.open("a", encoding="utf-8") as output:
            driver = psutil.Popen(
                [sys.executable, str(ROOT / "launch.py"), *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._drivers.append(driver.pid)
        ended_by, clients_done, rounds, disturbed = None, time.monotonic(), self._rounds(), True
        try:
            while driver.poll() is None:
                time.sleep(LOOK_S)
                now, count = time.monotonic(), self._rounds()
                if count != rounds:
                    if count == rounds + 1 and not disturbed:
                        self._quiet.append(now - clients_done)
                    clients_done, rounds, disturbed = now, count, False
                    self._seen.update(_descendants(driver))
                if now - clients_done > PATIENCE_S:
                    raise SoakError(f"no new round for {PATIENCE_S:.0f} seconds after round {count}")
                if ended_by is None and self.blows and count >= self.blows[0].after:
                    disturbed = True
                    ended_by = self._strike(driver, self.blows.pop(0), count)
        finally:
            self._end(driver)
        return ended_by, driver.returncode

    def _strike(self, driver: psutil.Popen, blow: Blow, count: int) -> str | None:
        """Kill what a blow says; returns its kind where the run must end with it."""
        time.sleep(blow.moment * self.quiet)
        self._settle_up(time.monotonic(), count)
        everyone = _descendants(driver)
        self._seen.update(everyone)
        if blow.kind in ("killed", "terminated"):
            hit: list[psutil.Process] = [driver]
            driver.send_signal(signal.SIGKILL if blow.kind == "killed" else signal.SIGTERM)
        else:
            hit = _kill(victims(blow, _by_role(everyone)))
            if blow.kind == "again" and hit:
                hit += _kill(self._next(driver, set(everyone)))
        if not hit:
            return None
        self.tally.blows[blow.kind] += 1
        self.tally.killed += len(hit)
        self._since = blow.kind, time.monotonic(), count
        self.tell(f"after round {count}: {KINDS[blow.kind]} ({len(hit)})")
        return blow.kind if blow.kind in ENDS else None

    def _next(self, driver: psutil.Popen, before: set[psutil.Process]) -> list[psutil.Process]:
        """The first client actor that was not there before, as soon as it is there."""
        until = time.monotonic() + PATIENCE_S
        while driver.poll() is None and time.monotonic() < until:
            new = [one for one in _descendants(driver) if one not in before]
            if found := _by_role(new).get("client"):
                return found[:1]
            time.sleep(LOOK_S)
        return []

    def _settle_up(self, now: float, count: int) -> None:
        """Put the seconds since the last blow down to it, but for those that its rounds would have taken anyway."""
        kind, then, rounds = self._since
        if kind:
            spent = max(0.0, now - then - max(0, count - rounds) * self.quiet)
            self.tally.lost[kind] = self.tally.lost.get(kind, 0.0) + spent

    def _rounds(self) -> int:
        """How many rounds are written down."""
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def _end(self, driver: psutil.Popen) -> None:
        """See that nothing of the process is left; what is left is told, and ended."""
        if driver.poll() is None:  # only where something is wrong
            self._seen.update(_descendants(driver))
            driver.kill()
            driver.wait()
        _, left = psutil.wait_procs(list(self._seen), timeout=GONE_S)
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
    """Kill them all; returns those that were still there. psutil makes sure that none is another by now."""
    hit = []
    for one in processes:
        try:
            one.kill()
            hit.append(one)
        except psutil.Error:
            continue
    return hit


def differences(one: Path, other: Path) -> list[str]:
    """What two run folders differ in, to the bit, but for times: records, and the states in the last checkpoints."""
    from pflsim.run_folder.checkpoint import read_state

    found = []
    if _lines(one) != _lines(other):
        found.append("metrics.jsonl")
    if (one / "per_client.csv").read_bytes() != (other / "per_client.csv").read_bytes():
        found.append("per_client.csv")
    last, others = (max((folder / "checkpoints").glob("round_*")) for folder in (one, other))
    names, other_names = ({path.stem for path in folder.glob("*.pt")} for folder in (last, others))
    if last.name != others.name or names != other_names:
        return [*found, "checkpoints"]
    return [*found, *(n for n in sorted(names) if not same(read_state(last, n), read_state(others, n)))]


def _lines(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal in all their bits."""
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def report(
    command: str,
    measured: Mapping[str, Any],
    rounds: int,
    restarts: int,
    quiet: float,
    tally: Tally,
    different: list[str],
) -> str:
    """The result as Markdown."""
    commit = str(measured["commit"])[:7] + (" and changes" if measured["dirty"] else "")
    said = {
        "commit": commit,
        "rounds": str(rounds),
        "processes killed": str(tally.killed),
        "actors that the run counts as replaced": str(restarts),
        "times the run was taken up": str(tally.resumes),
        "an undisturbed round": f"{quiet:.2f} s",
        "left behind": ", ".join(tally.left) or "nothing",
        "against the straight run": f"**different**: {', '.join(different)}" if different else "equal to the bit",
    }
    rows = []
    for kind, words in KINDS.items():
        if times := tally.blows[kind]:
            rows.append((words, str(times), f"{(lost := tally.lost.get(kind, 0.0)):.0f}", f"{lost / times:.1f}"))
    rows.append(("all", str(tally.blows.total()), f"{sum(tally.lost.values()):.0f}", ""))
    kills = table(("killed", "times", "seconds lost", "each"), rows)
    return f"`{command}`\n\n{table(('what', ''), said.items())}\n\n{kills}"


def put(text: str, made: str) -> str:
    """A page with the result between the markers, in place of what was there.

    Raises:
        ValueError: there is no place for it, or two.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"expected {BEGIN} and {END} once each")
    return f"{text.partition(BEGIN)[0]}{BEGIN}\n{made}\n{END}{text.partition(END)[2]}"


def settings_of(given: argparse.Namespace) -> list[str]:
    """The run, as for launch.py: state in every client and in the server, absence, and checkpoints now and then."""
    return [
        f"method={given.method}", "data=digits", f"clients={given.clients}", f"rounds={given.rounds}",
        f"seed={given.seed}", "fraction=0.8", f"local_epochs={given.local_epochs}", "momentum=0.5", "init=per_client",
        "faults.dropout=0.1", "faults.straggler=0.1", "checkpoint.every=10", "placement.cpus=2",
        f"placement.actors={given.actors}", *given.settings,
    ]  # fmt: skip


def command_of(given: argparse.Namespace) -> str:
    """The command that does the same again, but for where files go."""
    names = ("rounds", "seed", "every", "method", "clients", "actors", "local_epochs")
    options = [f"--{name.replace('_', '-')} {getattr(given, name):{FORMATS.get(name, '')}}" for name in names]
    return f'make soak ARGS="{" ".join([*options, *given.settings])}"'


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and say how it went; returns the exit status (1: something is not as it must be)."""
    given = _options(arguments)
    measured, settings = code(), settings_of(given)
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        folder = Path(given.keep or place).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        straight, soaked, log = folder / "straight", folder / "soaked", folder / "soak.log"
        print(f"the straight run: {' '.join(settings)}", flush=True)
        launch = [sys.executable, str(ROOT / "launch.py"), *settings, "executor=inline", f"run_dir={straight}"]
        with log.open("w", encoding="utf-8") as output:
            subprocess.run(launch, stdout=output, stderr=subprocess.STDOUT, check=True)
        blows = drawn_blows(given.rounds, given.every, given.seed)
        print(f"the same on Ray, {len(blows)} blows", flush=True)
        soak = Soak(settings, soaked, blows, log, lambda text: print(text, flush=True))
        try:
            soak.run()
        except SoakError as error:
            print(f"error: {error}; the end of its output:\n{_end_of(log)}", file=sys.stderr)
            return 1
        different = differences(straight, soaked)
        summary = json.loads((soaked / "summary.json").read_text(encoding="utf-8"))
        restarts = summary.get("actor_restarts", 0)
        made = report(command_of(given), measured, given.rounds, restarts, soak.quiet, soak.tally, different)
    print(made)
    if given.page:
        PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
        print(f"written to {PAGE.relative_to(ROOT)}")
    return 1 if different or soak.tally.left else 0


def _end_of(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the run and of what is killed when")
    parser.add_argument("--every", type=float, default=8, help="a blow about every so many rounds")
    parser.add_argument("--method", default="pfedla")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--local-epochs", type=int, default=60, help="how long a round is")
    parser.add_argument("--keep", help="a folder for both runs and the output; otherwise they are removed")
    parser.add_argument("--page", action="store_true", help=f"write the result to {PAGE.relative_to(ROOT)}")
    parser.add_argument("settings", nargs="*", help="more settings of the run, as for launch.py")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
