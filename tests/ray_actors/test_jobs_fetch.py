"""Run folders on their way back: what is sent, what is believed, and where it may be written."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fake_cluster import FakeClient

from pflsim.errors import RunError, SettingsError
from pflsim.run_folder.folder import run_lock
from ray_actors.jobs import fetch as fetching
from ray_actors.jobs import sender
from ray_actors.jobs.client import Cluster
from ray_actors.jobs.fetch import Fetched, fetch, received, unpack
from ray_actors.jobs.sender import MARK

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
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name not in (MARK, ".lock"))
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def test_a_run_folder_comes_as_it_is(client: FakeClient, tmp_path: Path) -> None:
    (new,) = fetch(Cluster(client), "job", tmp_path / "runs").brought
    assert new == tmp_path / "runs" / "20260101-000000-fedavg-digits-s0"
    assert files_of(new) == {name: text for name, text in FILES.items() if name != ".lock"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [new.name]
    (asked,) = client.submitted
    assert asked["entrypoint_label_selector"] == {"ray.io/node-id": "node-1"} and "runtime_env" not in asked
    assert client.deleted == [asked["submission_id"]]


def test_without_checkpoints(client: FakeClient, tmp_path: Path) -> None:
    (new,) = fetch(Cluster(client), "job", tmp_path / "runs", checkpoints=False).brought
    assert (new / "config.yaml").exists() and not (new / "checkpoints").exists()


def test_runs_of_names_of_their_own(client: FakeClient, tmp_path: Path) -> None:
    home = client.home / "jobs/it's 1"
    for name in ("elsewhere/x", "runs/sweep/b", "../outside"):
        run_folder(home / name)
    (home / "runs/begun").mkdir()
    (home / "runs/begun/config.yaml").touch()
    (home / "link").symlink_to(home / "runs")
    new = fetch(Cluster(client), "job", tmp_path / "runs").brought
    names = {path.relative_to(tmp_path / "runs").as_posix() for path in new}
    assert names == {"20260101-000000-fedavg-digits-s0", "elsewhere/x", "sweep/b", "outside"}


def again(client: FakeClient, into: Path, checkpoints: bool = True) -> Fetched:
    return fetch(Cluster(client), "job", into, checkpoints)


@pytest.fixture
def there(client: FakeClient) -> Path:
    """The run folder on the cluster."""
    (folder,) = (client.home / "jobs/it's 1/runs").iterdir()
    return folder


@pytest.fixture
def here(there: Path, client: FakeClient, tmp_path: Path) -> Path:
    """The run folder as it was brought."""
    (folder,) = again(client, tmp_path / "runs").brought
    return folder


def go_on(there: Path) -> None:
    """A round later: another checkpoint in the place of the last one."""
    (old,) = (there / "checkpoints").iterdir()
    number = int(old.name.removeprefix("round_")) + 1
    old.rename(old.with_name(f"round_{number}"))
    with (there / RECORD).open("a") as records:
        records.write(f'{{"round": {number}}}\n')


def test_what_was_brought_is_brought_up_to_date(client: FakeClient, there: Path, here: Path) -> None:
    """What others have put beside it is as it was, what they took away comes back, and what has gone there is gone."""
    elsewhere = run_folder(here.parent.parent / "notes")
    (here / "report.html").write_text("mine")
    (here / "empty").mkdir()
    (here / "notes").symlink_to(elsewhere)
    (here / "nowhere").symlink_to("nothing")
    (here / "tb/ü 1").unlink()
    for number in (2, 3):
        go_on(there)
        found = again(client, here.parent)
        assert (found.brought, found.complete, found.kept) == ([here], [], {})
        assert files_of(here)["report.html"] == "mine" and (here / "empty").is_dir()
        assert (here / "notes").readlink() == elsewhere and (here / "nowhere").is_symlink()
        assert files_of(there).items() <= files_of(here).items()
        assert [path.name for path in (here / "checkpoints").iterdir()] == [f"round_{number}"]
    assert [path.name for path in here.parent.iterdir()] == [here.name]


def test_a_copy_on_another_disk(
    client: FakeClient, there: Path, here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder stays the link that someone has made of it."""
    large = tmp_path / "large"
    here.rename(large)
    here.symlink_to(large)
    go_on(there)
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if self.parent != target.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    assert again(client, here.parent).brought == [here]
    assert here.is_symlink() and files_of(large) == files_of(there)


def test_checkpoints_that_are_not_asked_for_stay(client: FakeClient, there: Path, here: Path) -> None:
    """Those that came before; and they are brought up to date, and go, when they are asked for."""
    before = files_of(here)
    go_on(there)
    assert again(client, here.parent, checkpoints=False).brought == [here]
    assert files_of(here) == {**before, RECORD: (there / RECORD).read_text()}
    assert again(client, here.parent).brought == [here]
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["round_2"]


def test_what_has_come_whole_is_not_sent_again(client: FakeClient, there: Path, tmp_path: Path) -> None:
    """So that one more run is not one too many for a log."""
    into = tmp_path / "runs"
    (there / "summary.json").write_text('{"complete": true}')
    (here,) = again(client, into, checkpoints=False).brought
    assert again(client, into).brought == [here]  # with checkpoints
    (here / "checkpoints/round_1/server.pt").unlink()
    found = again(client, into)
    assert (found.brought, found.complete, found.kept) == ([], [here], {})
    assert not (here / "checkpoints/round_1/server.pt").exists()
    run_folder(there.with_name("sweep") / "later")
    found = again(client, into)
    assert (found.brought, found.complete) == ([into / "sweep/later"], [here])
    (there / RECORD).write_text('{"round": 1, "seconds": 2}\n')
    assert "another run" in again(client, into).kept[here]


def change(here: Path) -> None:
    (here / "config.yaml").write_text("mine")


def resume(here: Path) -> None:
    """A run that is taken up here, and gets no further than its first line."""
    (here / "summary.json").write_text("{}")


def replace(here: Path) -> None:
    (here / RECORD).unlink()
    (here / RECORD).mkdir()


def forget(here: Path) -> None:
    (here / MARK).write_text("{")


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (change, "config.yaml was changed here"),
        (resume, "summary.json is here already, and comes from there too"),
        (replace, "is in the way"),
        (forget, "it was not brought by fetch"),
    ],
)
def test_what_was_changed_here_is_left_as_it_is(
    act: Callable[[Path], None], why: str, client: FakeClient, there: Path, here: Path
) -> None:
    act(here)
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file() and path.name != ".lock"}
    go_on(there)
    (there / "summary.json").write_text('{"complete": false}')
    run_folder(there.with_name("later"))
    found = again(client, here.parent)
    assert found.brought == [here.with_name("later")] and why in found.kept[here]
    after = {path: path.read_bytes() for path in here.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"checkpoints": true, "files": 3}', '{"files": {}}'])
def test_a_mark_that_cannot_be_read(client: FakeClient, here: Path, text: str) -> None:
    (here / MARK).write_text(text)
    assert again(client, here.parent).kept == {here: "it was not brought by fetch"}


def test_a_run_that_goes_on_here_is_left_alone(client: FakeClient, there: Path, here: Path) -> None:
    go_on(there)
    with run_lock(here):
        assert "is in use by another process" in again(client, here.parent).kept[here]
    assert again(client, here.parent).brought == [here]


@pytest.mark.parametrize(
    ("records", "why"), [("", "another run"), ('{"round": 1, "seconds": 2}\n', "another run"), ("{}\n", "more rounds")]
)
def test_what_is_no_later_copy_of_the_same_run(
    records: str, why: str, client: FakeClient, there: Path, here: Path
) -> None:
    go_on(there)
    assert again(client, here.parent).brought == [here]
    (there / RECORD).write_text(records)
    before = files_of(here)
    assert why in again(client, here.parent).kept[here]
    assert files_of(here) == before


def test_before_the_first_round_the_settings_tell_runs_apart(client: FakeClient, there: Path, tmp_path: Path) -> None:
    (there / RECORD).write_text("")
    (here,) = again(client, tmp_path / "runs").brought
    (there / "config.yaml").write_text("seed: 7")
    assert "another run" in again(client, here.parent).kept[here]
    (there / "config.yaml").write_text(FILES["config.yaml"])
    (there / RECORD).write_text("{}\n")
    assert again(client, here.parent).brought == [here]


def test_wherever_it_is_interrupted_the_next_fetch_goes_on(
    client: FakeClient, there: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then there is a checkpoint that the records have the rounds of, and nothing says that all has come."""
    real, written, reached = Path.replace, [], 0

    def broken(self: Path, target: Path) -> Path:
        written.append(target.name)
        if len(written) > reached:
            raise KeyboardInterrupt
        return real(self, target)

    (here / "report.html").write_text("mine")
    while reached < 20:
        go_on(there)
        (there / "summary.json").write_text(str(reached))
        written.clear()
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", broken)
            assert again(client, here.parent).brought == [here]
            break
        rounds = [
            int(path.name.removeprefix("round_")) for path in (here / "checkpoints").iterdir() if any(path.iterdir())
        ]
        found = files_of(here)
        assert min(rounds) <= found[RECORD].count("\n") and found["report.html"] == "mine"
        if found.get("summary.json") == str(reached):  # which may say that the run is complete
            assert files_of(there).items() <= found.items()
        reached += 1
    assert 3 < reached < 20
    assert files_of(here) == {**files_of(there), "report.html": "mine"}
    assert [path.name for path in here.parent.iterdir()] == [here.name]


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
    with pytest.raises(RunError, match="its run folders cannot be read there: there is no ~/no/python to do it"):
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
    head = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "runs": ["x"],
        "all": {"x": ""},
        **said,
    }
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
        unpack(content, ["x"], into)
    assert not [*into.iterdir()] and not (tmp_path / "deep" / "evil").exists() and not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", ["../x", "/x", "", "a/../../x"])
@pytest.mark.parametrize("sent", [True, False])
def test_names_that_lead_elsewhere(
    client: FakeClient, tmp_path: Path, name: str, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_with(archive(("x/a", b"x", "")), **{"runs": [name]} if sent else {"all": {name: ""}})
    monkeypatch.setattr(fetching, "_printed", lambda *args: log)
    with pytest.raises(RunError, match="is no name of a run folder"):
        fetch(Cluster(client), "job", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunError, match="cannot be written to"):
        unpack(archive(("x/a", b"x", "")), ["x"], tmp_path / "runs")
