"""Take personal models out of a run: `python launch.py export RUN --client 3`.

Writes client_3.safetensors, a plain state_dict, and example.py, which loads it and predicts.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from pflsim.errors import RunError, SettingsError

IMPLEMENTATION = "ray_actors.export.models"
"""Found by name when it is needed: it builds clients, which the engine knows nothing of."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says.

    Returns:
        The exit status: 1, the model is not what the run recorded; 2, it cannot be had.
    """
    given = _options(arguments)
    try:
        export = importlib.import_module(IMPLEMENTATION).export
        for line in export(given.run, given.client, given.round, given.model, given.out, given.data):
            print(line)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}", file=sys.stderr)
        return 2
    except (SettingsError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python launch.py export", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder; the run may be going on")
    parser.add_argument("--client", required=True, metavar="N", help="a client, several (1,2,5), or all")
    parser.add_argument("--round", default="last", metavar="ROUND", help="best, last or a number; default: last")
    parser.add_argument(
        "--model",
        choices=["personal", "global"],
        help="the client's own model or the server's; default: the one that the method is judged by",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write; default: RUN/export")
    parser.add_argument("--data", metavar="DIR", help="where the data are, if no longer where the run found them")
    return parser.parse_args(arguments)
