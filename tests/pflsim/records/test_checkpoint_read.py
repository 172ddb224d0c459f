"""Only what is exactly as it was written is read; a checkpoint that is left out is named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import write_checkpoint

from pflsim.errors import SettingsError
from pflsim.records.checkpoint import meta
from pflsim.records.checkpoint.meta import BadCheckpoint, Checkpoint
from pflsim.records.checkpoint.read import check_header, newest_checkpoint

HEADER = {"method": "fedavg", "data": "digits", "model": "mlp", "partition_hash": "abc", "seed": 5, "clients": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of rounds 5 and 10."""
    for number in (5, 10):
        clients = [(c, {"w": torch.arange(4.0) + c}) for c in range(3)]
        write_checkpoint(tmp_path / "checkpoints", number, {"round": number}, clients, HEADER, 2, number / 10)
    return tmp_path / "checkpoints"


def newest(folder: Path, **options: Any) -> tuple[Checkpoint | None, list[str]]:
    said: list[str] = []
    return newest_checkpoint(folder, said.append, **options), said


def test_a_whole_one(folder: Path) -> None:
    checkpoint, said = newest(folder)
    assert checkpoint is not None and said == []
    assert (checkpoint.round, checkpoint.header, checkpoint.score) == (10, HEADER, 1.0)
    assert checkpoint.path == folder / "round_0010"
    assert checkpoint.server() == {"round": 10} and checkpoint.ids == (0, 1, 2)
    assert checkpoint.client(2)["w"].tolist() == [2, 3, 4, 5]
    assert [(c, state["w"].tolist()[0]) for c, state in checkpoint.clients()] == [(0, 0), (1, 1), (2, 2)]


def test_no_folder_or_an_empty_one(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") == (None, [])
    assert newest(tmp_path) == (None, [])


def test_what_meta_json_says(folder: Path) -> None:
    found = json.loads((folder / "round_0005" / "meta.json").read_text())
    server = (folder / "round_0005" / "server.pt").read_bytes()
    assert set(found) == {"format", "round", "header", "score", "versions", "files", "digest"}
    assert (found["format"], found["round"], found["header"], found["score"]) == (2, 5, HEADER, 0.5)
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["files"]) == {"server.pt", "client_000.pt", "client_001.pt", "client_002.pt"}
    assert found["files"]["server.pt"] == {"size": len(server), "sha256": hashlib.sha256(server).hexdigest()}
    rest = {key: value for key, value in found.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    assert found["digest"] == hashlib.sha256(text.encode()).hexdigest()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], sign: bool = False) -> None:
    """Edit meta.json; `sign`: with a digest that fits, as nobody would by mistake."""
    content = json.loads((path / "meta.json").read_text())
    change(content)
    if sign:
        del content["digest"]
        content["digest"] = meta._digest(content)
    (path / "meta.json").write_text(json.dumps(content))


def replace_by_link(path: Path) -> None:
    elsewhere = path.parents[2] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def not_loadable(path: Path) -> None:
    """A file that could run code when it is loaded, with the right checksum."""
    torch.save(os.getcwd, path / "server.pt")
    data = (path / "server.pt").read_bytes()
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(path, lambda content: content["files"].update({"server.pt": entry}), sign=True)


def outside(name: str) -> Callable[[Path], None]:
    """meta.json that names a file elsewhere, which exists and has the right size and checksum."""

    def apply(path: Path) -> None:
        shutil.copy(path / "server.pt", path.parent / "client_007.pt")
        shutil.copy(path / "server.pt", path.parent.parent / "client_007.pt")
        rewrite(path, lambda content: content["files"].update({name: content["files"]["server.pt"]}), sign=True)

    return apply


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped bit": (lambda p: flip(p / "client_002.pt"), "client_002.pt does not match its checksum"),
    "flipped bit, server": (lambda p: flip(p / "server.pt"), "server.pt does not match its checksum"),
    "truncated": (lambda p: truncate(p / "client_001.pt"), "client_001.pt has"),
    "emptied": (lambda p: os.truncate(p / "server.pt", 0), "server.pt has 0 bytes instead of"),
    "missing": (lambda p: (p / "client_001.pt").unlink(), "client_001.pt is missing"),
    "exchanged": (
        lambda p: shutil.copy(p / "client_001.pt", p / "client_002.pt"),
        "client_002.pt does not match its checksum",
    ),
    "no meta": (lambda p: (p / "meta.json").unlink(), "meta.json is missing"),
    "truncated meta": (
        lambda p: truncate(p / "meta.json") or truncate(p / "meta.json"),
        "meta.json is not a JSON mapping",
    ),
    "binary meta": (lambda p: (p / "meta.json").write_bytes(b"\xff\xfe"), "meta.json is not a JSON mapping"),
    "deep meta": (lambda p: (p / "meta.json").write_text("[" * 100_000), "meta.json is not a JSON mapping"),
    "list meta": (lambda p: (p / "meta.json").write_text("[]"), "meta.json is not a JSON mapping"),
    "edited seed": (
        lambda p: rewrite(p, lambda c: c["header"].update(seed=6)),
        "meta.json does not match its checksum",
    ),
    "edited score": (lambda p: rewrite(p, lambda c: c.update(score=2.0)), "meta.json does not match its checksum"),
    "extra key": (lambda p: rewrite(p, lambda c: c.update(note="hello")), "meta.json does not match its checksum"),
    "no digest": (lambda p: rewrite(p, lambda c: c.pop("digest")), "meta.json does not match its checksum"),
    "no files": (lambda p: rewrite(p, lambda c: c.pop("files"), sign=True), "meta.json has unexpected content"),
    "no server": (lambda p: rewrite(p, lambda c: c["files"].pop("server.pt"), sign=True), "server.pt is missing"),
    "link": (lambda p: replace_by_link(p / "client_001.pt"), "client_001.pt is not a regular file"),
    "linked meta": (lambda p: replace_by_link(p / "meta.json"), "meta.json is not a regular file"),
    "linked folder": (replace_by_link, "it is not a folder"),
    "pipe": (
        lambda p: (p / "client_001.pt").unlink() or os.mkfifo(p / "client_001.pt"),
        "client_001.pt is not a regular file",
    ),
    "folder": (
        lambda p: (p / "client_001.pt").unlink() or (p / "client_001.pt").mkdir(),
        "client_001.pt is not a regular file",
    ),
    "up": (outside("../client_007.pt"), "meta.json lists '../client_007.pt'"),
    "other name": (outside("client_7.pt"), "meta.json lists 'client_7.pt'"),
    "code": (not_loadable, "server.pt cannot be loaded"),
    "another round's": (
        lambda p: shutil.rmtree(p) or shutil.copytree(p.with_name("round_0005"), p),
        "meta.json is of round 5",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_refused_and_the_one_before_is_used(folder: Path, damage: str) -> None:
    act, reason = DAMAGES[damage]
    act(folder / "round_0010")
    checkpoint, said = newest(folder)
    assert checkpoint is not None and (checkpoint.round, checkpoint.server()) == (5, {"round": 5})
    (line,) = said
    assert line.startswith(f"checkpoints/round_0010 is damaged ({reason}")
    assert line.endswith("); round_0005 is used instead") and "\n" not in line
    assert (folder / "round_0010").exists() or damage == "linked folder"  # nothing is removed by reading


def test_all_damaged(folder: Path) -> None:
    for number in (5, 10):
        flip(folder / f"round_{number:04d}" / "server.pt")
    end = "is damaged (server.pt does not match its checksum); there is no other checkpoint"
    assert newest(folder) == (None, [f"checkpoints/round_{n:04d} {end}" for n in (10, 5)])


@pytest.mark.parametrize("number", [3, 1, None, "2"])
def test_another_format_is_refused_with_that_reason(folder: Path, number: object) -> None:
    rewrite(folder / "round_0010", lambda content: content.update(format=number))
    checkpoint, said = newest(folder)
    reason = f"format {number!r} is unknown; this version reads format 2"
    assert checkpoint is not None and checkpoint.round == 5
    assert said == [f"checkpoints/round_0010 cannot be used ({reason}); round_0005 is used instead"]


def test_those_beyond_the_records_are_passed_over(folder: Path) -> None:
    checkpoint, said = newest(folder, until=9)
    assert checkpoint is not None and checkpoint.round == 5
    assert said == ["checkpoints/round_0010 is ignored (the records end at round 9); round_0005 is used instead"]
    assert newest(folder, until=4)[0] is None
    assert newest(folder, until=10)[1] == []


def test_what_meta_json_does_not_name_is_left_alone(folder: Path) -> None:
    whole = folder / "round_0010"
    (whole / "client_003.pt").write_bytes(b"not named")
    (whole / "notes").symlink_to("/nowhere")
    (folder / "round_12").mkdir()
    (folder / "round_0011.bak").mkdir()
    (folder / "rounds.txt").write_text("")
    checkpoint, said = newest(folder)
    assert checkpoint is not None and (checkpoint.round, checkpoint.ids, said) == (10, (0, 1, 2), [])
    with pytest.raises(BadCheckpoint, match=r"client_003.pt is not in meta.json"):
        checkpoint.client(3)


def test_a_file_that_changes_after_it_was_found_whole_is_not_loaded(folder: Path) -> None:
    checkpoint, _ = newest(folder)
    assert checkpoint is not None
    flip(folder / "round_0010" / "client_001.pt")
    assert checkpoint.client(0)["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(BadCheckpoint, match=r"client_001.pt does not match its checksum"):
        list(checkpoint.clients())


def test_the_layout_of_meta_json_does_not_matter(folder: Path) -> None:
    path = folder / "round_0010" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert newest(folder)[1] == []


def test_more_than_999_clients_and_9999_rounds(tmp_path: Path) -> None:
    clients = [(c, {}) for c in (2, 999, 1000, 12345)]
    write_checkpoint(tmp_path, 9999, {}, [], {}, 3)
    write_checkpoint(tmp_path, 10000, {}, clients, {}, 3)
    checkpoint, said = newest(tmp_path)
    assert checkpoint is not None and (checkpoint.round, said) == (10000, [])
    assert [c for c, _ in checkpoint.clients()] == [2, 999, 1000, 12345]


def test_the_header_names_every_difference(folder: Path) -> None:
    checkpoint, _ = newest(folder)
    assert checkpoint is not None
    check_header(checkpoint, dict(reversed(HEADER.items())), pytest.fail)
    other = {k: v for k, v in HEADER.items() if k != "clients"} | {"method": "fedper", "seed": 6, "new": 1}
    with pytest.raises(SettingsError) as raised:
        check_header(checkpoint, other, pytest.fail)
    assert str(raised.value) == (
        "the run cannot resume from checkpoints/round_0010, which was saved with method=fedavg, seed=5, clients=3, "
        "new=None: this run has method=fedper, seed=6, clients=None, new=1"
    )


def test_a_header_of_lists_is_compared_as_json_has_it(tmp_path: Path) -> None:
    header = {"hidden": (3, 4), "parts": {"x": None, 1: (2,)}}
    write_checkpoint(tmp_path, 1, {}, [], header, 1)
    checkpoint, _ = newest(tmp_path)
    assert checkpoint is not None
    check_header(checkpoint, header, pytest.fail)


def test_another_version_or_processor_is_a_warning(folder: Path) -> None:
    change = {"torch": "1.0", "pflsim": "0.0", "processor": "Other, AVX2"}
    own = json.loads((folder / "round_0010" / "meta.json").read_text())["versions"]
    rewrite(folder / "round_0010", lambda content: content["versions"].update(change), sign=True)
    checkpoint, _ = newest(folder)
    assert checkpoint is not None
    said: list[str] = []
    check_header(checkpoint, HEADER, said.append)
    end = "the last bits may differ"
    assert said == [
        f"the run was saved with pflsim 0.0 and resumes with {own['pflsim']}: {end}",
        f"the run was saved with torch 1.0 and resumes with {own['torch']}: {end}",
        f"the run was saved with processor Other, AVX2 and resumes with {own['processor']}: {end}",
    ]


def test_a_checkpoint_that_names_no_processor_resumes_without_a_warning(folder: Path) -> None:
    rewrite(folder / "round_0010", lambda content: content["versions"].pop("processor"), sign=True)
    checkpoint, _ = newest(folder)
    assert checkpoint is not None
    check_header(checkpoint, HEADER, pytest.fail)


def test_a_setting_that_is_newer_than_the_checkpoint_had_its_default(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, {}, [], {"settings": {"lr": 0.1}}, 1)
    checkpoint, _ = newest(tmp_path)
    assert checkpoint is not None
    check_header(checkpoint, {"settings": {"lr": 0.1, "optimizer.keep": False}}, pytest.fail)
    with pytest.raises(SettingsError, match=r"saved with optimizer\.keep=False"):
        check_header(checkpoint, {"settings": {"lr": 0.1, "optimizer.keep": True}}, pytest.fail)
