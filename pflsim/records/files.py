"""Writes files so that readers never see incomplete content, and checks the types of what is read back."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from pflsim.errors import reading

FORM = "a file that a run has written"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a temporary file in the same folder, fsync it, and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path, kind: Any) -> dict[str, Any]:
    """Read a JSON file that a run has written, and check its type, see `keys`.

    Raises:
        SettingsError: it cannot be read, or is damaged; names the file.
    """
    with reading(path, FORM):
        content = json.loads(path.read_text(encoding="utf-8"))
        valid(kind, content)
    return content


def keys(types: dict[str, Any]) -> Any:
    """Return the type of a mapping that has these keys, for `valid`; it may have more keys."""
    return TypedDict("keys", types)  # type: ignore


def valid(kind: Any, value: Any) -> Any:
    """Return JSON values as a type, which pydantic checks strictly; NaN is a float.

    Raises:
        ValueError: the value, or a part of it, has another type or is missing.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))) from None


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
