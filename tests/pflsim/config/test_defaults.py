"""Every default, of the settings of a run and of each file in configs/: a change is seen in tests/defaults.yaml.

After a change that is meant: `python tests/pflsim/config/test_defaults.py` writes the file anew.
"""

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from pflsim.config.components import COMPONENTS, MISSING, settings_of, targets_of
from pflsim.config.compose import CONFIGS
from pflsim.config.settings import Settings

DEFAULTS = Path(__file__).resolve().parents[2] / "defaults.yaml"


def defaults() -> dict[str, Any]:
    """Return the defaults by group and option, those of a file above those of signatures; of experiments a hash."""
    found: dict[str, Any] = {
        "settings": asdict(Settings()),
        "config": yaml.safe_load((CONFIGS / "config.yaml").read_text()),
    }
    for file in sorted(CONFIGS.rglob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        if "experiment" in file.parts:
            found[f"{file.relative_to(CONFIGS)}"] = hashlib.sha256(text.encode()).hexdigest()[:12]
            continue
        group, node = file.parent.name, yaml.safe_load(text) or {}
        if group in COMPONENTS:
            known = settings_of(targets_of(node, group), group)
            node = {name: "required" if p.default == MISSING else p.default for name, p in known.items()} | node
        found[f"{group}={file.stem}"] = node
    return yaml.safe_load(yaml.safe_dump(found))  # with lists for tuples


def test_defaults_are_the_agreed_ones() -> None:
    agreed, found = yaml.safe_load(DEFAULTS.read_text(encoding="utf-8")), defaults()
    assert {key: value for key, value in found.items() if value != agreed.get(key)} == {}
    assert found.keys() == agreed.keys()


if __name__ == "__main__":
    DEFAULTS.write_text(yaml.safe_dump(defaults(), sort_keys=False), encoding="utf-8")
