"""Checks of values: the types of settings, and what constructors check by themselves."""

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, Lt

from pflsim.config.names import shortened, written
from pflsim.errors import SettingsError

Number = TypeVar("Number", int, float)
TYPES = {"int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "text"}
TYPES |= dict.fromkeys(("list_type", "tuple_type"), "a list") | {"dict_type": "a mapping"}
"""What pydantic expects, by the type of its error."""
CONFIGURATION = "set credentials and options in fsspec's configuration: environment variables or ~/.config/fsspec"


Width = Annotated[int, Ge(1), Le(1_000_000)]
"""The type of a setting with its bounds, which pydantic checks; as the next ones."""
Widths = Sequence[Width]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Gt(0), Lt(1)]
Portion = Annotated[float, Gt(0), Le(1)]
Chance = Annotated[float, Ge(0), Lt(1)]


def bounded(name: str, value: Number, least: float, most: float = math.inf) -> Number:
    """Return a value whose bounds depend on the run; those of other settings are in annotations.

    Args:
        name: key of the setting, for the message.
        value: number to check.
        least: lower bound, inclusive.
        most: upper bound, inclusive.

    Raises:
        SettingsError: the value is outside the bounds, infinite or NaN.
    """
    if not (least <= value <= most and math.isfinite(value)):
        above = f" and <= {most}" if math.isfinite(most) else ""
        raise SettingsError(f"{name}={value}: expected a number >= {least}{above}")
    return value


def stable_penalty(name: str, value: float, lr: float, momentum: float = 0.0, rate: str = "lr") -> float:
    """Return the strength c of a penalty c/2·‖w − a‖² after checking that SGD converges on it.

    A step multiplies w − a by 1 − lr·c. If lr·c exceeds 2·(1 + momentum), the distance grows with every step and
    training ends in NaN.

    Args:
        name: key of the setting.
        value: c.
        lr: highest learning rate of the run.
        momentum: momentum of SGD.
        rate: key of the learning rate.

    Raises:
        SettingsError: c is negative or not finite, or lr·c exceeds the bound.
    """
    bounded(name, value, 0)
    bound = 2 * (1 + momentum)
    if lr * value > bound:
        raise SettingsError(
            f"{name}={value:.6g} makes training diverge: {rate}*{name} = {lr * value:.4g} is above {bound:g}, "
            f"the limit of SGD; at {rate}={lr:.4g} use at most {bound / lr:.4g}"
        )
    return value


def checked(key: str, kind: Any, value: Any) -> Any:
    """Return a value as the type of its setting: 1 becomes 1.0 where the setting is a float, nothing else is converted.

    Args:
        key: dotted name of the setting, for the message.
        kind: the annotation of the setting; bounds are those of `annotated_types` or pydantic.
        value: as a YAML file gives it; a list is valid for a tuple.

    Raises:
        SettingsError: the value does not fit; the message says what does.
    """
    from pydantic import ValidationError

    try:
        return validator(kind).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        texts = dict.fromkeys(_expected(each["type"], each["msg"], each["loc"]) for each in error.errors())
        form = f": {key}=[{written(value)}]" if "a list" in texts and isinstance(value, str | int | float) else ""
        raise SettingsError(f"{key}={shortened(value)}: expected {' or '.join(texts)}{form}") from None


def _expected(kind: str, message: str, place: Sequence[int | str]) -> str:
    """Return what a message of pydantic asks for: `module, tensor or model`, `a number greater than 0 in item 2`."""
    text = TYPES.get(kind) or message.removeprefix("Input should be ").replace("'", "")
    items = [f" in item {number}" for number in place if isinstance(number, int)]
    return f"{'a number ' * text.startswith(('less', 'greater'))}{text}{''.join(items[:1])}"


@lru_cache(maxsize=1024)
def validator(kind: Any) -> Any:
    """Return the validator of a type. Values are JSON, whose lists are valid for tuples in pydantic's strict mode."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def is_url(text: str | None) -> bool:
    """Return whether this is a URL rather than a folder."""
    return text is not None and "://" in text


def check_no_password(url: str, key: str = "resume") -> None:
    """Check a URL without printing it.

    Raises:
        SettingsError: it contains a password.
    """
    try:
        secret = any(urlsplit(part).password is not None for part in url.split("::"))
    except ValueError:  # not a standard URL; fsspec checks it
        return
    if secret:
        raise SettingsError(f"{key}= contains a password, which config.yaml would store; remove it: {CONFIGURATION}")
