"""The values of trials, by Optuna."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from pflsim.commands.tune.space import Dimension, Range, Space, untried
from pflsim.errors import SettingsError

DIGITS = 4
"""Significant digits of real numbers, so that a table can show the values that ran."""


def check_installed() -> None:
    """Check that Optuna can be imported.

    Raises:
        SettingsError: it is not installed.
    """
    if find_spec("optuna") is None:
        raise SettingsError("tune needs the package optuna: pip install 'pflsim[tune]'")


def suggest(
    space: Space, tried: Sequence[tuple[Mapping[str, Any], float | None]], count: int, seed: int
) -> list[dict[str, Any]]:
    """Suggest points of a space, by Optuna's tree-structured Parzen estimator (TPE); the first ten are random.

    The result depends on the arguments only.

    Args:
        space: to search.
        tried: earlier points, with the value to maximise; None if it is unknown.
        count: how many; fewer if a finite space is exhausted.
        seed: of the sampler.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed % 2**32))
    distributions = {key: _distribution(found) for key, found in space.items()}
    for point, value in tried:
        if value is None:
            continue
        with suppress(ValueError):  # the defaults may be outside
            values = {key: _index(found, point[key]) for key, found in space.items()}
            study.add_trial(optuna.create_trial(params=values, distributions=distributions, value=value))
    seen, found = [dict(point) for point, _ in tried], list[dict[str, Any]]()
    for _ in range(count):
        asked = study.ask(distributions).params
        point = {key: _value(dimension, asked[key]) for key, dimension in space.items()}
        if point in seen and (point := untried(space, seen)) is None:
            break
        seen.append(point)
        found.append(point)
    return found


def _distribution(found: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(found, Range):
        return CategoricalDistribution(tuple(range(len(found))))
    return (IntDistribution if found.whole else FloatDistribution)(found.low, found.high, log=found.log)  # type: ignore[arg-type]


def _index(found: Dimension, value: Any) -> Any:
    """Return a value as Optuna has it: of choices, the index."""
    return value if isinstance(found, Range) else found.index(value)


def _value(found: Dimension, index: Any) -> Any:
    if not isinstance(found, Range):
        return found[index]
    return index if found.whole else min(max(float(f"{index:.{DIGITS}g}"), found.low), found.high)
