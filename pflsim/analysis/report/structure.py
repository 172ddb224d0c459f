"""Who learns with whom, and which client has which data."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pflsim.analysis.comparison import Comparison, Row
from pflsim.analysis.report.charts import MAX_COLUMNS
from pflsim.analysis.runs import Run
from pflsim.records.trace import read_matrices
from pflsim.types import Matrix

MAX_CLIENTS = 100
"""Matrices of more clients are not drawn."""
MAX_MATRICES = 4
SHADES = 10


@dataclass(frozen=True)
class Weights:
    """A matrix between clients.

    Args:
        line: its group.
        run: its run.
        matrix: the matrix.
        order: the clients, by true group.
        gaps: the number of true groups before each client of `order`.
        low, high: the values without a shade and with the darkest one.
        mixes: whether the matrix has weights, which share one scale.
    """

    line: Row
    run: Run
    matrix: Matrix
    order: list[int]
    gaps: list[int]
    low: float
    high: float
    mixes: bool

    @property
    def cells(self) -> list[tuple[int, str]]:
        """The path of the cells of each shade, negative for values below `low`; the diagonal is left out."""
        share = (_off(self.matrix)[np.ix_(self.order, self.order)] - self.low) / (self.high - self.low or 1.0)
        shade = np.sign(share) * np.ceil(abs(share).clip(0, 1) * SHADES - 1e-9)
        place = [n + gap / 3 for n, gap in enumerate(self.gaps)]
        return [
            (int(n), "".join(f"M{place[j]:.4g} {place[i]:.4g}h.93v.93h-.93z" for i, j in np.argwhere(shade == n)))
            for n in np.unique(shade[np.isfinite(shade)])
        ]

    @property
    def text(self) -> str:
        """The means on the diagonal, in the own group and in the others."""
        group = dict(zip(self.order, self.gaps, strict=True))
        same = np.equal.outer(*[[group[n] for n in sorted(group)]] * 2)
        off, values = _off(self.matrix), self.matrix.values
        own = "own group" if self.gaps[-1] else "others"
        parts = (("self", values.diagonal()), (own, off[same]), ("other groups", off[~same]))
        means = [(name, own[np.isfinite(own)]) for name, own in parts]
        if self.mixes and (kept := values.diagonal().mean()) > 0.9:
            return f"clients take {100 * kept:.3g}% from themselves"
        return ", ".join(f"{name} {_mean(own.mean(), self.mixes)}" for name, own in means if len(own))


def _mean(value: float, mixes: bool) -> str:
    return "below 0.001" if mixes and value < 0.001 else f"{value:.3g}".replace("-", "−")


def _mixes(matrix: Matrix) -> bool:
    """Return whether a matrix has weights, which share one scale."""
    return matrix.name.partition("/")[0] in ("alpha", "zeta")


def _off(matrix: Matrix) -> np.ndarray:
    return np.where(np.eye(len(matrix.values), dtype=bool), np.nan, matrix.values)


def by_group(run: Run, clients: int) -> tuple[list[int], list[int]]:
    """Return the clients ordered by true group, and the number of groups before each of them."""
    groups = run.partition.get("shift", {}).get("groups") or [0] * clients
    order = sorted(range(clients), key=lambda client: groups[client])
    return order, np.unique([groups[client] for client in order], return_inverse=True)[1].tolist()


def shown_run(line: Row, comparison: Comparison) -> Run:
    """Return the run of the smallest seed that all groups have, else of the group's smallest seed."""
    common = set.intersection(*({*group.seeds} for group in comparison.groups))
    runs = line.group.runs
    return next((run for run in runs if run.seed == min(common, default=None)), runs[0])


def matrices(run: Run) -> tuple[Matrix, ...]:
    """Return the matrices of the latest round that has them."""
    record = read_matrices(run.folder)
    return record.matrices if record else ()


def weights(comparison: Comparison) -> list[Weights]:
    """Return the first matrix between clients of the best groups that have one.

    Shades begin at 0, and are the same for all weights; those of similarities begin a tenth of their range below the
    least, and at least 0.05, so that nearly equal ones look equal.
    """
    found, sides = list[tuple[Row, Run, Matrix]](), {"client", "receiver", "sender"}
    for line in comparison.lines:
        run = shown_run(line, comparison)
        between = [m for m in matrices(run) if {m.rows.label, m.columns.label} <= sides and m.name != "clusters"]
        found += [(line, run, m) for m in between[:1] if len(m.values) <= MAX_CLIENTS and np.isfinite(_off(m)).any()]
    ends = [(float(np.nanmin(_off(m))), float(np.nanmax(_off(m)))) for *_, m in found[:MAX_MATRICES]]
    each, drawn = list(zip(found, ends, strict=False)), list[Weights]()
    shared = max((max(high, 2 / len(m.values)) for (*_, m), (_, high) in each if _mixes(m)), default=0.0)
    for (line, run, matrix), (low, high) in each:
        least = (0.0, max(-low, high)) if low < 0 else (low - max(0.1 * (high - low), 0.05), high)
        scale = (0.0, shared) if _mixes(matrix) else least
        drawn.append(Weights(line, run, matrix, *by_group(run, len(matrix.values)), *scale, _mixes(matrix)))
    return drawn


def clusters(comparison: Comparison) -> list[tuple[Row, list[tuple[Run, list[tuple[int, int]], int]]]]:
    """Return the groups that cluster clients.

    Each run has the cluster and the true group of each client, ordered by true group, and the number of clients whose
    cluster has nobody of another true group.
    """
    found = []
    for line in comparison.lines:
        runs = []
        own = [(run, m.values) for run in line.group.runs for m in matrices(run) if m.name == "clusters"]
        for run, members in (each for each in own if each[1].shape[1] <= MAX_COLUMNS):
            order, gaps = by_group(run, members.shape[1])
            pairs = list(zip(members.argmax(0)[order].tolist(), gaps, strict=True))
            pure = sum(all(gap == g for c, g in pairs if c == cluster) for cluster, gap in pairs)
            runs.append((run, pairs, pure))
        found += [(line, runs)] * bool(runs)
    return found


def held(comparison: Comparison) -> tuple[Run, list[tuple[str, int, list[int]]], list[str]] | None:
    """Return the training examples of the shown run's clients; None if they are not recorded.

    Returns:
        The run; name, true group and counts by class of each client, ordered by group; and the names of the classes,
        none for a regression.
    """
    run = shown_run(comparison.lines[0], comparison)
    about = run.partition
    if not about.get("class_counts") or "classes" not in about:
        return None
    counts, names = about["class_counts"], about.get("names", ())
    rows = zip(*by_group(run, len(counts)), strict=True)
    regression = about.get("task", {}).get("name") == "regression"
    classes = () if regression else about.get("values") or range(about["classes"])
    return (run, [(client_name(names, c), g, counts[c]["train"]) for c, g in rows], [*map(str, classes)])


def client_name(names: Sequence[str], client: int) -> str:
    """Return the name of a client; `client N` if it is a number, or there is none."""
    name = names[client] if names else str(client)
    return f"client {name}" if name.isdigit() else name


def histogram(values: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield about twelve ranges of whole numbers, and the number of values in each."""
    width = max(1, math.ceil((max(values) + 1 - min(values)) / 12))
    for start in range(min(values), max(values) + 1, width):
        label = str(start) if width == 1 else f"{start}–{start + width - 1}"
        yield label, sum(start <= value < start + width for value in values)
