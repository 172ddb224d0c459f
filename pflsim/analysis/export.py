"""Export personal models of a run.

`export RUN --client 3` writes client_3.safetensors, a plain state_dict, and example.py, which loads it and predicts.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from pflsim.config.installation import program
from pflsim.terminal.exit_status import exit_status

IMPLEMENTATION = "ray_actors.export.models"
"""Imported by name when the command runs, because pflsim does not import ray_actors."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 1 if a model does not reproduce the recorded counts, or 2 for any other error.
    """
    given = _options(arguments)

    def export() -> None:
        models = importlib.import_module(IMPLEMENTATION)
        for line in models.export(given.run, given.client, given.round, given.model, given.out, given.data):
            print(line)

    return exit_status(export)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{program()} export", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder; the run may still be running")
    parser.add_argument("--client", required=True, metavar="N", help="a client, several with commas (1,2,5), or all")
    parser.add_argument("--round", default="last", metavar="ROUND", help="best, last or a number; default: last")
    parser.add_argument(
        "--model",
        choices=["personal", "global"],
        help="the client's model or the server's; default: the reported model",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder to write to; default: RUN/export")
    parser.add_argument("--data", metavar="DIR", help="the folder or file of the data, if they have moved")
    return parser.parse_args(arguments)
