"""Compose the settings of a run from the config files and the command line, and run it: `python launch.py --help`.

The only file that knows Hydra. A YAML file of a part names its target; here it is laid over a schema read from the
target's signature, so that unknown keys and wrong types are refused while the config is composed, before anything is
imported.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from pflsim.annotations import misfit
from pflsim.components import PARTS, SIDES, TARGET, settings_of, targets_of
from pflsim.errors import RunError, SettingsError
from pflsim.interrupts import Stopped
from pflsim.names import nearest, shortened, unknown_key
from pflsim.plain import settings_from
from pflsim.settings import Settings
from pflsim.streams import let_go
from pflsim.usage import COMMANDS, groups_in, usage

CONFIGS = Path(__file__).resolve().parent / "configs"
ConfigError = HydraException, OmegaConfBaseException
RESUME = "resume="


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says.

    Returns:
        The exit status: 1, a run failed; 2, the settings are wrong; 128 + n, signal n has stopped it.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in COMMANDS:
        from ray_actors.jobs.command import run

        return run(words, CONFIGS.parent, checked)
    options = _options(words)
    folders = _folders(options.config_dir)
    if options.help:
        with suppress(BrokenPipeError):  # whoever read it has seen enough
            print(usage(folders), flush=True)
        return 0
    options.overrides = [_quoted(text) for text in options.overrides]
    asked = [text for text in options.overrides if text.startswith(RESUME)]
    try:
        if asked:
            return _resume(asked, options, folders)
        jobs, configs = _configs(options.overrides, options.multirun, folders)
        if options.cfg:
            for config in configs:
                print(OmegaConf.to_yaml(config, resolve=options.resolve), end="")
            return 0
        return _run(jobs, [plain(config) for config in configs])
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        stopped = isinstance(error, Stopped)
        print(error if stopped else f"error: {error}", file=sys.stderr)
        return 128 + error.signum if isinstance(error, Stopped) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def checked(overrides: Sequence[str], multirun: bool, config_dirs: Sequence[str]) -> list[Settings]:
    """The settings that a command line would run, checked; none with resume=, whose are in the run's folder.

    Raises:
        SettingsError: they cannot be run.
    """
    folders, texts = _folders(config_dirs), [_quoted(text) for text in overrides]
    others = [text for text in texts if not text.startswith(RESUME)]
    if len(others) < len(texts):
        from pflsim.resume import changed

        _check_resume([text for text in texts if text.startswith(RESUME)], multirun)
        known = [text for text in others if not text.startswith("data.")]  # the run's folder knows which data
        given = plain(_configs(known, False, folders)[1][0])
        with composing(folders):
            changed(given, given, [str(override.key_or_group) for override in parse(known)])
        return []
    runs = [plain(config) for config in _configs(texts, multirun, folders)[1]]
    _check(runs)
    return runs


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch.py", usage="python launch.py [GROUP=NAME ...] [KEY=VALUE ...] [options]; see --help",
        add_help=False, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    return parser.parse_intermixed_args(arguments)


def _quoted(text: str) -> str:
    """`key=retry(2)` as Hydra reads it, which takes parentheses for a function of its own."""
    return re.sub(r"^(on_client_error=)(\w+\([^'\"]*\))$", r"\1'\2'", text)


def _folders(config_dirs: Sequence[str]) -> list[Path]:
    return [CONFIGS, *(Path(folder).absolute() for folder in config_dirs)]


def _configs(
    overrides: Sequence[str], multirun: bool, folders: Sequence[Path]
) -> tuple[Sequence[Sequence[str]], list[DictConfig]]:
    """The overrides of every run, and its config."""
    with composing(folders):
        jobs = sweep(overrides, folders) if multirun else [overrides]
        return jobs, [composed(job, folders) for job in jobs]


def _check(runs: Sequence[Settings]) -> None:
    from pflsim.checks import check, check_sweep

    for settings in runs:
        check(settings)
    check_sweep(runs)


def _check_resume(asked: Sequence[str], alone: bool) -> None:
    from pflsim.mirror.place import check_no_password

    for text in asked:
        check_no_password(text.removeprefix(RESUME))
    if len(asked) > 1 or alone:
        raise SettingsError(f"{' '.join(asked)}: one run is taken up at a time, without -m and --cfg")


def _run(jobs: Sequence[Sequence[str]], runs: Sequence[Settings]) -> int:
    """Check all runs, then run one after the other; one that fails does not keep the others from running.

    Those that are complete are printed side by side in the end.
    """
    _check(runs)
    from pflsim.compare.sweeps import compared
    from ray_actors.run import Runner

    failed: list[str] = []
    with compared() as done, Runner() as runner:
        for number, (job, settings) in enumerate(zip(jobs, runs, strict=True), start=1):
            name = f"[{number}/{len(runs)}] {' '.join(job)}"
            if len(runs) > 1:
                print(name, flush=True)
            try:
                done.append(runner.run(settings))
            except (SettingsError, RunError) as error:
                if isinstance(error, Stopped) and number < len(runs):
                    print(f"runs of the sweep that were not begun: {len(runs) - number}", file=sys.stderr)
                if len(runs) == 1 or isinstance(error, Stopped):
                    raise
                print(f"error: {error}", file=sys.stderr)
                failed.append(name)
    if failed:
        print(f"error: {len(failed)} of {len(runs)} runs failed:\n" + "\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


def _resume(asked: Sequence[str], options: argparse.Namespace, folders: Sequence[Path]) -> int:
    """Take up a run with its own settings; of others only those may be given that cannot change its results."""
    from pflsim.resume import changed, run_folder, saved_settings
    from pflsim.tracking.run_folder import is_complete

    _check_resume(asked, options.multirun or options.cfg)
    folder = run_folder(asked[0].removeprefix(RESUME))
    others = [text for text in options.overrides if not text.startswith(RESUME)]
    settings = saved_settings(folder)
    if others:
        with composing(folders):
            keys = [str(override.key_or_group) for override in parse(others)]
            same = [f"data={settings.names['data']}"] if any(key.startswith("data.") for key in keys) else []
            settings = changed(settings, plain(composed([*same, *others], folders)), keys)
    if is_complete(folder):
        print(f"{folder} is complete: all of its {settings.rounds} rounds are done")
        return 0
    from ray_actors.run import Runner

    with Runner() as runner:
        runner.resume(folder, settings)
    return 0


# Composing ------------------------------------------------------------------------------------------------------------


@contextmanager
def composing(folders: Sequence[Path]) -> Iterator[None]:
    """Make Hydra look into the folders, the first one first, inside the block."""
    for folder in folders:
        if not folder.is_dir():
            raise SettingsError(f"--config-dir {folder}: there is no such folder")
    PartsSearchPath.folders = tuple(folders)
    Plugins.instance().register(PartsSource)
    Plugins.instance().register(PartsSearchPath)
    root = make_dataclass("Settings", [(part, Any, MISSING) for part in PARTS], bases=(_unconverted(Settings),))
    ConfigStore.instance().store(name="schema", node=root)
    with initialize_config_dir(str(folders[0]), job_name="launch", version_base="1.3"):
        yield


def composed(overrides: Sequence[str], folders: Sequence[Path]) -> DictConfig:
    """The config of one run.

    Raises:
        SettingsError: an override or a file that does not fit; says which, and what would.
    """
    asked = parse(overrides)
    check_groups(asked, groups_in(folders))
    try:
        config = compose("config", list(overrides), return_hydra_config=True)
        choices = config.hydra.runtime.choices
        names = {
            group: choices[group] for group in sorted(choices) if not group.startswith("hydra/") and choices[group]
        }
        with open_dict(config):
            del config["hydra"]
            config.names = names
        return config
    except ConfigError as error:
        raise SettingsError(explain(asked, error, groups_in(folders))) from error


def plain(config: DictConfig) -> Settings:
    """The settings of a run, with every `${...}` filled in."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key
        raise SettingsError(f"{key} has no default; give it a value: {key}=...") from error
    except OmegaConfBaseException as error:
        raise SettingsError(f"{error.full_key}: {_first_line(error)}") from error
    return settings_from(typing.cast(Mapping[str, Any], values))


def sweep(overrides: Sequence[str], folders: Sequence[Path]) -> list[list[str]]:
    """The overrides of every run of a sweep: all combinations of the values given, the last one changing fastest."""
    asked = parse(overrides)
    check_groups(asked, groups_in(folders))
    choices = []
    for override in asked:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise SettingsError(f"{override.input_line}: a sweep takes a list of values: {override.key_or_group}=1,2,3")
        values = override.sweep_string_iterator() if override.is_sweep_override() else None
        choices.append(
            [str(override.input_line)] if values is None else [f"{override.get_key_element()}={v}" for v in values]
        )
    return [list(job) for job in itertools.product(*choices)]


def parse(overrides: Sequence[str]) -> list[Override]:
    """Read the overrides of the command line.

    Raises:
        SettingsError: one is not written as key=value.
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    found = []
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
        except (
            OverrideParseException,
            ValueError,
            RecursionError,
        ) as error:  # more digits, or brackets, than can be read
            why = str(getattr(error, "message", error)).partition("\n")[0]
            raise SettingsError(f"{shortened(text)} is not of the form KEY=VALUE or GROUP=NAME ({why})") from error
        if not override.key_or_group:
            raise SettingsError(f"{text!r} is not of the form KEY=VALUE or GROUP=NAME (there is no KEY)")
        if override.is_hydra_override():
            raise SettingsError(f"{text}: Hydra only composes the settings here; it has none of its own")
        found.append(override)
    return found


class PartsSource(FileConfigSource):
    """A config folder whose method, data, partition, split and model files get the settings of their targets."""

    @staticmethod
    def scheme() -> str:
        """What the search path calls it."""
        return "parts"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file; for a part, lay it over the schema of its target."""
        file = Path(self.path) / self._normalize_file_name(config_path)
        part, _, name = config_path.removesuffix(".yaml").partition("/")
        try:
            result = super().load_config(config_path)
            if part in PARTS and isinstance(result.config, DictConfig):
                result.config = typed(result.config, part, name)
        except (SettingsError, YAMLError, OmegaConfBaseException) as error:
            why = _first_line(error) if isinstance(error, OmegaConfBaseException) else error
            raise SettingsError(f"{file}: {why}") from error
        return result


class PartsSearchPath(SearchPathPlugin):
    """Puts the config folders on the search path as `PartsSource`s."""

    folders: ClassVar[tuple[Path, ...]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Replace the main folder and add the others."""
        for element in search_path.get_path():
            if element.provider == "main" and element.path == str(self.folders[0]):
                element.path = f"parts://{element.path}"
                for folder in self.folders[1:]:
                    search_path.append("config-dir", f"parts://{folder}")
                return


def typed(config: DictConfig, part: str, name: str) -> DictConfig:
    """Lay the config of a part over the schema of its targets' signatures, with their defaults."""
    given = typing.cast(dict[str, Any], OmegaConf.to_container(config))
    if "defaults" in given and not any(key in given for key in (TARGET, *SIDES)):
        return config  # it builds on another file, which has the schema
    targets = targets_of(given, part)
    rows: list[Any] = []
    for side, target in targets.items():
        if side:
            rows.append((side, make_dataclass(side, [(TARGET, str, target)]), MISSING))
        else:
            rows.append((TARGET, str, target))
    for key, parameter in settings_of(targets, part).items():
        default = MISSING if parameter.required else parameter.default
        if isinstance(default, list | tuple | dict):
            default = field(default_factory=lambda d=default: dict(d) if isinstance(d, dict) else list(d))
        seen, value = _schema_type(parameter.annotation), given.get(key, MISSING)
        if seen is Any and not str(value).startswith("${") and value != MISSING:  # what OmegaConf would not look at
            expected = misfit(parameter.annotation, value)
            if expected is not None:
                raise SettingsError(f"{key}={value!r}: expected {expected}")
        rows.append((key, seen, default))
    schema = OmegaConf.structured(make_dataclass(name.rpartition("/")[2], rows))
    return typing.cast(DictConfig, OmegaConf.merge(schema, config))


def _unconverted(schema: type) -> type:
    """A dataclass with the types that OmegaConf is to see, as `_schema_type` has them."""
    hints, rows = typing.get_type_hints(schema), []
    for f in fields(schema):
        kind = hints[f.name]
        if is_dataclass(kind):
            inner = _unconverted(typing.cast(type, kind))
            rows.append((f.name, inner, field(default_factory=inner)))
        elif kind is bool:
            rows.append((f.name, Any, field(default=f.default)))
    return make_dataclass(schema.__name__, rows, bases=(schema,))


def _schema_type(annotation: Any) -> Any:
    """The annotation with every Literal replaced by the types of its values, for OmegaConf.

    A bool is anything here, since OmegaConf would make true of 2; `pflsim.plain` and `check_part` look at it.
    """
    arguments = typing.get_args(annotation)
    if annotation is bool or set(arguments) == {bool, type(None)}:
        return Any
    if typing.get_origin(annotation) is Literal:
        return typing.Union[tuple(type(value) for value in arguments)]  # noqa: UP007
    if typing.get_origin(annotation) is typing.Union:
        return typing.Union[tuple(_schema_type(a) for a in arguments)]  # noqa: UP007
    return annotation


# Explaining -----------------------------------------------------------------------------------------------------------


def check_groups(overrides: Sequence[Override], groups: Mapping[str, Sequence[str]]) -> None:
    """Refuse a choice that no file offers.

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
        if group not in _chosen() and not (override.is_add() or override.is_force_add()):
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
        return f"{override.input_line}: {_in_plain_words(_first_line(cause), key, override)}{now}"
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


def _chosen() -> tuple[str, ...]:
    """The groups of the defaults list."""
    entries = OmegaConf.load(CONFIGS / "config.yaml").defaults
    return tuple(str(key) for entry in entries if isinstance(entry, DictConfig) for key in entry)


def _message(error: Exception) -> str:
    """Hydra's message with the cause's, without what only a programmer reads."""
    texts = [str(error), *([str(error.__cause__)] if isinstance(error.__cause__, OmegaConfBaseException) else [])]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith(("object_type=", "reference_type=")))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


if __name__ == "__main__":
    status = main()
    for stream in (sys.stdout, sys.stderr):
        let_go(stream)
    sys.exit(status)
