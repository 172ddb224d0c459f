"""Runs with a remote copy, from the command line: complete at the end, downloaded, resumed, and when it fails."""

import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from fake_filesystems import Asked, contents, local_contents, nothing, register
from stopped_runs import SMALL, left, stop_after
from support import agree

from pflsim import cli
from pflsim.commands import resume
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


def test_it_is_there_in_the_end(
    url: str, straight: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*RUN, f"run_dir={url}"]) == 0
    folder = only()
    said = capsys.readouterr()
    assert said.out.count(f"{folder}, remote copy {url}\n") == 2 and not said.err
    assert contents(url) == local_contents(folder)
    assert yaml.safe_load((folder / "config.yaml").read_text())["run_dir"] == url
    as_straight(folder, straight)
    assert refused(*RUN, f"run_dir={url}").startswith(f"error: run_dir={url} is not empty")
    assert only() == folder, "what is refused leaves no folder"
    assert cli.main([f"resume={url}"]) == 0
    assert capsys.readouterr().out == "runs/mine is complete: all of its 4 rounds are done\n"


def stopped(url: str, after: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    stop_after(after, monkeypatch)
    assert cli.main([*RUN, f"run_dir={url}"]) == 128 + signal.SIGINT
    return only()


def test_downloaded_from_there_it_ends_as_a_straight_run(
    url: str,
    straight: Path,
    tmp_path: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = stopped(url, 2, monkeypatch)
    assert f"resume with  pflsim resume={first} run_dir={url}\n" in capsys.readouterr().out
    assert contents(url) == local_contents(first)
    (tmp_path / "another machine").mkdir()
    monkeypatch.chdir(tmp_path / "another machine")
    monkeypatch.setattr(resume, "replaced", {"__main__.of_another_run"})
    assert cli.main([f"resume={url}"]) == 0
    folder = only()
    assert folder == Path("runs/mine")
    assert f"run folder {folder}, remote copy {url}\nresumed after round 2\n" in capsys.readouterr().out
    as_straight(folder, straight)
    assert contents(url) == local_contents(folder)
    monkeypatch.chdir(tmp_path)
    assert f"give resume={url}" in refused(f"resume={first}", f"run_dir={url}")


def test_a_resumed_folder_keeps_its_remote_copy(url: str, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main([f"resume={stopped(url, 3, monkeypatch)}", f"run_dir={url}"]) == 0
    as_straight(only(), straight)
    assert contents(url) == local_contents(only())


def test_a_folder_does_not_decide_where_it_is_copied_to(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """Somebody else may have written its config.yaml."""
    url = f"file://{tmp_path}/elsewhere/mine"
    folder = stopped(url, 2, monkeypatch)
    there = contents(url)
    assert f"give run_dir={url} " in refused(f"resume={folder}")
    refused(f"resume={folder}", "run_dir=elsewhere")
    assert cli.main([f"resume={folder}", "run_dir=null"]) == 0
    as_straight(folder, straight)
    assert contents(url) == there


@pytest.mark.parametrize("words", ["run_dir=URL", "resume=URL", "resume=URL -m", "submit resume=URL clients=3"])
def test_a_password_is_written_nowhere(tmp_path: Path, refused: Callable[..., str], words: str) -> None:
    url = "simplecache::sftp://me:secret@host/x"
    said = refused(*words.replace("URL", url).split())
    assert "password" in said and "secret" not in said
    with pytest.raises(SettingsError, match="password"):
        download(url)
    assert not list(tmp_path.iterdir())
