"""Methods, partitions and data sets of installed packages, which declare them as entry points.

A package's pyproject.toml contains `[project.entry-points."pflsim.methods"]` and lines `NAME = "package.module:Class"`.
Then `method=NAME` works as a name of this project does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

GROUPS = {"method": "pflsim.methods", "partition": "pflsim.partitions", "data": "pflsim.data"}


@dataclass(frozen=True, slots=True)
class Plugin:
    """What a package provides under a name.

    Args:
        target: dotted name of the class or function.
        package: the package's name.
        version: its version.
    """

    target: str
    package: str
    version: str


@cache
def provided() -> Mapping[str, Mapping[str, Sequence[Plugin]]]:
    """Return what packages provide, by component and name; several if packages share a name. Nothing is imported."""
    found: dict[str, dict[str, list[Plugin]]] = {component: {} for component in GROUPS}
    for component, group in GROUPS.items():
        for each in entry_points(group=group):
            name, version = (each.dist.name, each.dist.version) if each.dist else (each.module, "")
            plugin = Plugin(f"{each.module}.{each.attr}", name or each.module, version or "")
            known = found[component].setdefault(each.name, [])
            known += [plugin] * (plugin not in known)
    return found


def plugins() -> list[Plugin]:
    """Return all that packages provide."""
    return [plugin for names in provided().values() for each in names.values() for plugin in each]
