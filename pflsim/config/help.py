"""What `python launch.py --help` says, put together from the config folders and the settings themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

from pflsim.config.signatures import find_source

COMMANDS = ("submit", "status", "logs", "stop", "fetch")
"""First words of a command line that is about a job on a cluster."""

TEXT = """pflsim: personalised federated learning, simulated. Every client trains its own model; the report
says how well each of them does.

usage: python launch.py [GROUP=NAME ...] [KEY=VALUE ...] [options]

Groups (GROUP=NAME takes the file configs/GROUP/NAME.yaml):
{groups}

Settings with their defaults:
{settings}
  A part's own settings are written after its group: method.alpha=0.5, data.root=DIR. `--cfg job` shows those of the
  parts that are chosen: python launch.py method=fedprox data=mnist --cfg job

A run that was stopped, or failed, goes on where it was saved, with the same result:
  python launch.py resume=last              the run below runs/ that was started last; or resume=FOLDER

On a cluster (each has its own --help):
  python launch.py submit [options] [GROUP=NAME ...] [KEY=VALUE ...]    run there what would run here, as a job
  python launch.py status [ID], logs ID, stop ID, fetch ID [FOLDER]     see, follow and stop it, bring its run back

Options:
  -m, --multirun      run every combination of comma-separated values, one after the other
  --config-dir DIR    look for groups in DIR too (DIR/method/mine.yaml is method=mine); may be repeated
  --cfg job           print the whole config and stop; --resolve fills in the ${{...}}
  -h, --help          print this

Examples:
  python launch.py                                              pFedCFR on handwritten digits, 10 clients, 20 rounds
  python launch.py method=fedavg clients=20 rounds=50 lr=0.05   another method, on more clients
  python launch.py data=mnist data.root=DIR model=dnn           data from files
  python launch.py -m method=local,fedavg,pfedcfr seed=0,1,2    nine runs
  python launch.py +experiment=pfedcfr_table2_mnist             a table of a paper
"""


def usage(folders: Iterable[Path]) -> str:
    """The help text, with what the config folders offer."""
    return TEXT.format(groups=_groups(list(folders)), settings="\n".join(_settings("Settings", "")))


def groups_in(folders: Iterable[Path]) -> dict[str, list[str]]:
    """The config groups and their names, as files on disk."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(found.items())}


def _groups(folders: Sequence[Path]) -> str:
    found = groups_in(folders)
    first = [g for g in ("method", "data", "partition", "split", "model", "placement") if g in found]
    lines = []
    for group in [*first, *(g for g in found if g not in first)]:
        extra = "" if group in first else "+"
        lines.append(f"  {extra + group:<11} {', '.join(found[group])}")
    return "\n".join(lines)


def _settings(name: str, prefix: str) -> list[str]:
    """A line for each field of a settings class: key, default and what its docstring says."""
    source = find_source("pflsim.config.settings")
    assert source is not None
    body = next(s.body for s in source.tree.body if isinstance(s, ast.ClassDef) and s.name == name)
    lines = []
    for field, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        kind, key = ast.unparse(field.annotation), prefix + field.target.id
        if kind.startswith("dict"):
            continue
        if isinstance(field.value, ast.Call) and kind[0].isupper():
            lines += _settings(kind, f"{key}.")
            continue
        about = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        lines.append(f"  {key + '=' + _default(field.value):<32} {about}".rstrip())
    return lines


def _default(value: ast.expr | None) -> str:
    if not isinstance(value, ast.Constant):
        return "[]"
    return "null" if value.value is None else str(value.value)
