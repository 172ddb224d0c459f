"""Runs with a remote copy, from the command line: complete at the end, downloaded, resumed, and when it fails."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fake_filesystems import Asked, contents, local_contents, nothing, register
from test_resume import SMALL, agree, left, stop_after

from lightning_modules.base import ClientModule
from pflsim import cli
from pflsim.errors import SettingsError
from pflsim.records.remote import download

pytestmark = pytest.mark.slow

RUN = ["method=fedavg", *SMALL, "checkpoint.every=1"]
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    register()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    Asked.ask = staticmethod(nothing)


@pytest.fixture(params=["teststore", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    disk = request.param == "file"
    return f"{request.param}://{tmp_path if disk else f'runs-{next(NUMBERS)}'}/elsewhere/mine"


def only(root: Path = Path("runs")) -> Path:
    (folder,) = root.iterdir()
    return folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert cli.main([*RUN, f"run_dir={folder}"]) == 0
    return folder


def as_straight(folder: Path, straight: Path) -> None:
    """The same records to the bit, but for the clock; the same checkpoint files, byte by byte."""
    agree(left(folder), left(straight))
    assert (folder / "per_client.csv").read_bytes() == (straight / "per_client.csv").read_bytes()
    mine, expected = (folder / "checkpoints" / "round_0004" for folder in (folder, straight))
    assert {p.name: p.read_bytes() for p in mine.iterdir()} == {p.name: p.read_bytes() for p in expected.iterdir()}


def test_it_is_there_in_the_end(url: str, straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN, f"run_dir={url}"]) == 0
    folder = only()
    said = capsys.readouterr()
    assert said.out.count(f"{folder}, remote copy {url}\n") == 2 and not said.err
    assert contents(url) == local_contents(folder)
    assert yaml.safe_load((folder / "config.yaml").read_text())["run_dir"] == url
    as_straight(folder, straight)
    assert cli.main([*RUN, f"run_dir={url}"]) == 2
    assert only() == folder, "what is refused leaves no folder"
    assert capsys.readouterr().err.startswith(f"error: run_dir={url} is not empty")
    assert cli.main([f"resume={url}"]) == 0
    assert capsys.readouterr().out == "runs/mine is complete: all of its 4 rounds are done\n"


def test_downloaded_from_there_it_ends_as_a_straight_run(
    url: str, straight: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_after(2, monkeypatch)
    assert cli.main([*RUN, f"run_dir={url}"]) == 128 + signal.SIGINT
    stopped = only()
    assert f"resume with  pflsim resume={stopped} run_dir={url}\n" in capsys.readouterr().out
    assert contents(url) == local_contents(stopped)
    (tmp_path / "another machine").mkdir()
    monkeypatch.chdir(tmp_path / "another machine")
    assert cli.main([f"resume={url}"]) == 0
    folder = only()
    assert folder == Path("runs/mine")
    assert f"run folder {folder}, remote copy {url}\nresumed after round 2\n" in capsys.readouterr().out
    as_straight(folder, straight)
    assert contents(url) == local_contents(folder)
    monkeypatch.chdir(tmp_path)
    assert cli.main([f"resume={stopped}", f"run_dir={url}"]) == 2
    assert f"give resume={url}" in capsys.readouterr().err


def test_a_resumed_folder_keeps_its_remote_copy(url: str, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(3, monkeypatch)
    assert cli.main([*RUN, f"run_dir={url}"]) == 128 + signal.SIGINT
    assert cli.main([f"resume={only()}", f"run_dir={url}"]) == 0
    as_straight(only(), straight)
    assert contents(url) == local_contents(only())


def test_a_folder_does_not_decide_where_it_is_copied_to(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody else may have written its config.yaml."""
    url = f"file://{tmp_path}/elsewhere/mine"
    stop_after(2, monkeypatch)
    assert cli.main([*RUN, f"run_dir={url}"]) == 128 + signal.SIGINT
    folder, there = only(), contents(url)
    capsys.readouterr()
    assert cli.main([f"resume={folder}"]) == 2
    assert f"give run_dir={url} " in capsys.readouterr().err
    assert cli.main([f"resume={folder}", "run_dir=elsewhere"]) == 2
    assert cli.main([f"resume={folder}", "run_dir=null"]) == 0
    as_straight(folder, straight)
    assert contents(url) == there


@pytest.mark.parametrize("damage", ["bytes", "no records"])
def test_what_is_damaged_here_does_not_go_over_what_is_good_there(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    url = f"file://{tmp_path}/elsewhere/mine"
    stop_after(2, monkeypatch)
    assert cli.main([*RUN, f"run_dir={url}"]) == 128 + signal.SIGINT
    folder, there = only(), contents(url)
    if damage == "no records":
        (folder / "checkpoints").rename(tmp_path / "lost")
        (folder / "metrics.jsonl").write_text("")
    else:
        path = folder / "checkpoints/round_0002/server.pt"
        path.write_bytes(path.read_bytes()[:-9] + bytes(9))
    here = local_contents(folder)
    capsys.readouterr()
    assert cli.main([f"resume={folder}", f"run_dir={url}"]) == 2
    said = capsys.readouterr().err
    assert url in said and "round 2" in said and f"resume={url}" in said and said.count("\n") == 1
    assert contents(url) == there and local_contents(folder) == here
    folder.rename(tmp_path / "damaged")
    assert cli.main([f"resume={url}"]) == 0
    as_straight(only(), straight)


def test_a_run_that_fails_is_there_too(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    real = ClientModule.before_training

    def before_training(self: ClientModule, *args: object, **kwargs: object) -> object:
        if next(calls) > 8:
            raise RuntimeError("it is broken")
        return real(self, *args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(ClientModule, "before_training", before_training)
        assert cli.main([*RUN, "on_client_error=abort", f"run_dir={url}"]) == 1
    there = contents(url)
    log = there["run.log"].decode()
    assert there == local_contents(only())
    assert "the run ended: client " in log and "it is broken" in log
    assert cli.main([f"resume={only()}", f"run_dir={url}"]) == 0
    assert contents(url) == local_contents(only())


def test_a_place_that_goes_away(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on to its end, says so, and fails in the end with where everything is."""
    url = f"teststore://runs-{next(NUMBERS)}/mine"

    def ask(what: str, path: str) -> None:
        if "metrics" in path or "checkpoints" in path:
            raise ConnectionResetError(104, "Connection reset by peer")

    Asked.ask = staticmethod(ask)
    assert cli.main([*RUN, f"run_dir={url}"]) == 1
    folder, said = only(), capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["warning"] * (len(said) - 1) + ["error"]
    assert all(text in said[-1] for text in (url, "Connection reset by peer", str(folder)))
    assert said[0].removeprefix("warning: ") in (folder / "run.log").read_text()
    as_straight(folder, straight)


def test_a_password_is_written_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN, "run_dir=sftp://me:secret@host/x"]) == 2
    said = capsys.readouterr()
    assert "run_dir" in said.err and "password" in said.err and "secret" not in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [[], ["-m"], ["clients=3"]])
@pytest.mark.parametrize("command", [[], ["submit"]])
def test_a_password_in_resume_is_written_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], more: list[str]
) -> None:
    url = "simplecache::sftp://me:secret@host/x"
    assert cli.main([*command, f"resume={url}", *more]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: resume=") and "password" in said.err
    assert said.err.count("\n") == 1 and "secret" not in said.out + said.err
    with pytest.raises(SettingsError, match="password"):
        download(url)
    assert not list(tmp_path.iterdir())
