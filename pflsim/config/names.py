"""Which name was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def shortened(value: object, most: int = 80) -> str:
    """A value as it is told in a message; the middle of a long one is left out."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 4 :]}"


def close_to(name: str, valid: Iterable[str], count: int = 3) -> list[str]:
    """The valid names most like a given one, the likeliest first; [] when none is near.

    A dotted name is also near one that ends like it: `alpha` is near `method.alpha`.
    """
    names = sorted(set(valid))
    last = name.rpartition(".")[2]
    same = [n for n in names if n.rpartition(".")[2] == last]
    spelled = get_close_matches(name, names, n=count, cutoff=0.6)
    ends: dict[str, list[str]] = {}
    for n in names:
        ends.setdefault(n.rpartition(".")[2], []).append(n)
    alike = [n for end in get_close_matches(last, ends, n=count, cutoff=0.7) for n in ends[end]]
    return list(dict.fromkeys([*same, *spelled, *alike]))[:count]


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of a message about an unknown name: the near ones, then all that are valid."""
    names = sorted(set(valid))
    near = close_to(name, names)
    asked = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{asked}valid: {', '.join(names) or 'none'}"


def unknown_key(key: str, keys: Iterable[str], groups: Iterable[str]) -> str:
    """The message about a dotted key that is no setting: what was meant, and what else there is beside it."""
    known = list(keys)
    near = close_to(key, [*known, *groups])
    part = key.partition(".")[0]
    beside = [k for k in known if k.startswith(f"{part}.") and not k.endswith("_")]
    asked = f" Did you mean {' or '.join(near)}?" if near else ""
    listed = f" The settings of {part}: {', '.join(beside)}." if beside else ""
    return f"{key}: no such setting.{asked}{listed} All settings: python launch.py --cfg job"
