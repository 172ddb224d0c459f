"""Methods, partitions and data sets of installed packages, which declare them as entry points.

A package's pyproject.toml contains `[project.entry-points."pflsim.methods"]` and lines `NAME = "package.module:Class"`.
Then `method=NAME` works as a name of this project does.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

GROUPS = {"method": "pflsim.methods", "partition": "pflsim.partitions", "data": "pflsim.data"}


@cache
def provided() -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """Return the dotted name of the class or function, and the package with its version, by component and name.

    Nothing is imported. Two packages with one name: the one that Python finds first.
    """
    found: dict[str, dict[str, tuple[str, str]]] = {component: {} for component in GROUPS}
    for component, group in GROUPS.items():
        for each in entry_points(group=group):
            package = f"{each.dist.name} {each.dist.version}" if each.dist else each.module
            found[component].setdefault(each.name, (each.value.replace(":", ".").strip(), package))
    return found


def modules() -> set[str]:
    """Return the outermost modules of all that packages provide."""
    return {target.partition(".")[0] for names in provided().values() for target, _ in names.values()}
