"""Run folders on their way back: what is sent, what is believed, and where it may be written."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cluster import FakeClient

from pflsim.errors import RunError, SettingsError
from ray_actors.jobs import fetch as fetching
from ray_actors.jobs import sender
from ray_actors.jobs.client import Cluster
from ray_actors.jobs.copies import MARK
from ray_actors.jobs.fetch import fetch, received, unpack

RECORD = "metrics.jsonl"
FILES = {
    "config.yaml": "a: 1",
    "metrics.jsonl": "{}\n",
    "checkpoints/round_1/server.pt": "x" * 9000,
    "tb/ü 1": "",
    ".lock": "",
}


def run_folder(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def client(tmp_path: Path) -> FakeClient:
    """With a job that has a home with one run folder."""
    client = FakeClient(tmp_path / "cluster")
    metadata = {"pflsim": "run", "home": "~/jobs/it's 1", "python": sys.executable}
    client.add("job", metadata={**metadata, "run_dirs": json.dumps(["elsewhere/x", "../outside"])})
    run_folder(client.home / "jobs/it's 1/runs/20260101-000000-fedavg-digits-s0")
    return client


def files_of(folder: Path) -> dict[str, str]:
    """What is in a fetched folder, without what says where it came from."""
    return {
        p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file() and p.name != MARK
    }


def test_a_run_folder_comes_as_it_is(client: FakeClient, tmp_path: Path) -> None:
    (new,) = fetch(Cluster(client), "job", tmp_path / "runs")
    assert new == tmp_path / "runs" / "20260101-000000-fedavg-digits-s0"
    assert files_of(new) == {name: text for name, text in FILES.items() if name != ".lock"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [new.name]
    (asked,) = client.submitted
    assert asked["entrypoint_label_selector"] == {"ray.io/node-id": "node-1"} and "runtime_env" not in asked
    assert client.deleted == [asked["submission_id"]]


def test_without_checkpoints(client: FakeClient, tmp_path: Path) -> None:
    (new,) = fetch(Cluster(client), "job", tmp_path / "runs", checkpoints=False)
    assert (new / "config.yaml").exists() and not (new / "checkpoints").exists()


def test_runs_of_names_of_their_own(client: FakeClient, tmp_path: Path) -> None:
    home = client.home / "jobs/it's 1"
    for name in ("elsewhere/x", "runs/sweep/b", "../outside"):
        run_folder(home / name)
    (home / "runs/begun").mkdir()
    (home / "runs/begun/config.yaml").touch()
    (home / "link").symlink_to(home / "runs")
    new = fetch(Cluster(client), "job", tmp_path / "runs")
    names = {path.relative_to(tmp_path / "runs").as_posix() for path in new}
    assert names == {"20260101-000000-fedavg-digits-s0", "elsewhere/x", "sweep/b", "outside"}


def test_what_was_changed_is_not_written_over(client: FakeClient, tmp_path: Path) -> None:
    cluster, into = Cluster(client), tmp_path / "runs"
    (first,) = fetch(cluster, "job", into)
    (first / "config.yaml").write_text("mine")
    with pytest.raises(SettingsError, match="is there already, and was changed here or .* not written over; move it"):
        fetch(cluster, "job", into)
    run_folder(client.home / "jobs/it's 1/runs/later")
    assert fetch(cluster, "job", into) == [into / "later"]
    assert (first / "config.yaml").read_text() == "mine"


@pytest.mark.parametrize("below", ["", "sweep/"])
def test_what_was_brought_is_brought_up_to_date(client: FakeClient, tmp_path: Path, below: str) -> None:
    """With what was put beside it, and without what has gone; what came from another home is left alone."""
    cluster, into = Cluster(client), tmp_path / "runs"
    there = run_folder(client.home / "jobs/it's 1/runs" / f"{below}x")
    (first,) = (path for path in fetch(cluster, "job", into, checkpoints=False) if path.name == "x")
    (first / "report.html").write_text("mine")
    (first / "tb/ü 1").unlink()
    (there / "checkpoints/round_1").rename(there / "checkpoints/round_2")
    (there / RECORD).write_text("{}\n{}\n")
    assert first in fetch(cluster, "job", into)
    came = {name.replace("round_1", "round_2"): text for name, text in FILES.items() if name != ".lock"}
    assert files_of(first) == {**came, RECORD: "{}\n{}\n", "report.html": "mine"}
    (there / "checkpoints/round_2").rename(there / "checkpoints/round_3")
    assert first in fetch(cluster, "job", into)
    assert [path.name for path in (first / "checkpoints").iterdir()] == ["round_3"]
    assert not [path for path in into.rglob("*") if path.name.startswith((".old", ".fetch-"))]
    mark = json.loads((first / MARK).read_text())
    (first / MARK).write_text(json.dumps({**mark, "home": "~/jobs/another"}))
    assert first not in fetch(cluster, "job", into)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"home": "~/jobs/it\'s 1", "files": 3}'])
def test_a_mark_that_cannot_be_read(client: FakeClient, tmp_path: Path, text: str) -> None:
    (first,) = fetch(Cluster(client), "job", tmp_path / "runs")
    (first / MARK).write_text(text)
    with pytest.raises(SettingsError, match="is not written over"):
        fetch(Cluster(client), "job", tmp_path / "runs")


def test_a_newer_copy_that_cannot_take_its_place(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one is left."""
    (first,) = fetch(Cluster(client), "job", tmp_path / "runs")
    before, rename = files_of(first), Path.rename

    def full(self: Path, target: Path) -> Path:
        if self.name == first.name and self != first:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(RunError, match="cannot be written to: No space left"):
        fetch(Cluster(client), "job", tmp_path / "runs")
    assert files_of(first) == before


def test_nothing_to_bring(client: FakeClient, tmp_path: Path) -> None:
    cluster = Cluster(client)
    client.details["job"].metadata["home"] = "/not/there"
    client.details["job"].metadata["run_dirs"] = "[]"
    with pytest.raises(SettingsError, match=r"there is no run folder in /not/there \(yet\)"):
        fetch(cluster, "job", tmp_path / "runs")
    client.add("waiting", "PENDING", metadata={"pflsim": "run", "home": "~"}, driver_node_id=None)
    client.add("theirs")
    for job, said in (("waiting", "has not begun"), ("theirs", "was not started by"), ("none", "knows no such job")):
        with pytest.raises(SettingsError, match=said):
            fetch(cluster, job, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_too_large_for_a_log(client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "LIMIT", 100)
    with pytest.raises(RunError, match="--without-checkpoints, or copy .*it's 1 from"):
        fetch(Cluster(client), "job", tmp_path / "runs")


def test_the_machine_is_gone(client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client.runs = False
    monkeypatch.setattr(fetching, "PATIENCE_S", 0.0)
    with pytest.raises(RunError, match="the machine that it ran on does not answer"):
        fetch(Cluster(client), "job", tmp_path / "runs", wait=lambda seconds: None)
    assert client.stopped == [client.submitted[0]["submission_id"]]


def test_a_python_that_is_not_there(client: FakeClient, tmp_path: Path) -> None:
    client.details["job"].metadata["python"] = "~/no/python"
    with pytest.raises(RunError, match="its run folders cannot be read there"):
        fetch(Cluster(client), "job", tmp_path / "runs")


def packed(folder: Path, change: Callable[[str], None]) -> dict[str, str]:
    """What is packed of a run folder that is changed whenever a file was read, in order."""
    stream, real = io.BytesIO(), sender.read

    def read(path: str) -> object:
        found = real(path)
        change(Path(path).relative_to(folder).as_posix())
        return found

    with pytest.MonkeyPatch.context() as patch, tarfile.open(fileobj=stream, mode="w:gz") as archive:
        patch.setattr(sender, "read", read)
        sender.pack(archive, "x", str(folder), True)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as archive:
        files = ((member.name.removeprefix("x/"), archive.extractfile(member)) for member in archive)
        return {name: file.read().decode() for name, file in files if file}


class Going:
    """A run that is going on: a round is done, and its checkpoint takes the place of the one before."""

    def __init__(self, folder: Path):
        self.folder, self.round = run_folder(folder), 1
        self.save()

    def save(self) -> None:
        shutil.rmtree(self.folder / "checkpoints")
        for name in ("client_000.pt", "meta.json", "server.pt"):
            path = self.folder / f"checkpoints/round_{self.round:04d}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(self.round))

    def go(self) -> None:
        self.round += 1
        (self.folder / "metrics.jsonl").write_text("{}\n" * self.round)
        self.save()


def test_what_comes_of_a_run_that_is_going_on_can_be_taken_up(tmp_path: Path) -> None:
    """Whichever file was read when a round ended: the checkpoint is whole, and its rounds are in the records."""
    (tmp_path / "still").mkdir()
    names = [*packed(Going(tmp_path / "still" / "run").folder, lambda name: None)]
    assert names[:4] == [*(f"checkpoints/round_0001/{n}" for n in ("client_000.pt", "server.pt", "meta.json")), RECORD]
    for number, now in enumerate(names):
        run = Going(tmp_path / str(number) / "run")
        (run.folder / ".mirror/round_0001").mkdir(parents=True)
        (run.folder / ".mirror/round_0001/server.pt").touch()

        def change(name: str, run: Going = run, now: str = now) -> None:
            if name == now and run.round == 1:
                run.go()

        got = packed(run.folder, change)
        saved = {name: text for name, text in got.items() if name.startswith("checkpoints/")}
        (last,) = set(saved.values())
        assert len(saved) == 3 and saved.keys() == {f"checkpoints/round_000{last}/{Path(n).name}" for n in saved}
        assert got[RECORD].count("\n") >= int(last) and "config.yaml" in got
        assert not [name for name in got if name.startswith(".")]


def test_a_run_that_ends_while_it_is_read_is_not_complete(tmp_path: Path) -> None:
    run = Going(tmp_path / "run")

    def end(name: str) -> None:
        if name == RECORD:
            (run.folder / "summary.json").write_text("complete")

    assert "summary.json" not in packed(run.folder, end)
    assert "summary.json" in packed(run.folder, end)


def log_with(content: bytes, **said: object) -> str:
    head = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "runs": ["x"], "all": ["x"], **said}
    return (
        f"noise\npflsim-fetch-begin {json.dumps(head)}\n{base64.b64encode(content).decode()}\npflsim-fetch-end\nnoise\n"
    )


def test_what_is_not_whole_is_not_believed() -> None:
    good = log_with(b"content")
    assert received(good, "job")[1] == b"content"
    wrong = {
        "did not arrive as they were sent": [log_with(b"content", sha256="0"), log_with(b"content", bytes=3)],
        "is not whole": [good.replace("fetch-end", "fetch-"), good[:40], "", good + good],
        "something else is between": [good.replace("pflsim-fetch-end", "(raylet) a word\npflsim-fetch-end")],
    }
    for said, logs in wrong.items():
        for log in logs:
            with pytest.raises(RunError, match=said):
                received(log, "job")


def archive(*entries: tuple[str, bytes | None, str]) -> bytes:
    """Of files, and of links where there is no content."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as made:
        for name, content, link in entries:
            entry = tarfile.TarInfo(name)
            entry.size = len(content or b"")
            if content is None:
                entry.type, entry.linkname = tarfile.SYMTYPE, link
            made.addfile(entry, io.BytesIO(content or b""))
    return stream.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        archive(("../evil", b"x", "")),
        archive(("x/../../evil", b"x", "")),
        archive(("x/link", None, "/etc")),
        archive(("x/link", None, "../../..")),
        b"no archive",
        archive(("x/a", b"x" * 5000, ""))[:60],
    ],
)
def test_archives_that_lead_elsewhere(tmp_path: Path, content: bytes) -> None:
    into = tmp_path / "deep" / "runs"
    with pytest.raises(RunError, match="is no archive of run folders"):
        unpack(content, ["x"], into, "~")
    assert not [*into.iterdir()] and not (tmp_path / "deep" / "evil").exists() and not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", ["../x", "/x", "", "a/../../x"])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="is no name of a run folder"):
        unpack(archive(("x/a", b"x", "")), [name], tmp_path / "runs", "~")
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunError, match="cannot be written to"):
        unpack(archive(("x/a", b"x", "")), ["x"], tmp_path / "runs", "~")
