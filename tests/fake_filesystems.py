"""A file system for tests, like an object store, which calls a hook."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from pflsim.records.remote import RemoteCopy

Ask = Callable[[str, str], None]


def nothing(what: str, path: str) -> None:
    """Do nothing."""


class Asked:
    """A hook that is called before and after each operation of the store; the store raises what it raises."""

    ask: Ask = staticmethod(nothing)


class Store(MemoryFileSystem):
    """Like an object store: a file appears when its upload is complete."""

    protocol: ClassVar[Any] = "teststore"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("teststore://"))

    def pipe_file(self, path: Any, value: Any, mode: Any = "overwrite", **kwargs: Any) -> None:
        Asked.ask("put", path)
        super().pipe_file(path, value, mode, **kwargs)
        Asked.ask("done", path)

    def rm_file(self, path: Any) -> None:
        Asked.ask("rm", path)
        super().rm_file(path)


def register() -> None:
    register_implementation(Store.protocol, Store, clobber=True)


def contents(url: str) -> dict[str, bytes]:
    """All files at a URL but hidden ones."""
    remote = RemoteCopy(url, Path())
    return {name: remote.read(name) for name in remote.files()}


def local_contents(folder: Path) -> dict[str, bytes]:
    """All files of a run folder but hidden ones."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {
        name.as_posix(): path.read_bytes()
        for name, path in found.items()
        if not any(part.startswith(".") for part in name.parts)
    }
