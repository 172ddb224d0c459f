"""What is wrong with the overrides of a command line, for someone who knows neither Hydra nor OmegaConf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hydra import compose
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from pflsim.config.names import nearest, unknown_key
from pflsim.errors import SettingsError

ConfigError = HydraException, OmegaConfBaseException


def check_groups(overrides: Sequence[Override], groups: Mapping[str, Sequence[str]], configs: Path) -> None:
    """Refuse a choice that no file offers.

    Args:
        overrides: of the command line.
        groups: the names in each of them.
        configs: the folder of config.yaml, whose defaults list the groups that need no +.

    Raises:
        SettingsError: with the names that there are, the near ones first.
    """
    for override in overrides:
        group = override.key_or_group
        if override.is_delete() and group not in groups:
            raise SettingsError(f"{override.input_line}: a setting cannot be taken away; leave it out for its default")
        if group not in groups or override.is_sweep_override():
            continue
        name, line = override.value(), override.input_line
        if not isinstance(name, str) or name not in groups[group]:
            raise SettingsError(f"{line}: there is no {group} of that name; {nearest(str(name), groups[group])}")
        if group not in _chosen(configs) and not (override.is_add() or override.is_force_add()):
            raise SettingsError(f"{line}: write +{group}={name}, as {group} is not among the defaults")


def explain(overrides: Sequence[Override], error: Exception, groups: Mapping[str, Sequence[str]]) -> str:
    """Say what is wrong with the overrides, each tried alone on top of the chosen groups."""
    chosen = [str(o.input_line) for o in overrides if o.key_or_group in groups]
    try:
        base = compose("config", chosen)
    except ConfigError as inner:
        return _message(inner)
    found = []
    for override in overrides:
        if override.key_or_group in groups:
            continue
        try:
            compose("config", [*chosen, str(override.input_line)])
        except ConfigError as alone:
            found.append(_about(override, alone, base, groups))
    return "\n".join(found) if found else _message(error)


def _about(override: Override, error: Exception, base: DictConfig, groups: Mapping[str, Sequence[str]]) -> str:
    """What is wrong with one override."""
    key, cause = override.key_or_group, error.__cause__ or error
    if not isinstance(cause, ConfigKeyError | ConfigAttributeError):
        if not isinstance(cause, OmegaConfBaseException):
            return _message(error)
        before = OmegaConf.select(base, key, throw_on_missing=False)
        now = "" if before is None else f" (without it: {key}={before})"
        return f"{override.input_line}: {_in_plain_words(first_line(cause), key, override)}{now}"
    return unknown_key(key, list(_keys(base, "")), groups)


def _in_plain_words(text: str, key: str, override: Override) -> str:
    """OmegaConf's commonest complaints, said to someone who does not know OmegaConf."""
    if "is not a ListConfig, list or tuple" in text or "to Sequence" in text:
        return f"expected a list: {key}=[{override.value()}]"
    if "not Optional" in text:
        return "null is no value here; leave it out for its default"
    for name, kind in (("Integer", "a whole number"), ("Float", "a number"), ("Boolean", "true or false")):
        if text.endswith(f"could not be converted to {name}"):
            return f"expected {kind}"
    return text


def _keys(config: DictConfig, prefix: str) -> Iterator[str]:
    """The dotted keys of all values."""
    for key in config:
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_missing() and not node._is_none():
            yield from _keys(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _chosen(configs: Path) -> tuple[str, ...]:
    """The groups of the defaults list."""
    entries = OmegaConf.load(configs / "config.yaml").defaults
    return tuple(str(key) for entry in entries if isinstance(entry, DictConfig) for key in entry)


def _message(error: Exception) -> str:
    """Hydra's message with the cause's, without what only a programmer reads."""
    texts = [str(error), *([str(error.__cause__)] if isinstance(error.__cause__, OmegaConfBaseException) else [])]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith(("object_type=", "reference_type=")))


def first_line(error: Exception) -> str:
    """What an error says first."""
    return str(error).partition("\n")[0]
