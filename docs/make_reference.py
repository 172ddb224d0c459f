"""Writes docs/reference.md, the table of all settings and components: `make docs`.

Everything on the page comes from dataclasses, signatures, docstrings and YAML files.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path

import yaml

from pflsim.config.components import COMPONENTS, resolve, settings_of, targets_of
from pflsim.config.compose import CONFIGS
from pflsim.config.help import documented
from pflsim.config.names import written
from pflsim.config.settings import Settings
from pflsim.tasks.task import LOSSES

PAGE = Path(__file__).with_name("reference.md")
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
    parts += ["\n## Method and task\n", f"| `method=` | {' | '.join(LOSSES)} |", "|---" * (1 + len(LOSSES)) + "|"]
    for file in sorted((CONFIGS / "method").glob("*.yaml")):
        client = resolve(targets_of(yaml.safe_load(file.read_text(encoding="utf-8")), "method")["client"])
        can = ["yes" if task == "classification" or not client.needs_classes else "" for task in LOSSES]  # type: ignore
        parts.append(_row(f"`{file.stem}`", *can))
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
