"""Values, keys and commands in messages, and suggestions for names that do not exist."""

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from os import PathLike
from pathlib import Path, PurePath

PACKAGES = ("pflsim", "lightning_modules", "ray_actors")
FOLDER = Path(__file__).resolve().parents[2]
"""The folder that contains the packages: a clone, or site-packages."""
COMMANDS = {
    ("launch.py",): "python launch.py", ("pflsim", "__main__.py"): "python -m pflsim", ("pflsim",): "pflsim",
}  # fmt: skip
"""The ends of a script's path, and how its user writes it."""
PLAIN = re.compile(r"[\w./:+-]+", re.ASCII)
OTHER = re.compile(r"null|true|false|[+-]?(inf|nan|[\d._]+(e[+-]?\d+)?)", re.I)
"""What the command line reads as text without quotes, and what it reads as something else."""
MOST = 2000
"""Characters of a list of valid names; a table can have thousands of columns."""
MEANT = {
    "learning_rate": "lr", "on": "clients", "optim": "optimizer", "scheduler": "lr_schedule", "dataset": "data",
    "by_writer": "by_client", "writers_per_client": "ids_per_client",
}  # fmt: skip
"""Names of other programs and earlier versions to what they are called here."""


def program() -> str:
    """Return how the user starts pflsim, for commands in messages: `pflsim` or `python launch.py`, for example."""
    return started_as(sys.argv[0]) or "pflsim"


def started_as(script: str) -> str | None:
    """Return the command that runs a script; None if it is not a script of pflsim.

    Args:
        script: its path, as in `sys.argv[0]`.
    """
    parts = PurePath(script).parts
    return next((command for end, command in COMMANDS.items() if parts[-len(end) :] == end), None)


def shortened(value: object) -> str:
    """Return a value for a message, as YAML writes it; a long one loses its middle."""
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 80 else f"{text[:40]}...{text[-20:]}"


def some(words: Iterable[object], most: int = 3) -> str:
    """Return the first of some words, each once."""
    found = [*dict.fromkeys(map(_in_list, words))]
    return ", ".join(found[:most]) + ", ..." * (len(found) > most)


def _in_list(word: object) -> str:
    """Return a word as it stands between commas: with quotes if it has a comma itself, such as `Smith, J`."""
    return f"'{word}'" if ", " in str(word) else str(word)


def written(value: object) -> str:
    """Return a value as the command line expects it: `[1,2]`, `{a:1}`, `null`, `true`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    return f"[{','.join(map(written, value))}]" if isinstance(value, list | tuple) else str(value)


def as_value(value: object) -> str:
    """Return a value as `written` does, with quotes around text that the command line reads as something else."""
    if isinstance(value, str | PathLike) and (not PLAIN.fullmatch(text := str(value)) or OTHER.fullmatch(text)):
        return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + "'"
    return f"[{','.join(map(as_value, value))}]" if isinstance(value, list | tuple) else written(value)


def pasted(key: str, value: object) -> str:
    """Return `key=value` for a message, as it can be pasted into a shell."""
    text = f"{key}={as_value(value)}"
    if "'" in text and not set(text) & set('"$`\\!'):
        return f'"{text}"'
    return shlex.quote(text) if re.search(r"[^\w./:+=,\[\]-]", text) else text


def listed(words: Sequence[str]) -> str:
    """Join words: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def close_to(name: str, valid: Iterable[str]) -> list[str]:
    """Return at most three valid names that are most similar to a name, best first; [] if there are none.

    Their last parts are compared, so `alpha` is similar to `method.alpha`.
    """
    last, ends = name.rpartition(".")[2], dict[str, list[str]]()
    for known in sorted(set(valid), key=lambda known: (known.partition(".")[0] != name.partition(".")[0], known)):
        ends.setdefault(known.rpartition(".")[2], []).append(known)
    near = [MEANT[last]] if last in MEANT else dict.fromkeys([last, *get_close_matches(last, ends)])
    return [known for end in near for known in ends.get(end, [])][:3]


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the similar names, then all valid ones."""
    names = sorted({*valid} - {""})
    near = close_to(name, names)
    asked = f"did you mean {' or '.join(map(_in_list, near))}? " if near else ""
    text = ", ".join(map(_in_list, names)) or "none"
    return f"{asked}valid: {text[:MOST]}{' ...' * (len(text) > MOST)}"


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the message about a key that is no setting.

    Args:
        key: dotted.
        known: the keys of all settings, and the names of groups.
    """
    known = list(known)
    near, group = close_to(key, known), key.partition(".")[0]
    inside = [name for name in known if name.startswith(f"{group}.") and not name.endswith("_")]
    asked = f" Did you mean {' or '.join(near)}?" if near else ""
    listed = f" The settings of {group}: {', '.join(inside)}." if inside else ""
    return f"{key}: no such setting.{asked}{listed} All settings: {program()} --cfg job"
