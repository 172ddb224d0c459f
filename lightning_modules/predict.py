"""Applies the model of a run to new rows of a table or texts."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_modules.export import LoadedModel, SavedModels, choose_model, is_id
from pflsim.config.names import close_to
from pflsim.data.sources.cells import read_frame
from pflsim.data.sources.frames import FORM
from pflsim.errors import SettingsError, reading
from pflsim.progress import doing
from pflsim.records.files import write_atomically
from pflsim.types import ModelKind


def options(add: Callable[..., Any]) -> None:
    """Add the options of the command."""
    choose_model(add)
    add("table", type=Path, metavar="TABLE", help=f"the rows: {FORM}")
    add("--client", metavar="NAME", help="name or id of the client whose model predicts; default: the global model")
    add("--out", type=Path, metavar="FILE", default=Path("predictions.csv"), help="default: predictions.csv")


def execute(given: argparse.Namespace) -> None:
    """Predict rows of a file by a model of a run, and write a CSV file.

    It has the number of each row in the file, from 0; the columns that are no inputs, such as identifiers; the
    probability of each class and the class, or the value; and the model, the name of its client, and its round. A
    client that the run does not have gets the global model.
    """
    doing(f"loading the model of {given.run}")
    model = _chosen(SavedModels(given.run, given.round, given.trusted), given.client, given.model)
    inputs, numbers = getattr(model.encoder, "inputs", ()), {*getattr(model.encoder, "numbers", ())}
    with reading(given.table, FORM):
        names = {*read_frame(str(given.table), inputs).columns}
        table = read_frame(str(given.table), names - numbers)  # identifiers stay as they are written
    doing(f"predicting {len(table):,} rows")
    found, others = model.predict_frame(table), table.drop(columns=inputs)
    found = others.merge(found, left_index=True, right_index=True, suffixes=("", "_predicted"))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out, found.to_csv(index_label="row" if "row" not in found else "row_predicted"))
    about = model.about
    whose = f"the {about['model']} model" + f" of client {about['name']}" * bool(about["name"])
    print(f"{given.out}: {len(found):,} rows by {whose} ({about['method']}, round {about['round']})")


def _chosen(saved: SavedModels, client: str | None, model: ModelKind | None) -> LoadedModel:
    """Return the model of a client, or the global one, with a line that says so, of a client that the run lacks."""
    if client is None:
        return saved.load(None, model)
    asked = int(client) if is_id(client) and client not in saved.names else client
    try:
        saved.id_of(asked)
    except SettingsError as unknown:
        if model == "personal":
            raise
        try:
            found = saved.load()
        except SettingsError as error:
            raise SettingsError(f"{unknown}; {error}") from None
        near = [] if client.isdecimal() else close_to(client, {*saved.names} - {client})
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        print(f"the run has no model of client {client}{meant}; the global model predicts its rows", file=sys.stderr)
        return found
    return saved.load(asked, model)
