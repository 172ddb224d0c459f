import csv
import io
import re
from pathlib import Path

import pytest
from made_runs import made

from pflsim.analysis.comparison import Comparison, compare, compare_sets
from pflsim.analysis.groups import group_runs
from pflsim.analysis.runs import Run
from pflsim.analysis.tables import Format, Table, as_csv, drawn, render
from pflsim.display.formats import Choice

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Local is right in 8 of 10, FedAvg in 6 and then 9; seed 1 is better by one each."""
    found = []
    for seed in (0, 1):
        local, fedavg = [[(8 + seed, 10), (8, 10)]] * 2, [[(6, 10), (6 + seed, 10)], [(9, 10), (9, 10)]]
        val = [[(1, 2)] * 2] * 2
        found.append(made(tmp_path / f"l{seed}", local, method="local", seed=seed, val=val, up=0, down=0))
        settings = {"val": [[(1, 2)] * 2, [(2, 2)] * 2], "up": 400_000, "down": 600_000}
        found.append(made(tmp_path / f"f{seed}", fedavg, seed=seed, reported=("global", "received"), **settings))
    return found


@pytest.fixture
def comparison(runs: list[Run]) -> Comparison:
    return compare(group_runs(runs))


def test_text(comparison: Comparison) -> None:
    written = render([comparison], "text")
    assert written.startswith("Test accuracy on digits, dirichlet(alpha=0.1), 2 clients, mlp; 2 rounds, seeds 0,1\n\n")
    lines = {line.split()[0]: line for line in written.splitlines() if line}
    cells = re.split(r" {2,}", lines["Local"])
    assert cells == [
        "Local", "personal, trained", "1", "0.825 ± 0.035", "0.825", "0.800 ± 0.000", "0", "0", "1", "0",
    ]  # fmt: skip
    first = next(line for line in written.splitlines() if re.match("FedAvg +global", line))
    assert re.split(r" {2,}", first) == [
        "FedAvg", "global, received", "2", "0.900 ± 0.000", "0.900", "0.900 ± 0.000", "4000", "4000", "2",
        "4000",
    ]  # fmt: skip
    assert re.split(r" {2,}", lines["FedAvg"])[:3] == ["FedAvg", "4", "+7.5"]
    assert "\nto 0.8: " in written and "every run reaches" in written
    assert "oracle" not in written
    assert max(map(len, written.splitlines())) <= 110


@pytest.mark.parametrize("kind", ["text", "markdown", "latex"])
def test_the_oracle_is_named(runs: list[Run], kind: str) -> None:
    written = render([compare(group_runs(runs), choice="best_test_oracle")], kind)  # type: ignore[arg-type]
    assert "(oracle)" in written and "test data" in written


@pytest.mark.parametrize("choice", ["best_val", "last", "best_test_oracle"])
def test_csv_has_plain_numbers(runs: list[Run], choice: Choice) -> None:
    local, fedavg = csv.DictReader(io.StringIO(render([compare(group_runs(runs), choice=choice, target=0.85)], "csv")))
    assert (local["label"], local["seeds"], local["runs"], local["round_chosen_by"]) == ("local", "0 1", "2", choice)
    assert (local["reported_model"], local["reported_phase"]) == ("personal", "trained")
    assert float(local["accuracy_mean"]) == pytest.approx(0.825)
    assert float(local["accuracy_std"]) == pytest.approx(0.05 / 2**0.5)
    assert float(fedavg["bytes_until_round_mean"]) == float(fedavg["bytes_total_mean"]) == 4e6
    assert (local["rounds_to_target_mean"], local["seeds_reaching_target"], local["target"]) == ("", "1", "0.85")
    assert (fedavg["rounds_to_target_mean"], fedavg["seeds_reaching_target"]) == ("2.0", "2")
    assert (local["reference"], local["difference_mean"], fedavg["reference"]) == ("", "", "local")
    assert float(fedavg["difference_mean"]) == pytest.approx(0.075)
    assert (fedavg["pairs"], fedavg["better"], fedavg["equal"], fedavg["worse"]) == ("4", "3", "1", "0")
    assert float(fedavg["difference_low"]) < 0.075 < float(fedavg["difference_high"])
    assert (fedavg["level"], local["level"], local["identical_to"]) == ("not clear", "", "")
    # the seeds' differences are 0.1 and 0.05; t is 12.706 with one degree of freedom
    ends = [float(fedavg[f"difference_{end}_over_seeds"]) for end in ("low", "high")]
    assert ends == pytest.approx([0.075 - 12.7062 * 0.025, 0.075 + 12.7062 * 0.025], abs=1e-5)


def test_csv_has_a_column_for_every_setting(tmp_path: Path) -> None:
    other = made(tmp_path / "a", [[(1, 2)]], lr=0.5, parts={"model": {"hidden": [3, 4]}})
    comparison = compare(group_runs([other, made(tmp_path / "b", [[(1, 2)]])]))
    rows = list(csv.DictReader(io.StringIO(render([comparison], "csv"))))
    assert [(row["lr"], row["model.hidden"]) for row in rows] == [("0.5", "[3,4]"), ("0.1", "[100]")]


def test_latex(comparison: Comparison) -> None:
    written = render([comparison], "latex")
    for part in (r"\begin{table}", r"\toprule", r"\midrule", r"\bottomrule", r"\end{table}", r"95\% interval"):
        assert written.count(part) >= (1 if "%" in part else 2), part
    assert r"0.825 $\pm$ 0.035" in written
    assert written.isascii()
    for row in re.findall(r"^ (?:Local|FedAvg).*$", written, re.MULTILINE):
        assert row.count("&") in (9, 10) and row.endswith(r"\\")


@pytest.mark.parametrize("kind", ["text", "markdown", "latex"])
def test_several_benchmarks_have_a_table_of_differences(tmp_path: Path, kind: Format) -> None:
    """Six clients, all better by different amounts in three seeds on the first benchmark, all equal on the second."""
    found = []
    for number, gain in enumerate((10, 0)):
        for seed in range(3):
            for method, more in (("local", 0), ("ditto", gain)):
                rights = [(50 + more + (more > 0) * n, 100) for n in range(6)]
                digest, parts = f"{number}{seed:063d}", {"partition": {"alpha": number + 1.0}}
                folder = tmp_path / f"{method}{number}{seed}"
                found.append(made(folder, [rights], method=method, seed=seed, digest=digest, parts=parts))
    written = render(compare_sets(found), kind)
    last = " ".join(written.partition("Differences on each benchmark")[2].split())
    assert re.search(r"Ditto[ |&]+\+12.5, clear[ |&]+0.0, not clear", written)
    assert "No method is clearly better" in last and "clearly worse in none: Ditto" in last
    assert "difference to Local" in last


def test_long_labels_take_several_lines_of_a_table_in_text() -> None:
    """As many as bring the table to 120 columns; they are whole in other formats."""
    label = "FedAvg lr=0.1 momentum=0.123456 privacy=client privacy.epsilon=1.0"
    table = Table(
        "title", ("method", *(f"column{n}" for n in range(8))), ((label, *["0.123"] * 8), ("Local", *"12345678")), ()
    )
    assert label in drawn([table], "markdown") and label in drawn([table], "latex")
    written = drawn([table], "text")
    assert label not in written and 110 < max(map(len, written.splitlines())) <= 120
    above, below = written.split("FedAvg")[1].split("\nLocal")
    assert " ".join(above.replace("0.123 ", " ").split()).startswith("lr=0.1") and below.split() == [*"12345678"]
    assert {*label.split()} <= {*written.split()}
    short = Table(table.title, table.headers, table.rows[1:], ())
    assert "\nLocal " in drawn([short], "text")


def test_latex_escapes() -> None:
    body = drawn([Table("50% of a_b", ("a_b", "n"), (("x=50%&{~}\\", "-0.5"),), ("≥ 1 — 2–3 <i>",))], "latex")
    for part in (r"x=50\%\&\{\textasciitilde{}\}\textbackslash{} & $-$0.5", r"\caption{50\% of a\_b", "1 --- 2--3"):
        assert part in body


def test_differences_between_the_runs_are_below_the_table(runs: list[Run]) -> None:
    written = render([compare(group_runs(runs[:3]))], "text")
    assert "seeds" not in written.splitlines()[0] and "CAUTION: " in written
    assert re.search(r"^Local +personal, trained +0,1 ", written, re.MULTILINE)


def test_csv_cells_that_a_spreadsheet_would_execute() -> None:
    texts = ["=1+1", "+cmd", "-x", "@A1"]
    numbers = ["-0.5", "+1e-3", "1"]
    (row,) = csv.reader(io.StringIO(as_csv([dict(enumerate([*texts, *numbers, -2.5]))]).partition("\n")[2]))
    assert row == [*(f"'{text}" for text in texts), *numbers, "-2.5"]
