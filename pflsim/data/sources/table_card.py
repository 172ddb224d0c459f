"""The card of a table: what was read of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pflsim.data.dataset import Card
from pflsim.data.sources.columns import Column
from pflsim.data.sources.frames import Rows, Source
from pflsim.data.targets import about_targets


def card_of(source: Source, rows: Rows, inputs: Sequence[Column], text: tuple[str, str] | None = None) -> Card:
    """Return the card of a table with these inputs, or with a column of texts: its name, and what they are."""
    own = {source.label: "label", source.client: "client", source.group: "group"} | ({text[0]: "text"} if text else {})
    used = {column.name: column for column in inputs}
    unused = [str(name) for name in rows.frame.columns if name not in own and name not in used]
    lines = [*_about_rows(source, rows), *([(f"texts ({text[0]})", text[1])] if text else _about_inputs(inputs))]
    lines += [("not used", ", ".join(unused))] if unused else []
    return Card(tuple(lines), tuple(_record(name, own, used.get(name)) for name in rows.frame.columns))


def _about_rows(source: Source, rows: Rows) -> Iterator[tuple[str, str]]:
    data, test = rows.targets, len(rows.targets.y) - rows.targets.train_size
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


def _about_inputs(inputs: Sequence[Column]) -> Iterator[tuple[str, str]]:
    numbers = [column.name for column in inputs if column.is_number]
    categories = [f"{column.name} {len(column.counts)}" for column in inputs if not column.is_number]
    for kind, names in {"numbers": numbers, "categories": categories}.items():
        yield kind, f"{len(names)}: {', '.join(names)}" if names else "none"
    if gaps := [f"{column.name} {column.missing:,}" for column in inputs if column.missing]:
        yield "missing cells", f"{', '.join(gaps)}: filled with the mean or the most frequent value"


def _record(name: str, own: Mapping[str | None, str], column: Column | None) -> dict[str, Any]:
    """Return what data_card.json says about a column."""
    if column is None:
        return {"name": name, "kind": own.get(name, "not used")}
    if not column.is_number:
        return {"name": name, "kind": "category", "missing": column.missing, "values": column.counts}
    cells = column.cells.dropna().to_numpy(np.float64)
    about = {"min": cells.min(), "max": cells.max(), "mean": cells.mean()} if len(cells) else {}
    return {"name": name, "kind": "number", "missing": column.missing, **about}
