"""Two file systems for tests, one like a disk and one like an object store, which call a hook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from pflsim.records.remote_copy.remote_folder import RemoteFolder

Ask = Callable[[str, str], None]


def nothing(what: str, path: str) -> None:
    """Do nothing."""


class Asked:
    """A hook that is called before and during each operation of a store; the store raises what it raises."""

    ask: Ask = staticmethod(nothing)


class Disk(LocalFileSystem):
    """Like a disk: a reader can see half a file, and files can be renamed."""

    protocol: ClassVar[Any] = "testdisk"
    cachable = False

    def put_file(self, path1: Any, path2: Any, callback: Any = None, **kwargs: Any) -> None:
        Asked.ask("put", path2)
        data = Path(path1).read_bytes()
        with open(path2, "wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            Asked.ask("half", path2)
            file.write(data[len(data) // 2 :])

    def mv(self, path1: Any, path2: Any, recursive: bool = True, **kwargs: Any) -> None:
        Asked.ask("mv", path2)
        super().mv(path1, path2, recursive, **kwargs)

    def rm_file(self, path: Any) -> None:
        Asked.ask("rm", path)
        super().rm_file(path)


class Store(MemoryFileSystem):
    """Like an object store: a file appears when its upload is complete."""

    protocol: ClassVar[Any] = "teststore"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("teststore://"))

    def put_file(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        Asked.ask("put", rpath)
        super().put_file(lpath, rpath, *args, **kwargs)
        Asked.ask("done", rpath)

    def rm_file(self, path: Any) -> None:
        Asked.ask("rm", path)
        super().rm_file(path)


def register() -> None:
    for kind in (Disk, Store):
        register_implementation(kind.protocol, kind, clobber=True)


def contents(url: str) -> dict[str, bytes]:
    """All files at a URL, hidden ones too."""
    remote = RemoteFolder(url)
    return {name: remote.read(name) for name in remote.files()}


def local_contents(folder: Path) -> dict[str, bytes]:
    """All files of a run folder but hidden ones."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {
        name.as_posix(): path.read_bytes()
        for name, path in found.items()
        if not any(part.startswith(".") for part in name.parts)
    }
