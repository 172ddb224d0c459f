"""A penalty under which training would diverge is refused before the run starts, for every method."""

import re

import pytest
from support import prepared

from pflsim.errors import SettingsError


def refusal(*overrides: str) -> str:
    """The error of these settings, or an empty string."""
    try:
        prepared("model.hidden=[4]", "clients=4", "lr=0.1", "rounds=1", *overrides)
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("method", "setting", "limit"),
    [
        (["fedprox"], "method.mu", 20.0),
        (["ditto"], "method.lam", 20.0),
        (["fedamp", "method.alpha=10"], "method.lam", 200.0),
        (["pfedcfr", "method.alpha=10"], "method.lam", 200.0),
        (["pfedcfr"], "method.mu", 20.0),
        (["gpfl"], "method.mu", 20.0),
        (["feddyn"], "method.alpha", 20.0),
        (["pfedme", "method.personal_lr=0.5", "lr=0.001"], "method.lam", 4.0),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_a_penalty_that_diverges(method: list[str], setting: str, limit: float) -> None:
    """lr·c above 2, where c is μ, λ or λ/α; the error is one line with the setting, lr·c and its bound."""
    name, *given = method
    assert refusal(f"method={name}", *given, f"{setting}={0.99 * limit}") == ""
    said = refusal(f"method={name}", *given, f"{setting}={1.01 * limit}")
    assert re.search(rf"{re.escape(setting)}\S*=.*lr\S* = 2\.02 .*\b2\b.*lr=", said), said
    assert "\n" not in said


def test_momentum_counts() -> None:
    """Momentum 0.5 bears 3 for 2."""
    given = ["method=fedprox", "method.mu=6", "lr=0.4"]
    assert "at lr=0.4" in refusal(*given) and refusal(*given, "momentum=0.5") == ""


@pytest.mark.parametrize("method", ["fedamp", "pfedcfr"])
@pytest.mark.parametrize(("alpha", "sigma"), [("1e300", "1e-300"), ("1e300", "1e-8")])
def test_mixing_weights_beyond_all_numbers(method: str, alpha: str, sigma: str) -> None:
    """Also where only their sum over the clients is."""
    said = refusal(f"method={method}", "method.clamp=true", f"method.alpha={alpha}", f"method.sigma={sigma}")
    assert "method.alpha" in said and "method.sigma" in said and "not finite" in said
