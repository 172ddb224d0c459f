"""How hard a proximal term may pull."""

import math
from typing import Any, get_args

import pytest
import yaml
from annotated_types import Ge, Gt
from support import refusing

from pflsim.config.components import COMPONENTS, MISSING, check_component, settings_of, targets_of
from pflsim.config.compose import CONFIGS
from pflsim.config.validate import Chance, Positive, Widths, bounded, checked, stable_penalty
from pflsim.errors import SettingsError


def distance(pull: float, lr: float, momentum: float, steps: int = 2000) -> float:
    """|w − a| after SGD on c/2·(w − a)², from 1."""
    gap, velocity = 1.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + pull * gap
        gap -= lr * velocity
    return abs(gap)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("lr", [0.01, 0.5])
def test_the_bound_is_where_training_diverges(lr: float, momentum: float) -> None:
    bound = 2 * (1 + momentum) / lr
    assert stable_penalty("method.mu", 0.99 * bound, lr, momentum) == 0.99 * bound
    assert distance(0.99 * bound, lr, momentum) < 1
    with pytest.raises(SettingsError, match=r"method\.mu=.*lr\*method\.mu = .* lr=.* at most"):
        stable_penalty("method.mu", 1.01 * bound, lr, momentum)
    assert distance(1.01 * bound, lr, momentum) > 1e6


def test_what_is_off_is_never_refused() -> None:
    assert stable_penalty("method.mu", 0.0, math.inf) == 0
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(SettingsError, match=r"method\.mu"):
            stable_penalty("method.mu", value, 0.1)


def test_bounds() -> None:
    assert bounded("a", 0.5, 0) == 0.5 and bounded("a", 2, 1, 2) == 2
    for value in (0, 3, math.nan, math.inf, -math.inf):
        with refusing(f"method.a={value}: expected", ">= 1", "<= 2"):
            bounded("method.a", value, 1, 2)
    with refusing("a=inf", ">= 0"):
        bounded("a", math.inf, 0)
    for kind, value, least in ((Widths, [3, 0], "1 in item 1"), (Positive, 0.0, "0"), (Chance, -0.1, "0")):
        with pytest.raises(SettingsError, match=f"expected a number greater than (or equal to )?{least}$"):
            checked("method.a", kind, value)


def invalid(kind: Any) -> Any:
    """A value that a setting with this annotation does not accept; None if it accepts all."""
    for part in (kind, *get_args(kind)):
        for bound in getattr(part, "__metadata__", ()):
            if isinstance(bound, Ge | Gt):
                return bound.ge - 1 if isinstance(bound, Ge) else bound.gt
    return None if kind in (None, Any) or "dict" in str(kind) or "Mapping" in str(kind) else {"not": "valid"}


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_setting_of_every_component_is_checked(component: str) -> None:
    """A value below the bound of its annotation, or of another type."""
    for path in sorted((CONFIGS / component).glob("*.yaml")):
        node = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key != "search"}
        node = {key: value for key, value in node.items() if "${" not in str(value) and value != MISSING}
        known = settings_of(targets_of(node, component), component, node)
        required = {key: parameter.annotation for key, parameter in known.items() if parameter.default == MISSING}
        given = {
            key: [[1]] if "list" in str(kind) else 0.5 if "Lt(" in str(kind) else "text" if kind is str else 1
            for key, kind in required.items()
        }
        node = given | node
        for name, parameter in known.items():
            if (value := invalid(parameter.annotation)) is not None:
                with pytest.raises(SettingsError, match=f"{component}.{name}="):
                    check_component({**node, name: value}, component)
