"""A remote copy of a run folder: what it has at any moment and at the end, and what happens when an upload fails."""

import itertools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from fake_filesystems import Ask, Asked, contents, local_contents, nothing, register
from run_files import write_checkpoint

from pflsim.errors import RunError, SettingsError
from pflsim.records.checkpoint_read import newest_checkpoint, read_checkpoint
from pflsim.records.per_client import complete_rounds
from pflsim.records.remote import RemoteCopy, download, resumed_copy
from pflsim.records.summary import RunMeta
from pflsim.records.tracker import Tracker
from pflsim.types import EvalRow, RoundRecord, TrainReport

NUMBERS = itertools.count()
META = RunMeta("fedavg", "digits", "iid", "abc", "mlp", 2, 9, 0)


class Killed(BaseException):
    """Nothing catches it, as nothing does kill -9."""


@pytest.fixture(autouse=True)
def stores() -> Iterator[None]:
    register()
    asks(nothing)
    yield
    asks(nothing)
    for run in OPEN:
        run.tracker.close(complete=False)
    OPEN.clear()


def asks(ask: Ask) -> None:
    Asked.ask = staticmethod(ask)


@pytest.fixture(params=["file", "local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = "a run #1, größer [x]*"
    disk = request.param != "memory"
    return f"{request.param}://{tmp_path / 'elsewhere' / name if disk else f'bucket-{next(NUMBERS)}/{name}'}"


@pytest.fixture
def store() -> str:
    return f"teststore://bucket-{next(NUMBERS)}/run"


class Run:
    """A run folder, round by round."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("rounds: 9\nrun_dir: somewhere\n")
        self.folder, self.tracker = folder, Tracker(folder, META)
        OPEN.append(self)
        (folder / ".lock").touch()

    def go(self, *rounds: int, save: bool = True) -> None:
        for number in rounds:
            rows = tuple(EvalRow(c, "test", "personal", "trained", number, 10, 1.0) for c in range(2))
            reports = tuple(TrainReport(c, 10, 5, {"ce": 0.5}, 100) for c in range(2))
            self.tracker.round(RoundRecord(number, (0, 1), reports, {0: 7, 1: 7}, rows, {"train": 1.0}))
        if save:
            self.save(rounds[-1])

    def save(self, number: int) -> None:
        clients = [(c, {"w": torch.full((9,), float(number))}) for c in range(2)]
        write_checkpoint(self.folder / "checkpoints", number, {"round": number}, clients, {}, keep=1)

    def remote_copy(self, url: str) -> RemoteCopy:
        return RemoteCopy(url, self.folder)

    def resumed(self, url: str) -> RemoteCopy:
        last = complete_rounds(self.folder)[-1].round
        found = newest_checkpoint(self.folder / "checkpoints", lambda line: None, last)
        return resumed_copy(url, self.folder, None if found is None else found.round)


OPEN: list[Run] = []


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "runs" / "here")


def same(run: Run, url: str) -> None:
    assert contents(url) == local_contents(run.folder)


def test_everything_is_there_and_nothing_else(run: Run, url: str) -> None:
    remote_copy = run.remote_copy(url)
    run.go(1, 2)
    odd = run.folder / "trace" / "round 1" / "Ä#b?%20[c]*.txt"
    odd.parent.mkdir(parents=True)
    odd.write_text("x")
    remote_copy.upload()
    same(run, url)
    run.go(3, 4)
    remote_copy.upload()
    same(run, url)
    assert {name.split("/")[1] for name in contents(url) if name.startswith("checkpoints/")} == {"round_0004"}
    run.tracker.close(complete=True)
    remote_copy.upload()
    same(run, url)


def test_only_what_is_new_is_uploaded(run: Run, store: str) -> None:
    remote_copy = run.remote_copy(store)
    run.go(1)
    remote_copy.upload()
    asked: list[str] = []
    asks(lambda what, path: asked.append(f"{what} {Path(path).name}"))
    remote_copy.upload()
    assert not asked
    (run.folder / "summary.json").write_text("{}")
    remote_copy.upload()
    assert asked == ["put summary.json", "done summary.json"]


def test_at_any_moment_there_is_a_run_that_can_be_resumed(tmp_path: Path, store: str) -> None:
    """Killed at every single thing that is asked of the place: the checkpoint before, or the one that is new."""
    for step in itertools.count(1):
        there = f"{store}{step}"
        run = Run(tmp_path / "runs" / str(step))
        run.go(1, 2)
        remote_copy = run.remote_copy(there)
        remote_copy.upload()
        run.go(3, 4)
        run.tracker.close(complete=True)
        count = itertools.count(1)

        def die(what: str, path: str, count: Iterator[int] = count, step: int = step) -> None:
            if next(count) >= step:
                raise Killed

        asks(die)
        try:
            remote_copy.upload()
        except Killed:
            died = True
        else:
            died = False
        asks(nothing)
        usable(there, tmp_path / "fetched", complete=not died)
        run.resumed(there).upload()
        same(run, there)
        if not died:
            assert step > 15
            return


def usable(url: str, root: Path, complete: bool = False) -> int:
    folder = download(url, root)
    checkpoint = newest_checkpoint(folder / "checkpoints", lambda line: None, complete_rounds(folder)[-1].round)
    assert checkpoint is not None and checkpoint.server() == {"round": checkpoint.round}
    assert [state["w"][0] for _, state in checkpoint.clients()] == [checkpoint.round] * 2
    for meta in (folder / "checkpoints").glob("*/meta.json"):  # all that look like one are one
        found = read_checkpoint(meta.parent)
        assert all(found.load(name) for name in found.files)
    if '"complete": true' in (folder / "summary.json").read_text():
        assert checkpoint.round == 4
    else:
        assert not complete
    return checkpoint.round


def test_it_is_uploaded_after_each_checkpoint(run: Run, store: str, tmp_path: Path) -> None:
    with run.remote_copy(store) as remote_copy:
        same(run, store)
        run.go(1, 2, save=False)
        before = contents(store)
        remote_copy.upload_if_due()
        assert contents(store) == before, "there is no checkpoint"
        for number in (3, 4):
            run.go(number)
            remote_copy.upload_if_due()
            same(run, store)
            assert usable(store, tmp_path / "fetched") == number
        run.go(5, save=False)
    same(run, store)


def fail(error: Exception) -> Ask:
    def ask(what: str, path: str) -> None:
        raise error

    return ask


def test_a_failed_upload_is_logged_and_repeated(run: Run, store: str, caplog: pytest.LogCaptureFixture) -> None:
    remote_copy = run.remote_copy(store)
    asks(fail(ConnectionError("no route\nto host")))
    for number in range(1, 5):
        run.go(number)
        remote_copy.upload_if_due()
    asks(nothing)
    run.go(5)
    remote_copy.upload_if_due()
    same(run, store)
    assert len(caplog.records) == 4
    for said in caplog.records:
        assert said.levelno == logging.WARNING and "\n" not in said.message
        assert all(part in said.message for part in (store, "no route", str(run.folder)))


def test_a_last_upload_that_fails_ends_the_run(run: Run, store: str) -> None:
    with pytest.raises(RunError, match=r"Disk quota exceeded.*/here"), run.remote_copy(store):
        asks(fail(OSError(122, "Disk quota exceeded")))
        run.go(1)


def test_a_run_that_fails_keeps_its_own_error(run: Run, store: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunError, match="^what it was$"), run.remote_copy(store):
        asks(fail(OSError(122, "Disk quota exceeded")))
        run.go(1)
        raise RunError("what it was")
    assert "Disk quota exceeded" in caplog.text
    asks(nothing)
    with pytest.raises(RunError, match="^what it was$"), run.remote_copy(store):
        raise RunError("what it was")
    same(run, store)


def test_a_second_ctrl_c_does_not_upload(run: Run, store: str) -> None:
    asked: list[str] = []
    with pytest.raises(KeyboardInterrupt), run.remote_copy(store):
        run.go(1)
        asks(lambda what, path: asked.append(path))
        raise KeyboardInterrupt
    assert not asked


# Resumed ---------------------------------------------------------------------------------------------------------


def test_it_is_downloaded_whole_into_a_new_folder(run: Run, url: str, tmp_path: Path) -> None:
    run.go(1, 2)
    run.remote_copy(url).upload()
    root = tmp_path / "other" / "runs"
    folders = [download(url, root) for _ in range(2)]
    assert [f.name for f in folders] == ["a_run_1_gr_er_x_", "a_run_1_gr_er_x_-2"]
    expected = local_contents(run.folder)
    for folder in folders:
        got = local_contents(folder)
        assert got.keys() == expected.keys()
        assert yaml.safe_load(got.pop("config.yaml")) == {"rounds": 9, "run_dir": url}
        assert got == {name: data for name, data in expected.items() if name != "config.yaml"}


def test_what_cannot_be_downloaded(run: Run, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "fetched"
    with pytest.raises(SettingsError, match=r"config\.yaml"):
        download(store, root)
    run.remote_copy(store).upload()

    def broken(place: RemoteCopy, name: str) -> None:
        raise ConnectionError("no route\nto host")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteCopy, "read", broken)
        with pytest.raises(SettingsError, match=f"^resume={store} .*no route"):
            download(store, root)
    assert not list(root.iterdir())


Change = Callable[[Run, str, Path], str]


def another_run(run: Run, url: str, tmp_path: Path) -> str:
    other = Run(tmp_path / "runs" / "other")
    other.go(1, 2)
    lines = (other.folder / "metrics.jsonl").read_text()
    (other.folder / "metrics.jsonl").write_text(lines.replace('"train": 1.0', '"train": 1.5'))
    other.remote_copy(url).upload()
    return "another run"


def gone_on_elsewhere(run: Run, url: str, tmp_path: Path) -> str:
    shutil.copytree(run.folder, tmp_path / "kept")
    run.go(3)
    run.remote_copy(url).upload()
    shutil.rmtree(run.folder)
    (tmp_path / "kept").rename(run.folder)
    return r"round 3.*round 2.*resume="


def damaged_here(run: Run, url: str, tmp_path: Path) -> str:
    run.remote_copy(url).upload()
    (run.folder / "checkpoints" / "round_0002" / "server.pt").write_bytes(b"")
    return "round 2.*none.*resume="


@pytest.mark.parametrize("change", [another_run, gone_on_elsewhere, damaged_here])
def test_a_place_that_is_not_this_runs_is_left_alone(run: Run, store: str, tmp_path: Path, change: Change) -> None:
    run.go(1, 2)
    expected = change(run, store, tmp_path)
    before = contents(store)
    with pytest.raises(SettingsError, match=expected):
        run.resumed(store)
    assert contents(store) == before
