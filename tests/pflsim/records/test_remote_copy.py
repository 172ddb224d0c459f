"""A remote copy of a run folder: what it has at any moment and at the end, and what happens when an upload fails."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from fake_filesystems import Ask, Asked, contents, local_contents, nothing, register
from fsspec.registry import known_implementations
from run_files import write_checkpoint

from pflsim.analysis.results import find_runs
from pflsim.config.validate import check_no_password, is_url
from pflsim.errors import RunError, SettingsError
from pflsim.records.checkpoint.meta import read_checkpoint
from pflsim.records.checkpoint.read import newest_checkpoint
from pflsim.records.remote_copy.begin import download, new_remote_folder, resume_remote_copy
from pflsim.records.remote_copy.remote_copy import RemoteCopy
from pflsim.records.remote_copy.remote_folder import RemoteFolder, last_part
from pflsim.records.summary import RunMeta
from pflsim.records.tracking.records import read_records
from pflsim.records.tracking.tracker import Tracker
from pflsim.types import EvalRow, RoundRecord, TrainReport

NUMBERS = itertools.count()
META = RunMeta("fedavg", "digits", "iid", "abc", "mlp", 2, 9, 0)
KINDS = ["file", "local", "memory", "testdisk", "teststore"]
FAILING = ["testdisk", "teststore"]


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

    def remote_copy(self, url: str) -> RemoteCopy:
        return RemoteCopy(RemoteFolder(url), self.folder)


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
    run.tracker.close(complete=True)
    remote_copy.finish()
    same(run, url)


def test_only_what_is_new_is_uploaded(run: Run, shaky: str) -> None:
    remote_copy = run.remote_copy(shaky)
    run.go(1)
    remote_copy.finish()
    uploaded: list[str] = []
    asks(lambda what, path: uploaded.append(Path(path).name) if what == "put" else None)
    remote_copy.finish()
    assert not uploaded
    (run.folder / "summary.json").write_text("{}")
    remote_copy.finish()
    assert [name.strip(".").removesuffix(".part") for name in uploaded] == ["summary.json"]


def test_at_any_moment_there_is_a_run_that_can_be_resumed(tmp_path: Path, shaky: str) -> None:
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
        again = resume_remote_copy(there, run.folder, done(run))
        assert again is not None
        again.finish()
        same(run, there)
    assert next(steps) > 15


def usable(url: str, root: Path, complete: bool = False) -> int:
    folder = download(url, root)
    records, said = read_records(folder), list[str]()
    checkpoint = newest_checkpoint(folder / "checkpoints", said.append, records.last)
    assert checkpoint is not None and checkpoint.server() == {"round": checkpoint.round} and not said
    assert [state["w"][0] for _, state in checkpoint.clients()] == [checkpoint.round] * 2
    for path in (folder / "checkpoints").iterdir():  # all that look like one are one
        assert {name: (path / name).stat().st_size for name in read_checkpoint(path).files} == {
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
            with pytest.raises(SettingsError, match="config.yaml is missing"):
                download(there, tmp_path / "fetched")
            continue
        folder = download(there, tmp_path / "fetched")
        last = read_records(folder).last if (folder / "per_client.csv").exists() and metrics_of(folder) else 0
        found = newest_checkpoint(folder / "checkpoints", lambda line: None, last)
        assert found is None or last == 1


def metrics_of(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()


def test_it_is_uploaded_after_each_checkpoint(run: Run, shaky: str, tmp_path: Path) -> None:
    with run.remote_copy(shaky) as remote_copy:
        same(run, shaky)
        run.go(1, 2)
        before = contents(shaky)
        remote_copy.upload_if_due()
        assert contents(shaky) == before, "no checkpoint was reported"
        for number in (2, 3):
            run.go(number + 1)
            remote_copy.checkpoint_saved()
            remote_copy.upload_if_due()
            same(run, shaky)
            assert usable(shaky, tmp_path / "fetched") == number + 1
        run.go(5, save=False)
    same(run, shaky)


def test_a_file_that_grows_while_it_is_uploaded(run: Run, shaky: str) -> None:
    """As TensorBoard's files do: what is uploaded is as long as it was said to be, and the rest comes later."""
    remote_copy = run.remote_copy(shaky)
    log = run.folder / "run.log"
    log.write_text("one")

    def grow(what: str, path: str) -> None:
        if what == "put" and "run.log" in path:
            log.write_text("one and two")

    asks(grow)
    remote_copy.checkpoint_saved()
    remote_copy.upload_if_due()
    assert contents(shaky)["run.log"] == b"one"
    asks(nothing)
    remote_copy.finish()
    same(run, shaky)


def test_a_replaced_checkpoint_is_none_until_it_is_whole_again(run: Run, shaky: str) -> None:
    """The same round once more, after the run was resumed from an earlier one."""
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


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_a_failed_upload_is_logged_once_and_repeated(run: Run, shaky: str, caplog: pytest.LogCaptureFixture) -> None:
    remote_copy = run.remote_copy(shaky)
    asks(fail(ConnectionError("no route\nto host")))
    for number in range(1, 5):
        run.go(number)
        remote_copy.checkpoint_saved()
        remote_copy.upload_if_due()
    (said,) = warnings(caplog)
    assert shaky in said and "ConnectionError: no route;" in said and str(run.folder) in said
    asks(nothing)
    remote_copy.checkpoint_saved()
    remote_copy.upload_if_due()
    same(run, shaky)
    remote_copy.finish()
    assert len(caplog.records) == 1


def test_a_last_upload_that_fails_ends_the_run(run: Run, shaky: str) -> None:
    with (
        pytest.raises(RunError, match=r"is incomplete: Disk quota exceeded; all files are in .*/here"),
        run.remote_copy(shaky),
    ):
        asks(fail(OSError(122, "Disk quota exceeded")))
        run.go(1)


def test_a_run_that_fails_keeps_its_own_error(run: Run, shaky: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunError, match="^what it was$"), run.remote_copy(shaky):
        asks(fail(OSError(122, "Disk quota exceeded")))
        run.go(1)
        raise RunError("what it was")
    (said,) = warnings(caplog)
    assert "Disk quota exceeded" in said
    asks(nothing)
    with pytest.raises(RunError, match="^what it was$"), run.remote_copy(shaky):
        raise RunError("what it was")
    same(run, shaky)


def test_a_second_ctrl_c_does_not_upload(run: Run, shaky: str) -> None:
    asked: list[str] = []
    with pytest.raises(KeyboardInterrupt), run.remote_copy(shaky):
        run.go(1)
        asks(lambda what, path: asked.append(path))
        raise KeyboardInterrupt
    assert not asked


def test_names_and_sizes_are_compared_at_the_end(run: Run, shaky: str) -> None:
    """Another run that uses the same URL is noticed."""
    remote_copy = run.remote_copy(shaky)
    run.go(1)

    def interfere(what: str, path: str) -> None:
        if what == "put" and "meta.json" in path:
            asks(nothing)
            RemoteFolder(shaky).upload(run.folder / "config.yaml", "metrics.jsonl")

    asks(interfere)
    with pytest.raises(RunError, match=r"is incomplete: metrics\.jsonl differs"):
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
    place = new_remote_folder(url)
    assert place is not None and not contents(url)
    assert new_remote_folder(None) is None and new_remote_folder("runs/mine") is None


def test_a_place_where_something_is_refused(run: Run, url: str) -> None:
    run.remote_copy(url).finish()
    before = contents(url)
    with pytest.raises(SettingsError) as error:
        new_remote_folder(url)
    assert str(error.value).startswith(f"run_dir={url} is not empty")
    assert contents(url) == before


@pytest.mark.parametrize("refused", ["put", "rm"])
def test_a_place_that_refuses(shaky: str, refused: str) -> None:
    def ask(what: str, path: str) -> None:
        if what == refused:
            raise PermissionError(13, "Access Denied")

    asks(ask)
    with pytest.raises(SettingsError) as error:
        new_remote_folder(shaky)
    assert str(error.value).startswith(f"run_dir={shaky} cannot be written to: Access Denied; ")
    assert "\n" not in str(error.value)


def test_a_place_that_cannot_be_reached_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"^run_dir=gss://b cannot .*: .* no protocol gss://; did you mean gs"):
        new_remote_folder("gss://b")
    entry = {"class": "no_such_package.FileSystem", "err": "Install nosuchfs to access it"}
    monkeypatch.setitem(known_implementations, "nosuch", entry)
    with pytest.raises(SettingsError) as error:
        new_remote_folder("nosuch://b/x")
    assert (
        str(error.value) == "run_dir=nosuch://b/x cannot be used: Install nosuchfs to access it: pip install nosuchfs"
    )


def test_what_a_url_is() -> None:
    assert is_url("s3://a/b") and is_url("simplecache::s3://a") and not is_url("runs/a") and not is_url(None)
    for url in ("sftp://me@host/x", "s3://a/b:c@d", "x://["):
        check_no_password(url)
    for url in ("sftp://me:secret@host/x", "filecache::ftp://me:secret@host/x"):
        with pytest.raises(SettingsError, match="resume.*password"):
            check_no_password(url)
    assert [last_part(url) for url in ("s3://a/b c/", "s3://a", "x://a/..", "memory://")] == ["b_c", "a", "run", "run"]


def test_tables_and_pages_are_of_folders_here() -> None:
    with pytest.raises(SettingsError, match="s3://a/b: expected"):
        find_runs(["s3://a/b"])


# Resumed ---------------------------------------------------------------------------------------------------------


def test_it_is_downloaded_whole_into_a_new_folder(run: Run, url: str, tmp_path: Path) -> None:
    run.go(1, 2)
    run.remote_copy(url).finish()
    root = tmp_path / "other" / "runs"
    folders = [download(url, root) for _ in range(2)]
    assert [f.name for f in folders] == ["a_run_1_gr_er_x_", "a_run_1_gr_er_x_-2"]
    expected = local_contents(run.folder)
    for folder in folders:
        got = local_contents(folder)
        assert got.keys() == expected.keys()
        assert yaml.safe_load(got.pop("config.yaml")) == {"rounds": 9, "run_dir": url}
        assert got == {name: data for name, data in expected.items() if name != "config.yaml"}


def test_what_cannot_be_downloaded(run: Run, shaky: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "fetched"
    with pytest.raises(SettingsError, match="config.yaml is missing"):
        download(shaky, root)
    run.remote_copy(shaky).finish()

    def broken(place: RemoteFolder, name: str, path: Path) -> None:
        raise FileNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "download", broken)
        with pytest.raises(SettingsError, match="cannot be read: FileNotFoundError: .*; is the run still running"):
            download(shaky, root)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "files", lambda place: {"config.yaml": 1, "../../outside": 1})
        (only,) = download(shaky, root).iterdir()
    assert only.name == "config.yaml" and not (tmp_path / "outside").exists()


def resumed(run: Run, url: str) -> RemoteCopy:
    remote_copy = resume_remote_copy(url, run.folder, done(run))
    assert remote_copy is not None
    return remote_copy


def test_a_resumed_folder_uploads_no_checkpoint_twice(run: Run, shaky: str) -> None:
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
    assert resume_remote_copy("runs/mine", run.folder, 3) is None


def test_a_checkpoint_that_was_damaged_there_is_uploaded_again(run: Run, shaky: str) -> None:
    run.go(1, 2)
    run.remote_copy(shaky).finish()
    RemoteFolder(shaky).remove("checkpoints/round_0002/server.pt")
    RemoteFolder(shaky).upload(run.folder / "config.yaml", "checkpoints/round_0002/client_000.pt")
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
    (other.folder / "config.yaml").write_text("seed: 8\nrun_dir: somewhere\n")
    other.remote_copy(url).finish()
    return "has files of another run than"


def the_same_once_more(run: Run, url: str, tmp_path: Path) -> str:
    other = Run(tmp_path / "runs" / "other")
    other.go(1, 2)
    lines = (other.folder / "metrics.jsonl").read_text()
    (other.folder / "metrics.jsonl").write_text(lines.replace('"train": 1.0', '"train": 1.5'))
    assert lines != (other.folder / "metrics.jsonl").read_text()
    other.remote_copy(url).finish()
    return "has files of another run than"


def gone_on_elsewhere(run: Run, url: str, tmp_path: Path) -> str:
    shutil.copytree(run.folder, tmp_path / "kept")
    run.go(3)
    run.remote_copy(url).finish()
    shutil.rmtree(run.folder)
    (tmp_path / "kept").rename(run.folder)
    return r"has a checkpoint of round 3, but .* has round 2: give resume="


def damaged_here(run: Run, url: str, tmp_path: Path) -> str:
    run.remote_copy(url).finish()
    path = run.folder / "checkpoints" / "round_0002" / "server.pt"
    path.write_bytes(path.read_bytes()[::-1])
    return r"has a checkpoint of round 2, but .* has no usable checkpoint: give resume="


@pytest.mark.parametrize("change", [another_run, the_same_once_more, gone_on_elsewhere, damaged_here])
def test_a_place_that_is_not_this_runs_is_left_alone(run: Run, shaky: str, tmp_path: Path, change: Change) -> None:
    run.go(1, 2)
    expected = change(run, shaky, tmp_path)
    before = contents(shaky)
    with pytest.raises(SettingsError, match=expected):
        resumed(run, shaky)
    assert contents(shaky) == before


def test_a_checkpoint_that_is_damaged_there_too_can_be_removed(run: Run, shaky: str, tmp_path: Path) -> None:
    """The error names it; then the run continues after the one before it."""
    run.keep = 2
    run.go(1)
    run.go(2)
    path = run.folder / "checkpoints/round_0002/server.pt"
    path.write_bytes(path.read_bytes()[::-1])
    run.remote_copy(shaky).finish()
    back = download(shaky, tmp_path / "back")
    with pytest.raises(SettingsError, match=r"remove .*/checkpoints/round_0002 to continue from"):
        resume_remote_copy(shaky, back, 1)
    for name in contents(shaky):
        if name.startswith("checkpoints/round_0002/"):
            RemoteFolder(shaky).remove(name)
    assert resume_remote_copy(shaky, back, 1) is not None
    with pytest.raises(SettingsError, match=r"has a checkpoint of round 1, but .* has no usable checkpoint"):
        resume_remote_copy(shaky, back, None)


def test_an_empty_place_is_filled_again(run: Run, shaky: str) -> None:
    run.go(1, 2)
    resumed(run, shaky).finish()
    same(run, shaky)
