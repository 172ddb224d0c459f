"""The card of a table: what was read of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pflsim.data.card import Card
from pflsim.data.sources.columns import Column
from pflsim.data.sources.frames import Rows, Source
from pflsim.data.targets import about_targets


def card_of(source: Source, rows: Rows, inputs: Sequence[Column], text: tuple[str, str] | None = None) -> Card:
    """Return the card of a table with these inputs, or with a column of texts: its name, and what they are."""
    return Card(tuple(_lines(source, rows, inputs, text)), tuple(_records(source, rows, inputs, text)))


def _lines(
    source: Source, rows: Rows, inputs: Sequence[Column], text: tuple[str, str] | None
) -> Iterator[tuple[str, str]]:
    data, used = rows.targets, {column.name for column in inputs}
    test = len(data.y) - data.train_size
    yield "rows", f"{data.train_size:,} in {data.name}" + f", {test:,} for tests" * (test > 0)
    if lost := [f"{count:,} {why}" for why, count in rows.lost.items() if count]:
        yield "left out", ", ".join(lost)
    if data.clients is not None:
        sizes = np.bincount(data.clients, minlength=len(data.client_names))
        ends = [f"{data.client_names[i]} {sizes[i]:,}" for i in (sizes.argmin(), sizes.argmax())]
        said = f"smallest {ends[0]}, largest {ends[1]} rows" if np.ptp(sizes) else f"each {sizes[0]:,} rows"
        yield f"clients ({source.client})", f"{len(sizes)}; {said}"
    if data.groups is not None:
        yield f"groups ({source.group})", f"{len(np.unique(data.groups)):,}"
    yield f"label ({source.label})", about_targets(data)
    if text:
        yield f"texts ({text[0]})", text[1]
    numbers = [column.name for column in inputs if column.is_number]
    categories = [f"{column.name} {len(column.counts)}" for column in inputs if not column.is_number]
    for kind, names in {"numbers": numbers, "categories": categories}.items() if inputs else ():
        yield kind, f"{len(names)}: {', '.join(names)}" if names else "none"
    if gaps := [f"{column.name} {column.missing:,}" for column in inputs if column.missing]:
        yield "missing cells", f"{', '.join(gaps)}: filled with the mean or the most frequent value"
    own = {source.label, source.client, source.group, *(text or ())[:1]}
    if unused := [str(name) for name in rows.frame.columns if name not in used | own]:
        yield "not used", ", ".join(unused)


def _records(
    source: Source, rows: Rows, inputs: Sequence[Column], text: tuple[str, str] | None
) -> Iterator[dict[str, Any]]:
    """Yield what data_card.json says about each column."""
    found = {column.name: column for column in inputs}
    own = {source.label: "label", source.client: "client", source.group: "group"} | ({text[0]: "text"} if text else {})
    for name in rows.frame.columns:
        column = found.get(name)
        if column is None:
            yield {"name": name, "kind": own.get(name, "not used")}
        elif column.is_number:
            cells = column.cells.dropna().to_numpy(np.float64)
            about = {"min": cells.min(), "max": cells.max(), "mean": cells.mean()} if len(cells) else {}
            yield {"name": name, "kind": "number", "missing": column.missing, **about}
        else:
            yield {"name": name, "kind": "category", "missing": column.missing, "values": column.counts}
