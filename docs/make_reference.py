"""Writes docs/reference.md, the table of all settings and components: `make docs`.

Everything on the page comes from dataclasses, signatures, docstrings and YAML files, and from docs/refusals.json, for
which new methods are tried as by `check-method`; `python docs/make_reference.py --refusals` tries all, in minutes.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pflsim.config.components import COMPONENTS, resolve, settings_of, targets_of
from pflsim.config.compose import CONFIGS
from pflsim.config.help import documented
from pflsim.config.names import written
from pflsim.config.settings import Settings
from pflsim.tasks.task import LOSSES

PAGE = Path(__file__).with_name("reference.md")
REFUSALS = Path(__file__).with_name("refusals.json")
"""What each method refuses, and why; tests/support.py::check_contract compares it with the methods."""
METHODS = sorted(file.stem for file in (CONFIGS / "method").glob("*.yaml"))
TAKEN = {
    "uplink": "uplink", "attack": "attack on messages", "aggregator": "aggregator", "privacy=client": "privacy=client",
    "privacy=example": "privacy=example",
}  # fmt: skip
"""Heads of the columns of `REFUSALS`."""
VARIANTS = "A list of settings that replace those of this model; client i gets entry i modulo its length."
COMMON = "The net that fml and fedmrl train beside this model: settings that replace its own, or those of a `_target_`."
BINS = "With regression, the number of quantiles of the first target that take the place of classes."
DEFAULTS = ChainMap(
    *(entry for entry in yaml.safe_load((CONFIGS / "config.yaml").read_text())["defaults"] if entry != "_self_")
)
INTRODUCTION = """# Reference

All settings and components. `make docs` writes this page from signatures, docstrings and the files in `configs/`.

`KEY=VALUE` on the command line changes a setting, `GROUP=NAME` selects a component, and `GROUP.KEY=VALUE` changes a
setting of the selected component: `python launch.py method=fedprox method.mu=0.1 clients=20`.
"""
LEGEND = """Tasks, and components other than `none`. `python launch.py check-method METHOD` says why a method refuses
one. Attacks on data (`label_flip`, `random_labels`, `backdoor`) work with every method that predicts classes.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION, "## Run settings\n", "| setting | default | meaning |\n|---|---|---|"]
    parts += [_row(f"`{key}`", f"`{written(value)}`", text) for key, value, text in documented(Settings())]
    for group in COMPONENTS:
        parts += [f"\n## {group.capitalize()}\n"]
        if group == "method":
            parts += ["The settings of a method are on its page.\n\n| `method=` | meaning |\n|---|---|"]
        else:
            parts += [f"| `{group}=` | setting | default | meaning |\n|---|---|---|---|"]
        for file in sorted((CONFIGS / group).glob("*.yaml")):
            parts += _component(group, file)
    parts += ["\n## What methods take\n", LEGEND, f"| `method=` | {' | '.join([*LOSSES, *TAKEN.values()])} |"]
    parts += ["|---" * (1 + len(LOSSES) + len(TAKEN)) + "|"]
    refused = json.loads(REFUSALS.read_text(encoding="utf-8"))
    for file in sorted((CONFIGS / "method").glob("*.yaml")):
        client: Any = resolve(targets_of(yaml.safe_load(file.read_text(encoding="utf-8")), "method")["client"])
        can = [task == "classification" or not client.needs_classes for task in LOSSES if task != "language_model"]
        can.append("token_targets" in vars(client))
        can += [what not in refused[file.stem] for what in TAKEN]
        parts.append(_row(f"`{file.stem}`", *("yes" * each for each in can)))
    return "\n".join(parts) + "\n"


def _component(group: str, file: Path) -> Iterator[str]:
    """Yield the rows of a component: what it is, then its settings."""
    text = file.read_text(encoding="utf-8")
    node = yaml.safe_load(text)
    targets = targets_of(node, group)
    docstrings = [_docstring(target) for target in targets.values()]
    about = docstrings[0].partition("\n\n")[0] + " " + " ".join(re.findall(r"^# ?(.*)", text, re.MULTILINE))
    name = f"[`{file.stem}`](methods/{file.stem}.md)" if group == "method" else f"`{file.stem}`"
    name = f"{name} (default)" if file.stem == DEFAULTS.get(group) else name
    if group == "method":  # its page has a table of its settings
        yield _row(name, about)
        return
    yield _row(name, "", "", about)
    meanings = {"variants": VARIANTS, "common": COMMON, "bins": BINS}
    for docstring in reversed(docstrings):
        meanings |= _arguments(docstring)
    for key, parameter in settings_of(targets, group, ["common"] if group == "model" else []).items():
        yield _row("", f"`{group}.{key}`", f"`{written(node.get(key, parameter.default))}`", meanings.get(key, ""))


def _docstring(target: str) -> str:
    module, _, name = target.rpartition(".")
    return inspect.getdoc(getattr(importlib.import_module(module), name)) or ""


def _arguments(docstring: str) -> dict[str, str]:
    """Return the texts of a docstring's Args section by argument."""
    _, _, section = docstring.partition("\nArgs:\n")
    section = re.split(r"\n\n\S", section)[0]
    return dict(re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE))


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def write_refusals(known: Mapping[str, Any]) -> None:
    """Try the methods of which nothing is known, and write `REFUSALS`."""
    import logging

    from lightning_modules.contract.checks import refusals
    from lightning_modules.contract.command import maker

    logging.disable(logging.WARNING)  # what a method refuses fails in its clients
    found = {}
    for name in METHODS:
        make = maker(name, ["lora={r: 16}"] * name.endswith("lora"), [CONFIGS])
        own = known[name] if name in known else refusals(make)
        found[name] = {what: why for what, why in own.items() if why}
    REFUSALS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    known = {} if "--refusals" in sys.argv[1:] else json.loads(REFUSALS.read_text(encoding="utf-8"))
    if {*METHODS} != {*known}:
        write_refusals(known)
    PAGE.write_text(page(), encoding="utf-8")
