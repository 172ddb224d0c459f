"""The command line `pflsim check-method METHOD`."""

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_modules.base import ClientModule
from lightning_modules.contract.checks import CHECKS, SMALL, Broken, Make, Refused, Skipped
from lightning_modules.prepare import PreparedRun, prepare
from pflsim.config.components import server_of, target_of
from pflsim.config.compose import composed, config_folders, parse, to_settings
from pflsim.config.help import groups_in
from pflsim.config.names import nearest
from pflsim.errors import RunError, SettingsError, own_errors, place_of
from pflsim.records.own_code import module_file


def options(add: Callable[..., Any]) -> None:
    """Add the options of the command."""
    add("method", metavar="METHOD", help="a module, a client class or the name of a YAML file")
    add("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings, such as method.mu=1")
    add("--config-dir", "-cd", action="append", default=[], metavar="DIR", help="folder of configs")
    add("--ray", action="store_true", help="also compare with Ray actors (takes longer)")


def execute(options: argparse.Namespace) -> int:
    """Check a method: run small federations with it, and print a line for every property that a method must have.

    METHOD is one of

      mine.moon        the client class in mine/moon.py, with the server rule there or else FedAvg
      mine.moon.Moon   a client class, with that rule or the one of method.server=mine.moon.MoonServer
      moon             the name of a YAML file, for example with --config-dir mine/configs
    """
    make, checks = maker(options.method, options.overrides, config_folders(options.config_dir)), CHECKS
    if options.ray:
        checks = (*checks, importlib.import_module("ray_actors.actors_equal").equal_on_ray)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.callback(logging.disable, logging.NOTSET)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)  # what fails is printed
        make()  # raises SettingsError
        if not _passes(checks[0], make):
            print("the other checks need rounds that run")
            return 1
        failed = [check for check in checks[1:] if not _passes(check, make)]
    print(f"{len(failed)} of {len(checks)} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


def _passes(check: Callable[[Make], None], make: Make) -> bool:
    """Run a check, print its line, and return whether it did not fail."""
    word, why = "ok", ""
    try:
        check(make)
    except Skipped as skipped:
        word, why = "refused" if isinstance(skipped, Refused) else "skipped", f": {skipped}"
    except Exception as error:
        known = isinstance(error, Broken | RunError | SettingsError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        word, why = "FAILED", f"\n{'':9}{text}{place_of(error)}"
    print(f"{word:<9}{(check.__doc__ or '').splitlines()[0].rstrip('.')}{why}", flush=True)
    return word != "FAILED"


def maker(method: str, overrides: Sequence[str], folders: Sequence[Path]) -> Make:
    """Return a function that prepares a small run of a method with further settings."""
    named, methods = method.removeprefix("method="), groups_in(folders)["method"]
    own = named not in methods
    values = parse(overrides)
    server = values.pop("method.server", "")
    client, server = _targets(named, server, methods) if own else ("", server)

    def make(*more: str) -> PreparedRun:
        chosen: dict[str, Any] = {"method": "fedavg" if own else named}
        for key, value in [*parse(SMALL).items(), *values.items(), *parse(more).items()]:
            chosen = {name: each for name, each in chosen.items() if not name.startswith(f"{key}.")} | {key: value}
        sides = {"method.client": client, "method.server": server}
        settings = to_settings(composed(chosen | {side: each for side, each in sides.items() if each}, folders))
        if own:  # errors then use the name in the target
            settings = replace(settings, names={k: v for k, v in settings.names.items() if k != "method"})
        return prepare(settings, trial=False)  # the checks say more

    return make


def _targets(name: str, server: str, methods: Sequence[str]) -> tuple[str, str]:
    """Return the client's and the server's target of a module, or of a client class and a rule."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if module_file(name) is None and "." not in name:
        raise SettingsError(f"{name}: there is no method of that name, and no module; {nearest(name, methods)}")
    if module_file(name) is None:
        return name, server or server_of(name)
    with own_errors(name):
        members = vars(importlib.import_module(name))
    classes = [value for value in members.values() if isinstance(value, type) and value.__module__ == name]
    clients = [target_of(each) for each in classes if issubclass(each, ClientModule)]
    if len(clients) != 1:
        raise SettingsError(
            f"{name} must have one subclass of ClientModule; found {', '.join(map(target_of, classes)) or 'none'}; "
            f"name it: check-method {name}.CLIENT"
        )
    return clients[0], server or server_of(clients[0])
