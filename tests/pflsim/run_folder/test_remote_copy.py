"""A run folder kept the same at a URL: what is there at any moment, in the end, and when the place fails."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import yaml
from fsspec.registry import known_implementations
from stores import Ask, Asked, contents, local_contents, nothing, register

from pflsim.analysis.results import find_runs
from pflsim.config.urls import has_password, is_url
from pflsim.errors import RunError, SettingsError
from pflsim.run_folder.checkpoint import newest_checkpoint, write_checkpoint
from pflsim.run_folder.checkpoint.meta import read_meta
from pflsim.run_folder.journal import Journal
from pflsim.run_folder.remote_copy.begin import fetch, new_place, resume_at_url
from pflsim.run_folder.remote_copy.remote_copy import RemoteCopy
from pflsim.run_folder.remote_copy.remote_folder import RemoteFolder, last_part
from pflsim.run_folder.summary import RunMeta
from pflsim.run_folder.tracking.records import read_records
from pflsim.run_folder.tracking.tracker import Tracker
from pflsim.types import EvalRow, RoundRecord, TrainReport

NUMBERS = itertools.count()
META = RunMeta("fedavg", "digits", "iid", "abc", "mlp", 2, 9, 0)
KINDS = ["file", "local", "memory", "testdisk", "teststore"]
FAILING = ["testdisk", "teststore"]
FOREVER = 1e9


class Killed(BaseException):
    """Nothing catches it, as nothing does kill -9."""


@pytest.fixture(autouse=True)
def stores() -> Iterator[None]:
    register()
    Asked.ask = staticmethod(nothing)
    yield
    Asked.ask = staticmethod(nothing)
    for run in OPEN:
        run.tracker.close(complete=False)
    OPEN.clear()


def asks(ask: Ask) -> None:
    Asked.ask = staticmethod(ask)


def url_for(kind: str, tmp_path: Path, name: str = "a run #1, größer [x]*") -> str:
    disk = kind in ("file", "local", "testdisk")
    return f"{kind}://{tmp_path / 'elsewhere' / name}" if disk else f"{kind}://bucket-{next(NUMBERS)}/{name}"


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_for(request.param, tmp_path)


@pytest.fixture(params=FAILING)
def shaky(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_for(request.param, tmp_path)


class Run:
    """A run folder, round by round."""

    def __init__(self, folder: Path, keep: int = 1):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("rounds: 9\nrun_dir: somewhere\n")
        self.folder, self.keep, self.tracker = folder, keep, Tracker(folder, META)
        OPEN.append(self)
        (folder / ".lock").touch()

    def go(self, *rounds: int, save: bool = True) -> None:
        for number in rounds:
            rows = tuple(EvalRow(c, "test", "personal", "trained", number, 10, 1.0) for c in range(2))
            reports = tuple(TrainReport(c, 10, 5, {"ce": 0.5}, 100) for c in range(2))
            self.tracker.round(RoundRecord(number, (0, 1), reports, {0: 7, 1: 7}, rows, {"train": 1.0}))
        if save:
            self.save(rounds[-1])

    def save(self, number: int, value: float | None = None) -> None:
        clients = [(c, {"w": torch.full((9,), value or float(number))}) for c in range(2)]
        write_checkpoint(self.folder / "checkpoints", number, {"round": number}, clients, {}, self.keep)

    def remote_copy(self, url: str, seconds: float = FOREVER, said: list[str] | None = None) -> RemoteCopy:
        journal = Journal()
        if said is not None:
            journal.say = said.append  # type: ignore[method-assign]
        return RemoteCopy(RemoteFolder(url), self.folder, journal, seconds=seconds)


OPEN: list[Run] = []


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "runs" / "here")


def done(run: Run) -> int | None:
    found = newest_checkpoint(run.folder / "checkpoints", lambda line: None, read_records(run.folder).last)
    return None if found is None else found.round


def same(run: Run, url: str) -> None:
    assert contents(url) == local_contents(run.folder)


def test_everything_is_there_and_nothing_else(run: Run, url: str) -> None:
    remote_copy = run.remote_copy(url)
    run.go(1, 2)
    odd = run.folder / "trace" / "round 1" / "Ä#b?%20[c]*.txt"
    odd.parent.mkdir(parents=True)
    odd.write_text("x")
    remote_copy.finish()
    same(run, url)
    run.go(3, 4)
    odd.unlink()
    remote_copy.finish()
    same(run, url)
    assert {name.split("/")[1] for name in contents(url) if name.startswith("checkpoints/")} == {"round_0004"}
    assert not (run.folder / ".mirror").exists()
    run.tracker.close(complete=True)
    remote_copy.finish()
    same(run, url)


def test_only_what_is_new_is_brought(run: Run, shaky: str) -> None:
    remote_copy = run.remote_copy(shaky)
    run.go(1)
    remote_copy.finish()
    brought: list[str] = []
    asks(lambda what, path: brought.append(Path(path).name) if what == "put" else None)
    remote_copy.finish()
    assert not brought
    (run.folder / "summary.json").write_text("{}")
    remote_copy.finish()
    assert [name.strip(".").removesuffix(".part") for name in brought] == ["summary.json"]


def test_at_any_moment_there_is_a_run_that_can_be_taken_up(tmp_path: Path, shaky: str) -> None:
    """Killed at every single thing that is asked of the place: the checkpoint before, or the one that is new."""
    steps = itertools.count(1)
    for step in steps:
        there = f"{shaky}{step}"
        run = Run(tmp_path / "runs" / str(step))
        run.go(1, 2)
        remote_copy = run.remote_copy(there)
        remote_copy.finish()
        run.go(3, 4)
        run.tracker.close(complete=True)
        count = itertools.count(1)

        def die(what: str, path: str, count: Iterator[int] = count, step: int = step) -> None:
            if next(count) >= step:
                raise Killed

        asks(die)
        try:
            remote_copy.finish()
        except Killed:
            died = True
        else:
            died = False
        asks(nothing)
        usable(there, tmp_path / "fetched", complete=not died)
        if not died:
            break
        again = resume_at_url(there, run.folder, Journal(), done(run))
        assert again is not None
        again.finish()
        same(run, there)
    assert next(steps) > 15


def usable(url: str, root: Path, complete: bool = False) -> int:
    folder = fetch(url, root)
    records, said = read_records(folder), list[str]()
    checkpoint = newest_checkpoint(folder / "checkpoints", said.append, records.last)
    assert checkpoint is not None and checkpoint.server() == {"round": checkpoint.round} and not said
    assert [state["w"][0] for _, state in checkpoint.clients()] == [checkpoint.round] * 2
    for path in (folder / "checkpoints").iterdir():  # all that look like one are one
        assert {name: (path / name).stat().st_size for name in read_meta(path).files} == {
            file.name: file.stat().st_size for file in path.glob("*.pt")
        }
    if '"complete": true' in (folder / "summary.json").read_text():
        assert checkpoint.round == 4
    else:
        assert not complete
    return checkpoint.round


@pytest.mark.parametrize("first", [True, False])
def test_killed_in_the_first_upload(run: Run, shaky: str, tmp_path: Path, first: bool) -> None:
    """Before there was a checkpoint: no run, or one that begins again; never one that cannot be read."""
    run.go(1, save=not first)
    for step in itertools.count(1):
        there, count = f"{shaky}{step}", itertools.count(1)

        def die(what: str, path: str, count: Iterator[int] = count, step: int = step) -> None:
            if next(count) == step:
                raise Killed

        asks(die)
        try:
            run.remote_copy(there).finish()
            return
        except Killed:
            asks(nothing)
        if not any(name == "config.yaml" for name in contents(there)):
            with pytest.raises(SettingsError, match="there is no run, for it has no config.yaml"):
                fetch(there, tmp_path / "fetched")
            continue
        folder = fetch(there, tmp_path / "fetched")
        last = read_records(folder).last if (folder / "per_client.csv").exists() and metrics_of(folder) else 0
        found = newest_checkpoint(folder / "checkpoints", lambda line: None, last)
        assert found is None or last == 1


def metrics_of(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()


class Gate:
    """Holds an upload where a file is brought, until it is let go."""

    def __init__(self, name: str):
        self.name, self.reached, self.go = name, Event(), Event()

    def __call__(self, what: str, path: str) -> None:
        if what == "put" and self.name in path and not self.go.is_set():
            self.reached.set()
            assert self.go.wait(60)


def no_links(*_: Any, **__: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False])
def test_rounds_go_on_while_a_checkpoint_is_brought(
    run: Run, shaky: str, tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being brought stays to the end though the run has removed it, and no second upload begins."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    run.go(1, 2)
    remote_copy = run.remote_copy(shaky)
    remote_copy.tick()
    remote_copy.wait()
    run.go(3)
    gate = Gate("round_0003/")
    asks(gate)
    remote_copy.expect()
    remote_copy.tick()
    assert gate.reached.wait(60)
    run.go(4)
    run.go(5)
    thread = remote_copy._thread
    remote_copy.expect()
    remote_copy.tick()
    assert remote_copy._thread is thread
    assert usable(shaky, tmp_path / "fetched") == 2
    gate.go.set()
    remote_copy.wait()
    assert usable(shaky, tmp_path / "fetched") == 3
    remote_copy.tick()
    remote_copy.wait()
    assert usable(shaky, tmp_path / "fetched") == 5
    remote_copy.finish()
    same(run, shaky)


def test_a_checkpoint_that_goes_while_it_is_listed(run: Run, shaky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is there is removed for it, and there is another upload at once."""
    run.go(1)
    remote_copy = run.remote_copy(shaky)
    remote_copy.tick()
    remote_copy.wait()
    real = os.link

    def link(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", real)
        run.go(2)
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    remote_copy.expect()
    remote_copy.tick()
    remote_copy.wait()
    assert any(name.startswith("checkpoints/round_0001") for name in contents(shaky))
    remote_copy.tick()
    remote_copy.wait()
    assert {name.split("/")[1] for name in contents(shaky) if name.startswith("checkpoints/")} == {"round_0002"}


def test_when_something_is_brought(run: Run, shaky: str) -> None:
    remote_copy = run.remote_copy(shaky)
    with remote_copy:
        remote_copy.wait()
        first = remote_copy._thread
        remote_copy.tick()
        assert remote_copy._thread is first, "nothing is due"
        remote_copy.seconds = 0
        remote_copy.tick()
        assert remote_copy._thread is not first, "after so many seconds"
        remote_copy.wait()
        second, remote_copy.seconds = remote_copy._thread, FOREVER
        remote_copy.expect()
        remote_copy.tick()
        assert remote_copy._thread is not second, "after a checkpoint"
    same(run, shaky)


def test_a_replaced_checkpoint_is_none_until_it_is_whole_again(run: Run, shaky: str) -> None:
    """The same round once more, after the run was taken up from an earlier one."""
    run.keep = 2
    run.go(1)
    run.go(2)
    remote_copy = run.remote_copy(shaky)
    remote_copy.finish()
    run.save(2)
    seen: list[set[str]] = []

    def look(what: str, path: str) -> None:
        if "round_0002" in path and what == "put":
            seen.append({name for name in contents(shaky) if name.endswith("meta.json")})

    asks(look)
    remote_copy.finish()
    asks(nothing)
    assert len(seen) == 4 and all(metas == {"checkpoints/round_0001/meta.json"} for metas in seen)
    same(run, shaky)


def fail(error: Exception) -> Ask:
    def ask(what: str, path: str) -> None:
        raise error

    return ask


def test_a_place_that_fails_is_told_once_and_tried_again(run: Run, shaky: str) -> None:
    said: list[str] = []
    remote_copy = run.remote_copy(shaky, seconds=0, said=said)
    asks(fail(ConnectionError("no route\nto host")))
    for number in range(1, 5):
        run.go(number)
        remote_copy.tick()
        remote_copy.wait()
    assert said == [
        f"the run cannot be kept at {shaky} at the moment: ConnectionError: no route; it goes on, all of it is in "
        f"{run.folder}, and this is tried again"
    ]
    asks(nothing)
    remote_copy.tick()
    remote_copy.finish()
    same(run, shaky)
    assert len(said) == 1


def test_a_last_upload_that_fails_ends_the_run(run: Run, shaky: str) -> None:
    with (
        pytest.raises(
            RunError, match=r"^not all of the run could be .*: Disk quota exceeded; all of it is in .*/here$"
        ),
        run.remote_copy(shaky),
    ):
        asks(fail(OSError(122, "Disk quota exceeded")))
        run.go(1)


def test_a_run_that_fails_keeps_its_own_error(run: Run, shaky: str) -> None:
    said: list[str] = []
    with pytest.raises(RunError, match="^what it was$"), run.remote_copy(shaky, said=said) as remote_copy:
        remote_copy.wait()
        asks(fail(OSError(122, "Disk quota exceeded")))
        run.go(1)
        raise RunError("what it was")
    assert len(said) == 1 and "Disk quota exceeded" in said[0]
    asks(nothing)
    with pytest.raises(RunError, match="^what it was$"), run.remote_copy(shaky):
        raise RunError("what it was")
    same(run, shaky)


def test_whoever_is_in_a_hurry_does_not_wait(run: Run, shaky: str) -> None:
    gate = Gate("")
    asks(gate)
    with pytest.raises(KeyboardInterrupt), run.remote_copy(shaky) as remote_copy:
        assert gate.reached.wait(60)
        raise KeyboardInterrupt
    assert remote_copy._thread is not None and remote_copy._thread.is_alive()
    gate.go.set()
    remote_copy.wait()


def test_what_was_brought_is_looked_at_in_the_end(run: Run, shaky: str) -> None:
    remote_copy = run.remote_copy(shaky)
    remote_copy.finish()
    RemoteFolder(shaky).put(run.folder / "config.yaml", "of another.txt")
    with pytest.raises(RunError, match=r"^not all .*: of another\.txt there is not what was brought; does another"):
        remote_copy.finish()


def test_a_file_system_that_renames_to_nothing_only(run: Run, tmp_path: Path) -> None:
    there = url_for("testdisk", tmp_path)

    def ask(what: str, path: str) -> None:
        if what == "mv" and Path(path).exists():
            raise FileExistsError(17, "File exists")

    asks(ask)
    remote_copy = run.remote_copy(there)
    for number in (1, 2):
        run.go(number)
        remote_copy.finish()
        same(run, there)


# Where a run begins -----------------------------------------------------------------------------------------------


def test_a_new_place_is_tried_out_and_left_empty(url: str) -> None:
    place = new_place(url)
    assert place is not None and not contents(url)
    assert new_place(None) is None and new_place("runs/mine") is None


def test_a_place_where_something_is_refused(run: Run, url: str) -> None:
    run.remote_copy(url).finish()
    before = contents(url)
    with pytest.raises(SettingsError) as error:
        new_place(url)
    assert str(error.value) == (
        f"run_dir={url} is not empty, and a run never writes over another; give a new place or remove this one"
    )
    assert contents(url) == before


@pytest.mark.parametrize("refused", ["put", "rm"])
def test_a_place_that_refuses(shaky: str, refused: str) -> None:
    def ask(what: str, path: str) -> None:
        if what == refused:
            raise PermissionError(13, "Access Denied")

    asks(ask)
    with pytest.raises(SettingsError) as error:
        new_place(shaky)
    assert str(error.value).startswith(f"run_dir={shaky} cannot be written to: Access Denied; credentials and options")
    assert "\n" not in str(error.value)


def test_a_place_that_cannot_be_reached_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"^run_dir=gss://b cannot .*: fsspec knows no gss://; did you mean gs"):
        new_place("gss://b")
    entry = {"class": "no_such_package.FileSystem", "err": "Install nosuchfs to access it"}
    monkeypatch.setitem(known_implementations, "nosuch", entry)
    with pytest.raises(SettingsError) as error:
        new_place("nosuch://b/x")
    assert (
        str(error.value) == "run_dir=nosuch://b/x cannot be used: Install nosuchfs to access it: pip install nosuchfs"
    )


def test_what_a_url_is() -> None:
    assert is_url("s3://a/b") and is_url("simplecache::s3://a") and not is_url("runs/a") and not is_url(None)
    assert has_password("sftp://me:secret@host/x") and has_password("filecache::ftp://me:secret@host/x")
    assert not has_password("sftp://me@host/x") and not has_password("s3://a/b:c@d") and not has_password("x://[")
    assert [last_part(url) for url in ("s3://a/b c/", "s3://a", "x://a/..", "memory://")] == ["b_c", "a", "run", "run"]


def test_tables_and_pages_are_of_folders_here() -> None:
    with pytest.raises(SettingsError, match="s3://a/b: expected folders on this machine; copy the run into one first"):
        find_runs(["s3://a/b"])


# Taken up ---------------------------------------------------------------------------------------------------------


def test_it_is_brought_back_whole_into_a_new_folder(run: Run, url: str, tmp_path: Path) -> None:
    run.go(1, 2)
    run.remote_copy(url).finish()
    root = tmp_path / "other" / "runs"
    folders = [fetch(url, root) for _ in range(2)]
    assert [f.name for f in folders] == ["a_run_1_gr_er_x_", "a_run_1_gr_er_x_-2"]
    expected = local_contents(run.folder)
    for folder in folders:
        got = local_contents(folder)
        assert got.keys() == expected.keys()
        assert yaml.safe_load(got.pop("config.yaml")) == {"rounds": 9, "run_dir": url}
        assert got == {name: data for name, data in expected.items() if name != "config.yaml"}


def test_what_cannot_be_brought_back(run: Run, shaky: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "fetched"
    with pytest.raises(SettingsError, match="there is no run, for it has no config.yaml"):
        fetch(shaky, root)
    run.remote_copy(shaky).finish()

    def broken(place: RemoteFolder, name: str, path: Path) -> None:
        raise FileNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "fetch", broken)
        with pytest.raises(SettingsError, match="cannot be read: FileNotFoundError: .*; is the run going on"):
            fetch(shaky, root)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "files", lambda place: {"config.yaml": 1, "../../outside": 1})
        with pytest.raises(SettingsError, match="is no name of a run's file"):
            fetch(shaky, root)
    assert not list(root.iterdir()) and not (tmp_path / "outside").exists()


def resumed(run: Run, url: str) -> RemoteCopy:
    remote_copy = resume_at_url(url, run.folder, Journal(), done(run))
    assert remote_copy is not None
    return remote_copy


def test_a_folder_that_is_taken_up_brings_no_checkpoint_twice(run: Run, shaky: str) -> None:
    """So that the one there counts all the while."""
    run.go(1, 2)
    run.remote_copy(shaky).finish()
    asked: list[str] = []
    remote_copy = resumed(run, shaky)
    asks(lambda what, path: asked.append(path))
    run.go(3, save=False)
    remote_copy.finish()
    assert asked and not [path for path in asked if "checkpoints" in path]
    asks(nothing)
    same(run, shaky)
    assert resume_at_url("runs/mine", run.folder, Journal(), 3) is None


def test_a_checkpoint_that_was_damaged_there_is_brought_again(run: Run, shaky: str) -> None:
    run.go(1, 2)
    run.remote_copy(shaky).finish()
    RemoteFolder(shaky).remove("checkpoints/round_0002/server.pt")
    RemoteFolder(shaky).put(run.folder / "config.yaml", "checkpoints/round_0002/client_000.pt")
    resumed(run, shaky).finish()
    same(run, shaky)


def test_another_checkpoint_of_the_round_takes_its_place_there(run: Run, shaky: str) -> None:
    run.go(1, 2)
    run.remote_copy(shaky).finish()
    before = contents(shaky)
    run.save(2, value=7.0)
    assert {name: len(data) for name, data in local_contents(run.folder).items()} == {
        n: len(d) for n, d in before.items()
    }
    resumed(run, shaky).finish()
    same(run, shaky)


Change = Callable[[Run, str, Path], str]


def another_run(run: Run, url: str, tmp_path: Path) -> str:
    other = Run(tmp_path / "runs" / "other")
    (other.folder / "config.yaml").write_text("rounds: 8\nrun_dir: somewhere\n")
    other.remote_copy(url).finish()
    return "holds something else than the run in"


def the_same_once_more(run: Run, url: str, tmp_path: Path) -> str:
    other = Run(tmp_path / "runs" / "other")
    other.go(1, 2)
    lines = (other.folder / "metrics.jsonl").read_text()
    (other.folder / "metrics.jsonl").write_text(lines.replace('"train": 1.0', '"train": 1.5'))
    assert lines != (other.folder / "metrics.jsonl").read_text()
    other.remote_copy(url).finish()
    return "holds something else than the run in"


def gone_on_elsewhere(run: Run, url: str, tmp_path: Path) -> str:
    shutil.copytree(run.folder, tmp_path / "kept")
    run.go(3)
    run.remote_copy(url).finish()
    shutil.rmtree(run.folder)
    (tmp_path / "kept").rename(run.folder)
    return r"has a checkpoint after round 3, .* only after round 2: the run has gone on there; take it up with resume="


def damaged_here(run: Run, url: str, tmp_path: Path) -> str:
    run.remote_copy(url).finish()
    path = run.folder / "checkpoints" / "round_0002" / "server.pt"
    path.write_bytes(path.read_bytes()[::-1])
    return (
        r"has a checkpoint after round 2, .* none that can be used: what is here is damaged, and would take its place; "
        "take it up with resume="
    )


@pytest.mark.parametrize("change", [another_run, the_same_once_more, gone_on_elsewhere, damaged_here])
def test_a_place_that_is_not_this_runs_is_left_alone(run: Run, shaky: str, tmp_path: Path, change: Change) -> None:
    run.go(1, 2)
    expected = change(run, shaky, tmp_path)
    before = contents(shaky)
    with pytest.raises(SettingsError, match=expected):
        resumed(run, shaky)
    assert contents(shaky) == before


@pytest.mark.parametrize("what", ["checkpoint", "records"])
def test_what_is_damaged_there_too_refuses_nothing(run: Run, shaky: str, tmp_path: Path, what: str) -> None:
    """What is brought back from there would be refused as well, for ever."""
    run.keep = 2
    run.go(1)
    run.go(2)
    name = "checkpoints/round_0002/server.pt" if what == "checkpoint" else "metrics.jsonl"
    data = (run.folder / name).read_bytes()
    (run.folder / name).write_bytes(data[::-1] if what == "checkpoint" else data.splitlines(keepends=True)[0])
    run.remote_copy(shaky).finish()
    back = fetch(shaky, tmp_path / "back")
    assert resume_at_url(shaky, back, Journal(), 1) is not None
    with pytest.raises(SettingsError, match=r"has a checkpoint after round 1, .* none that can be used"):
        resume_at_url(shaky, back, Journal(), None)


def test_an_empty_place_is_filled_again(run: Run, shaky: str) -> None:
    run.go(1, 2)
    resumed(run, shaky).finish()
    same(run, shaky)
