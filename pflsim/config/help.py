"""pflsim simulates personalised federated learning: each client trains its own model.

Usage:
  {program} [GROUP=NAME ...] [KEY=VALUE ...] [options]    run an experiment
  {program} resume=last                                   continue the latest run below runs/, or resume=FOLDER;
                                                          with changed_code=true, also after changes of your own code
  {program} COMMAND --help                                describe one of the commands below

Examples:
  {program}                                               pFedCFR on handwritten digits, 10 clients, 20 rounds
  {program} method=fedavg clients=20 rounds=50 lr=0.05    another method and more clients
  {program} data=mnist data.root=DIR model=dnn            data from files in DIR
  {program} -m method=local,fedavg,pfedcfr seed=0,1,2     nine runs
  {program} model=mine.TinyCNN model.width=8              a torch module of mine.py in the working directory
  {program} +experiment=pfedcfr_table2_mnist              a table of a paper
  {program} +experiment=pfedcfr_table2_mnist quick=true   the same, scaled down to minutes
  {program} compare runs                                  the results of all runs below runs/, as a table

Options:
  -m, --multirun      run all combinations of comma-separated values
  --config-dir DIR    look for groups in DIR too: DIR/method/mine.yaml is method=mine; may be repeated
  --cfg job           print the whole config and exit; --resolve replaces ${{...}} by its value
  -h, --help          print this help

Commands that run many experiments:
  probe               find out whether clients should train alone, together, in groups or with personal models
  leave-out           hold out each client once, and judge models on it: leave-out method=fedavg data=table ...
  tune                tune methods with equal budgets on validation data, then compare them: tune method=local,ditto

Commands that read run folders:
  compare             print the results of several runs as a table, with differences and intervals
  report              write an HTML report of one or more runs
  figures             draw figures for a paper, with LaTeX tables of their numbers
  export              write trained models as programs of torch.export and as safetensors
  predict             apply a trained model to new rows: predict RUN rows.csv --client north --out predictions.csv

Commands without a run:
  baselines           fit regressions to a table, or evaluate an untrained language model, beside runs
  partition           write and draw the partition of some settings: partition data=mnist clients=20 into=FOLDER
  check-method        check that a method keeps its contract: check-method mine.moon

Commands for a cluster:
  submit              run an experiment on a Ray cluster, as a job; see `ray job --help` for its state and log

Groups (GROUP=NAME selects configs/GROUP/NAME.yaml):
{groups}

Settings and their defaults (KEY=VALUE):
{settings}

Settings of the selected components are written as GROUP.KEY, for example method.mu=0.1 or data.root=DIR.
List them with: {program} method=fedprox data=mnist --cfg job
"""

import ast
import inspect
import textwrap
import typing
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pflsim.config.names import program, written
from pflsim.config.plugins import provided
from pflsim.config.settings import Settings

GROUPS = (
    *("method", "data", "shift", "partition", "split", "model", "uplink", "attack", "aggregator", "privacy"),
    *("task", "optimizer", "server_optimizer", "placement"),
)
"""Groups in the order of the help; the others need a +."""


def usage(folders: Iterable[Path]) -> str:
    """Return the help text, with the groups that the config folders contain."""
    lines = [f"  {f'{key}={written(value)}':<32} {about}" for key, value, about in documented(Settings())]
    groups = "\n".join(_groups(groups_in(folders)))
    return str(__doc__).format(program=program(), groups=groups, settings="\n".join(lines))


def groups_in(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return the config groups and the names in each, with those of installed packages."""
    found: dict[str, set[str]] = {component: {*names} for component, names in provided().items()}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(found.items())}


def documented(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield key, default and help text of every setting of a run."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(type(settings))).body[0]).body
    texts: dict[str, str] = {}
    for statement, after in zip(body, body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                texts[name] = text
    for f in fields(settings):
        value = getattr(settings, f.name)
        if is_dataclass(value):
            yield from documented(value, f"{prefix}{f.name}.")
        elif prefix or not isinstance(value, dict):  # without a prefix, components have their own tables
            yield prefix + f.name, value, texts.get(f.name, "")


def _groups(found: dict[str, list[str]]) -> Iterator[str]:
    for group in [*(g for g in GROUPS if g in found), *(g for g in found if g not in GROUPS)]:
        name = group if group in GROUPS else f"+{group}"
        yield textwrap.fill(", ".join(found[group]), 110, initial_indent=f"  {name:<17}", subsequent_indent=" " * 19)
