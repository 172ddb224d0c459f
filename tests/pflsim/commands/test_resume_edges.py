"""Resuming a run whose folder was changed, or that failed at an awkward moment."""

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stopped_runs import SMALL, left, stop_after, unchanged
from support import agree, slow_except

from pflsim import cli
from pflsim.engine import checkpointing

RUN = ["method=fedavg", "lockstep=false", *SMALL]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    assert cli.main([*RUN, f"run_dir={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(2, patch)
        assert cli.main([*RUN, f"run_dir={folder}"]) == 130
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A copy of the folder of a stopped run."""
    return Path(shutil.copytree(stopped_once, tmp_path / "stopped"))


Refused = Callable[..., str]


@pytest.mark.parametrize("line", ["lr: 0.05", "clients: 5"])
def test_an_edited_setting_is_noticed(line: str, stopped: Path, refused: Refused) -> None:
    config = stopped / "config.yaml"
    text = config.read_text()
    assert text.count(f"\n{line}\n") == 1
    config.write_text(text.replace(f"\n{line}\n", f"\n{line}1\n"))
    setting = line.replace(": ", "=")
    assert re.search(f"{setting}.*{setting}1", unchanged(refused, stopped))


def test_lost_records_are_no_reason_to_begin_again(stopped: Path, refused: Refused) -> None:
    (stopped / "metrics.jsonl").unlink()
    assert "metrics.jsonl" in unchanged(refused, stopped)


@pytest.mark.parametrize("file", ["environment.json", "meta.json"])
@pytest.mark.parametrize("number", [99, None])
def test_another_format_is_refused(file: str, number: int | None, stopped: Path, refused: Refused) -> None:
    (path,) = stopped.rglob(file)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": number}))
    assert f"format {number}" in unchanged(refused, stopped)
    if file == "environment.json":
        for command in (["compare"], ["report"], ["export", "--client", "0"]):
            assert f"format {number}" in refused(command[0], str(stopped), *command[1:])


def test_without_checkpoints_it_begins_again(stopped: Path, straight: Path) -> None:
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "metrics.jsonl").unlink()
    assert cli.main([f"resume={stopped}"]) == 0
    agree(left(stopped), left(straight))


def test_settings_that_are_newer_than_the_checkpoint_have_their_defaults(
    stopped: Path, straight: Path, refused: Refused
) -> None:
    """One that has another value is a difference: the learning rate."""
    (meta,) = stopped.rglob("meta.json")
    content = json.loads(meta.read_text())
    settings = content["header"]["settings"]
    newer = {key: value for key, value in settings.items() if key.startswith(("task.", "pretrained."))}
    content["header"]["settings"] = {key: value for key, value in settings.items() if key not in (*newer, "lr")}
    meta.write_text(json.dumps(content))
    assert "lr=None" in unchanged(refused, stopped)
    content["header"]["settings"] |= {"lr": settings["lr"]}
    meta.write_text(json.dumps(content))
    assert len(newer) > 4 and cli.main([f"resume={stopped}"]) == 0
    agree(left(stopped), left(straight))


WORDS = {"lr=0.2": "lr", "placement.threads=2": "placement.threads", "placement.gpus=1": "device"}


@pytest.mark.parametrize(("more", "words"), [*WORDS.items(), ("rounds=2", "2 rounds")])
def test_what_cannot_change(more: str, words: str, stopped: Path, refused: Refused) -> None:
    assert words in unchanged(refused, stopped, more)


CLIENTS = "clients_000000.pt"


def change_state(checkpoint: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit a state in a checkpoint, with the right checksum."""
    state, meta = torch.load(checkpoint / name), json.loads((checkpoint / "meta.json").read_text())
    change(state)
    torch.save(state, checkpoint / name)
    meta["files"][name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    (checkpoint / "meta.json").write_text(json.dumps(meta))


def without_client(checkpoint: Path) -> None:
    change_state(checkpoint, CLIENTS, lambda states: states.pop(1))
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["ids"][CLIENTS].remove(1)
    (checkpoint / "meta.json").write_text(json.dumps(meta))


UNFIT: dict[str, Callable[[Path], None]] = {
    "a client is missing": without_client,
    "a client's key": lambda path: change_state(path, CLIENTS, lambda states: states[3].popitem()),
    "a shape of the server": lambda path: change_state(
        path, "server.pt", lambda state: state["weights"].update({k: v[:1] for k, v in state["weights"].items()})
    ),
}


@pytest.mark.parametrize("damage", slow_except(["a client is missing"], UNFIT))
def test_a_checkpoint_that_does_not_fit(
    damage: str, stopped: Path, straight: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before is used; without one, the run does not begin again, and nothing is changed."""
    newest, older = stopped / "checkpoints" / "round_0002", stopped / "checkpoints" / "round_0001"
    UNFIT[damage](newest)
    assert "round_0002" in unchanged(refused, stopped)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(1, patch)
        assert cli.main([*RUN, f"run_dir={stopped.with_name('first')}"]) == 130
    shutil.copytree(stopped.with_name("first") / "checkpoints" / "round_0001", older)
    assert cli.main([f"resume={stopped}"]) == 0
    agree(left(stopped), left(straight))
    assert "round_0002" in capsys.readouterr().err


@pytest.mark.parametrize("full_from", [1, 4])
@pytest.mark.slow
def test_a_disk_that_was_full_in_the_end(
    full_from: int, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results are complete, but not the run: resumed with room on the disk, it saves the same states."""
    real = checkpointing.stage_checkpoint

    def full(folder: Path, round_number: int, *rest: Any) -> Any:
        if round_number >= full_from:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, round_number, *rest)

    folder = tmp_path / "full"
    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "stage_checkpoint", full)
        capsys.readouterr()
        assert cli.main([*RUN, f"run_dir={folder}"]) == 1
    said = capsys.readouterr()
    assert "final states are not saved" in said.err and f"resume={folder}" in said.out
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["complete"], summary["rounds"], summary["states_saved"]) == (True, 4, False)
    assert (folder / "per_client.csv").read_text() == (straight / "per_client.csv").read_text()
    assert cli.main([f"resume={folder}"]) == 0
    agree(left(folder), left(straight))
    assert cli.main([f"resume={folder}"]) == 0 and "is complete" in capsys.readouterr().out


@pytest.mark.slow
def test_data_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are compared by their contents."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (120, 1, 6, 6)).astype(np.uint8), np.tile(np.arange(3), 40)
    arrays = {"x_train": images[:90], "y_train": labels[:90], "x_test": images[90:], "y_test": labels[90:]}
    np.savez(tmp_path / "here.npz", **arrays)
    np.savez(tmp_path / "other.npz", **{**arrays, "x_train": 255 - images[:90]})
    run = [text for text in RUN if not text.startswith("data=")]
    stop_after(2, monkeypatch)
    command = ["data=npz", f"data.path={tmp_path / 'here.npz'}", "partition=iid", f"run_dir={tmp_path / 'run'}"]
    assert cli.main([*run, *command]) == 130
    (tmp_path / "here.npz").rename(tmp_path / "there.npz")
    assert cli.main([f"resume={tmp_path / 'run'}"]) == 2
    assert cli.main([f"resume={tmp_path / 'run'}", f"data.path={tmp_path / 'other.npz'}"]) == 2
    assert cli.main([f"resume={tmp_path / 'run'}", f"data.path={tmp_path / 'there.npz'}"]) == 0
