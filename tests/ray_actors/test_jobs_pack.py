"""What of a working directory is sent to a cluster."""

from __future__ import annotations

import os
import re
import socket
import zipfile
from pathlib import Path

import pytest

from pflsim.errors import SettingsError
from ray_actors.jobs import pack
from ray_actors.jobs.pack import select, write_archive


def tree(root: Path, *names: str) -> Path:
    """Small files below a folder."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def sent(root: Path, *left_out: Path, exclude: tuple[str, ...] = ()) -> list[str]:
    return [*select(root, left_out, exclude).files]


def test_code_is_sent_and_what_grows_beside_it_is_not(tmp_path: Path) -> None:
    good = [
        "launch.py",
        "configs/method/mine.yaml",
        "pflsim/data/x.py",
        "mine/build/x.py",
        "a b/ü [1] 'q'.py",
        ".hidden",
    ]
    bad = [
        *(".git/config", "sub/.git/config", ".venv/x", "mine/env/pyvenv.cfg", "mine/env/lib/x.py", "data/MNIST/raw"),
        *("runs/a/config.yaml", "pflsim/__pycache__/x.pyc", ".pytest_cache/x", ".ruff_cache/x", ".hypothesis/x"),
        *("pflsim.egg-info/x", "build/x", "dist/x", "web/node_modules/x", "x.pyc", "benchmarks/out/x"),
        *("results/run-1/config.yaml", "results/run-1/environment.json", "results/run-1/metrics.jsonl"),
    ]
    assert sent(tree(tmp_path, *good, *bad)) == sorted(good)


def test_secrets_stay_here_and_are_named(tmp_path: Path) -> None:
    secrets = [".env", ".env.local", ".netrc", "a/key.pem", "a/id_rsa", "id_ed25519.pub", ".git-credentials", ".pypirc"]
    root = tree(
        tmp_path, "launch.py", "environment.py", ".aws/credentials", ".ssh/config", "b/.env/pyvenv.cfg", *secrets
    )
    (root / "link").symlink_to(".env")
    (root / "another").symlink_to(root / ".aws" / "credentials")
    package = select(root, exclude=(".pypirc",))
    assert [*package.files] == ["environment.py", "launch.py"]
    (said,) = package.warnings
    named = ".aws, .env, .env.local, .git-credentials, .netrc, .ssh, a/id_rsa, a/key.pem, another, id_ed25519.pub"
    assert said == f"left out, since there may be secrets in it: {named} and 1 more"


def test_the_data_stay_where_they_are(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", "launch.py", "mine/images/a.png", "mine/set.npz", "mine/x.py")
    left_out = (root / "mine" / "images", root / "mine" / "set.npz", root, tmp_path, tmp_path / "elsewhere")
    assert sent(root, *left_out) == ["launch.py", "mine/x.py"]


@pytest.mark.parametrize(
    ("pattern", "named"), [("ray_actors", "ray_actors"), ("*.py", "launch.py"), ("conf*", "configs")]
)
def test_what_every_run_needs_cannot_be_excluded(tmp_path: Path, pattern: str, named: str) -> None:
    """The cluster's Python may have another version of it, which would be run in its place without a word."""
    root = tree(tmp_path, "launch.py", "configs/config.yaml", "ray_actors/run.py", "mine/ray_actors/x")
    with pytest.raises(SettingsError, match=f"--exclude {re.escape(pattern)} would leave out {named}, which every run"):
        sent(root, exclude=(pattern,))


def test_patterns_that_are_excluded(tmp_path: Path) -> None:
    root = tree(tmp_path, "launch.py", "a.ipynb", "notes/old/x", "notes/new/x", "mine/old/x", "big")
    assert sent(root, exclude=("*.ipynb", "notes/old/", "big")) == ["launch.py", "mine/old/x", "notes/new/x"]


def test_links(tmp_path: Path) -> None:
    outside = tree(tmp_path / "outside", "secret/x")
    root = tree(tmp_path / "root", "launch.py", "real/x.py")
    (root / "file.py").symlink_to(root / "real" / "x.py")
    (root / "folder").symlink_to("real")
    (root / "real" / "loop").symlink_to(root)
    (root / "out").symlink_to(outside / "secret")
    (root / "out.txt").symlink_to(outside / "secret" / "x")
    (root / "gone").symlink_to("nowhere")
    (root / "self").symlink_to("self")
    package = select(root)
    assert [*package.files] == ["file.py", "folder/x.py", "launch.py", "real/x.py"]
    said = "\n".join(package.warnings)
    assert all(
        f"{name} is a link to" in said for name in ("out", "out.txt", "gone", "self", "real/loop", "folder/loop")
    )
    assert str(outside) in said and len(package.warnings) == 6


def test_sockets_and_pipes_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree(tmp_path, "launch.py"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        os.mkfifo("pipe")
        assert sent(tmp_path) == ["launch.py"]


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    names = ["launch.py", "b/ü.py", "a/x.sh"]
    roots = [tree(tmp_path / "one", *names), tree(tmp_path / "two", *reversed(names))]
    for number, root in enumerate(roots):
        (root / "a/x.sh").chmod(0o755)
        os.utime(root / "launch.py", (number, number))
    archives = []
    for number, root in enumerate(roots):
        package = select(root)
        package.texts["made"] = b"here"
        archives.append(write_archive(package, tmp_path / f"{number}.zip").read_bytes())
    assert archives[0] == archives[1]
    with zipfile.ZipFile(tmp_path / "0.zip") as archive:
        assert archive.namelist() == ["a/x.sh", "b/ü.py", "launch.py", "made"]
        assert archive.getinfo("a/x.sh").external_attr >> 16 & 0o777 == 0o755
    (roots[1] / "launch.py").write_text("other")
    assert write_archive(select(roots[1]), tmp_path / "2.zip").read_bytes() != archives[0]


def test_too_much_is_refused_and_the_largest_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, "launch.py")
    for number in range(12):
        (root / f"file{number:02d}.bin").write_bytes(bytes(1000 * (number + 1)))
    total = select(root).bytes
    monkeypatch.setattr(pack, "LIMIT", total)
    assert select(root).bytes == total
    monkeypatch.setattr(pack, "LIMIT", total - 1)
    with pytest.raises(SettingsError) as refused:
        select(root)
    lines = str(refused.value).splitlines()
    assert "in 13 files; at most" in lines[0] and "--exclude PATTERN" in lines[-1]
    assert [line.split()[-1] for line in lines[1:-1]] == [f"file{n:02d}.bin" for n in range(11, 1, -1)]
    assert select(root, exclude=("file11.bin",)).bytes < total


def test_the_limit_is_80_mib_of_content(tmp_path: Path) -> None:
    with (tree(tmp_path, "launch.py") / "zeros").open("wb") as file:
        file.truncate(80 * 2**20)  # that would shrink to nothing
    with pytest.raises(SettingsError, match=r"80\.0 MiB  zeros"):
        select(tmp_path)


@pytest.mark.parametrize("name", [b"caf\xe9.py", b"a\\b.py", b"c:x.py"])
def test_names_that_would_not_arrive(tmp_path: Path, name: bytes) -> None:
    (tree(tmp_path, "launch.py") / os.fsdecode(name)).write_text("x")
    with pytest.raises(SettingsError, match="has a name that cannot be sent: rename it"):
        select(tmp_path)


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = select(tree(tmp_path / "root", "launch.py", "mine/x.py"))
    (tmp_path / "root/mine/x.py").unlink()
    with pytest.raises(SettingsError, match=r"mine/x\.py cannot be read \(No such file or directory\): leave it out"):
        write_archive(package, tmp_path / "x.zip")
    scandir = os.scandir

    def closed(path: Path) -> object:
        if Path(path).name == "mine":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(SettingsError, match=r"mine/ cannot be read \(Permission denied\)"):
        select(tmp_path / "root")
