"""What stands in a report, against numbers worked out here from the counts that the runs were made of."""

from __future__ import annotations

import html
import json
import re
import shutil
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_run

from pflsim.analysis import comparison
from pflsim.analysis.groups import group_runs
from pflsim.analysis.runs import incomplete, read_run
from pflsim.cli import main
from pflsim.records.environment import FORMAT
from pflsim.records.trace import RoundMatrices, write_matrices
from pflsim.types import Axis, Matrix

pytestmark = pytest.mark.slow

TESTS = 20
"""Test examples of every client."""
ALL, MORE, EACH = (f'aria-label="{name}"' for name in ("All numbers", "More numbers", "Values of each client"))
CLIENTS = 20
"""So that the worst tenth are two."""


def rights(rng: np.random.Generator, low: int, rounds: int = 4) -> list[list[tuple[int, int]]]:
    return [[(int(n), TESTS) for n in rng.integers(low, TESTS + 1, CLIENTS)] for _ in range(rounds)]


def report(*arguments: object) -> str:
    """The page, written beside the first run."""
    out = Path(str(arguments[0])).parent / "page.html"
    assert main(["report", *map(str, arguments), "--out", str(out)]) == 0
    return out.read_text()


def words(page: str) -> str:
    """What a reader sees, in one line."""
    body = re.sub(r"<(style|script|svg|template)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def row(page: str, name: str, table: str = '"forest') -> list[str]:
    """The cells of the row that begins with a name, in the first table after a text."""
    found = re.findall(r"<table.*?</table>", page[page.index(table) - 20 :], re.DOTALL)[0]
    for line in re.findall(r"<tr.*?</tr>", found, re.DOTALL):
        cells = [words(cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", line, re.DOTALL)]
        if cells and cells[0] == name:
            return cells
    raise AssertionError(f"no {name} in {words(found)}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two seeds; the second round is the best by validation in seed 0, the third in seed 1."""
    root = tmp_path_factory.mktemp("runs")
    for seed, best in ((0, 1), (1, 2)):
        for method, low, up, down in (("local", 12, 0, 0), ("fedavg", 2, 1000, 3000)):
            rng = np.random.default_rng([seed, low])
            val = [[(9 if r == best else 5, 10)] * CLIENTS for r in range(4)]
            make_run(
                root / f"{method}-{seed}", rights(rng, low), method=method, seed=seed, val=val, up=up, down=down,
                seconds=2.0, reported=("personal", "trained") if method == "local" else ("global", "received"),
            )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return report(folder / "*-*")


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [[(3, 10), (4, 10)]] * 3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["losses"] = {"ce": None, "prox": 1e-9 * 10.0 ** (3 * line["round"])}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "learning" in report(folder)


def test_clients_without_test_examples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [[(0, 0), (4, 10), (6, 10)]])
    assert '<td class="num">0.5000</td>' in report(folder)


def test_methods_without_a_client_in_common(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [[(0, 0), (4, 10)]])
    make_run(tmp_path / "b", [[(6, 10), (0, 0)]], method="local")
    found = report(tmp_path / "a", tmp_path / "b")
    assert 'id="cost"' in found and 'id="gains"' not in found and 'href="#gains"' not in found


def expected(method: str, seed: int) -> np.ndarray:
    low, best = (12, 1) if method == "local" else (2, 1), (1, 2)[seed]
    return np.sort([n / t for n, t in rights(np.random.default_rng([seed, low[0]]), low[0])[best]])


def test_headline_figures(page: str) -> None:
    for method, label in (("local", "Local"), ("fedavg", "FedAvg")):
        rates = [expected(method, seed) for seed in (0, 1)]
        figures = [[r.mean(), r.mean(), r[:2].mean(), np.median(r), r[-2:].mean(), r.std()] for r in rates]
        more, wanted = row(page, label, MORE), [statistics.fmean(f) for f in zip(*figures, strict=True)]
        assert [float(cell) for cell in more[3:9]] == pytest.approx(wanted, abs=6e-5)  # equal numbers of test examples
        assert more[2] == "2, 3"
        spreads = [[f[n] for f in figures] for n in (0, 2)]
        assert row(page, label, ALL)[1:3] == [f"{statistics.fmean(f):.3f} ± {statistics.stdev(f):.3f}" for f in spreads]
    assert row(page, "FedAvg", MORE)[1] == "global, received"
    assert "oracle" not in words(page[page.index('id="answer"') : page.index("Other rounds")])
    assert "(oracle)" in words(page)
    # 20 clients, 2 rounds of seed 0 and 3 of seed 1: 2.5 rounds on the mean; 4 rounds in all
    assert row(page, "FedAvg", MORE)[9:11] == ["50.0 kB", "150 kB"] and row(page, "FedAvg", ALL)[9] == "320 kB"
    assert row(page, "Local", MORE)[9:11] == ["0 B", "0 B"]


def test_the_answer_compares_with_local(page: str) -> None:
    means = {m: statistics.fmean(expected(m, seed).mean() for seed in (0, 1)) for m in ("local", "fedavg")}
    fedavg, local = row(page, "FedAvg"), row(page, "Local")
    difference = 100 * (means["local"] - means["fedavg"])
    assert float(fedavg[2].replace("−", "-")) == pytest.approx(-difference, abs=0.0501) and " to " in fedavg[3]
    assert [local[-1], fedavg[-1]] == [f"{means[m]:.3f}" for m in ("local", "fedavg")]
    assert local[2:4] == ["", "reference"]
    assert page.index(">Local<", page.index('"forest')) < page.index(">FedAvg<", page.index('"forest'))  # best first
    plot = re.findall(r'aria-label="(clear|not clear|reference)"', page)
    assert plot == ["reference", "clear"] and "FedAvg is clearly worse" in words(page)
    line = page[page.index(">FedAvg<", page.index('"forest')) : page.index("</table>")]
    assert re.findall(r'<use href="#k-square" x="([\d.]+)%" [^>]*class="k clear"', line)


def test_a_target_has_a_line_in_the_curves_and_its_cost_in_the_table(tmp_path: Path) -> None:
    """Local reaches 0.5 in rounds 2 and 3 of its seeds, FedAvg in one of its seeds only."""
    histories = {("local", 0): (2, 5, 6), ("local", 1): (2, 4, 6), ("fedavg", 0): (5, 6, 6), ("fedavg", 1): (1, 2, 3)}
    for (method, seed), rights_of in histories.items():
        rounds = [[(right, 10), (right, 10)] for right in rights_of]
        make_run(tmp_path / f"{method}-{seed}", rounds, method=method, seed=seed)
    given, plain = report(tmp_path / "*-*", "--target", "0.5"), report(tmp_path / "*-*")
    heads = re.findall(r"<button[^>]*>([^<]*to 0.5)</button>", given)
    assert heads[0] == "rounds to 0.5" and not re.search(r"<button[^>]*>[^<]*to 0", plain)
    local, fedavg = (row(given, name, ALL)[-len(heads) - 1 :] for name in ("Local", "FedAvg"))
    assert "2–3" in local and fedavg.count("1 of 2") == len(heads)
    learning = given[given.index('id="learning"') :]
    assert learning.count('class="goal"') == 2 and 'class="goal"' not in plain
    ticks = re.findall(r'x1="([\d.]+)" x2="\1" y1="90" y2="100"', learning)
    assert sorted(map(float, ticks)) == [0, 50, 100]
    assert main(["report", str(tmp_path), "--target", "101%"]) == 2


def test_named_clients_are_in_the_order_of_the_columns(tmp_path: Path) -> None:
    """They are the same in every seed: each is a column, with its mean over the seeds."""
    runs = {"local": (9, 3, 6), "ditto": (8, 4, 6), "ifca": (8, 4, 5)}
    for (method, right), seed in product(runs.items(), (0, 1)):
        folder = make_run(
            tmp_path / f"{method}-{seed}", [[(n - seed, 10) for n in right]] * 2, method=method, seed=seed
        )
        about = {"hash": "0" * 64, "names": ["Basel", "Bern", "Chur"]}
        (folder / "partition.json").write_text(json.dumps(about))
    page = report(tmp_path)
    assert "With Ditto, it is Basel; with IFCA, these are Basel and Chur." in words(page)
    cells = row(page, "Basel", EACH)
    assert [cell.partition(" ")[0] for cell in cells] == ["Basel", "10", "0.750", "0.850", "0.750"]
    assert cells[2].endswith("[0.442, 0.919]")  # Wilson's
    page = report(tmp_path / "local-*", tmp_path / "ditto-*")
    text, shown = words(page), page[page.index('id="gains"') : page.index('id="learning"')]
    assert "A column is a client, 3 in all" in text and "(Bern, Chur, Basel)" in text
    assert "Worse off than with Local: 1 of 3 clients with Ditto." in text
    assert re.findall(r'class="tick wide">(\w+)</text>', page) == ["Bern", "Chur", "Basel"]
    assert "All methods send the same: " in text and 'aria-label="accuracy against bytes' not in page
    assert len(re.findall(r'<circle cx="[\d.]+%" [^>]*class="loss"/>', shown)) == 1


def test_without_validation_data_the_last_round_is_the_headline(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [[(1, 10), (9, 10)], [(4, 10), (8, 10)]])
    page = report(tmp_path / "a")
    assert row(page, "FedAvg", MORE)[2:6] == ["2", "0.6000", "0.6000", "0.4000"]
    assert "no validation data" in words(page)


def test_runs_that_cannot_be_compared_have_no_differences(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [[(5, 10), (9, 10)]], method="fedavg", digest="a" * 64)
    make_run(tmp_path / "b", [[(1, 10), (2, 10)]], method="ditto", digest="b" * 64)
    page = report(tmp_path / "a", tmp_path / "b")
    assert "partition hash" in words(page) and '"forest' not in page and 'id="cost"' not in page
    assert row(page, "FedAvg", ALL)[1:3] == ["0.700", "0.500"] and 'id="learning"' not in page
    for method, seed in (("fedavg", 0), ("fedavg", 1), ("ditto", 1), ("ditto", 2)):
        make_run(tmp_path / "seeds" / f"{method}{seed}", [[(5, 10), (9, 10)]], method=method, seed=seed)
    page = report(tmp_path / "seeds")
    assert "the seeds differ" in words(page) and "p (Holm)" not in page


def test_unfinished_runs_are_listed_and_do_not_count(tmp_path: Path) -> None:
    """One method lacks its second seed: the rest is a complete table. One run has no round, one failed at once."""
    for method, seed in product(("local", "fedavg", "ditto"), (0, 1)):
        stopped = (method, seed) == ("ditto", 1)
        rounds = [[(5 + seed, 10), (9, 10)]] * 3
        make_run(
            tmp_path / f"{method}{seed}", rounds, method=method, seed=seed, rounds=3 + 5 * stopped, complete=not stopped
        )
    (tmp_path / "ditto1" / "run.log").write_text("2026-11-27 19:00:26 the run ended: a <client> failed\n")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.yaml").write_text((tmp_path / "local0" / "config.yaml").read_text())
    page = report(tmp_path)
    text = words(page)
    assert "Ditto seed 1 : 3 of 8 rounds are done: a <client> failed" in text
    assert "none : no round is done" in text and "Ditto seed 0 : 3 of 3 rounds are done, but" in text
    assert "3 of 7 runs" in text[: text.index("Learning")] and "Ditto seed 1" in text[: text.index("Learning")]
    assert '"m0"' in page and ">Ditto<" not in page and row(page, "FedAvg")[-1] == "0.725"
    for folder in ("none", "ditto1"):  # no folder is left of it
        shutil.rmtree(tmp_path / folder)
    page = report(tmp_path)
    assert "Ditto seed 0 :" in words(page) and row(page, "FedAvg")[-1] == "0.725"


def test_incidents_are_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [[(5, 10), (9, 10)]] * 3)
    path = tmp_path / "a" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "resumed_after": [1, 2], "actor_restarts": 2}))
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    faulty = [json.dumps({**json.loads(line), "faults": {"dropout": 1}}) for line in lines]
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(faulty) + "\n")
    text = words(report(tmp_path / "a"))
    assert "resumed after round 1, 2" in text and "restarts of dead actors: 2" in text
    assert "dropout: 3 of 6" in text


def test_a_warning_of_several_seeds_is_one_below_the_plot(tmp_path: Path) -> None:
    for method, seed in product(("local", "fedbn", "ditto"), (0, 1)):
        folder = make_run(tmp_path / f"{method}{seed}", [[(5, 10), (9, 10), (6, 10)]], method=method, seed=seed)
        path = folder / "summary.json"
        warnings = {"warnings": ["fedbn shares all", f"ce is {seed}.5"]} if method == "fedbn" else {}
        path.write_text(json.dumps({**json.loads(path.read_text()), **warnings}))
    table = tmp_path / "local0" / "per_client.csv"
    table.write_text(table.read_text().replace("9,10,0.5,", "9,10,101.0,"))  # 10.1 an example, where others have 0.05
    page = report(tmp_path)
    assert (
        "Local, seed 0: in the last round, the test loss of 1 client (client 1) is over ten times the median client's"
        in words(page)
    )
    assert words(page).count("shares all") == 1 and "FedBN, seeds 0,1: shares all." in words(page)
    assert words(page).count("ce is") == 1
    assert "FedBN, seeds 0,1: ce is 0.5 (the numbers are those of FedBN, seed 0)." in words(page)
    assert page.index('"forest') < page.index("shares all")
    assert re.findall(r"<span>(\w+)</span> \*</th>", page) == ["FedBN", "Local"], "a note below is about these rows"


def test_settings_environment_and_command(tmp_path: Path) -> None:
    model = {"hidden": [100], "variants": [], "name": None}
    make_run(tmp_path / "a", [[(5, 10), (9, 10)]], lr=0.25, batch_size=20, parts={"model": model})
    environment = {
        "format": FORMAT,
        "versions": {"python": "3.11.7", "torch": "2.14.1"},
        "code": {"commit": "abc123", "dirty": True},
        "machine": {"platform": "Linux", "cpus": 4, "cpus_usable": 2, "memory_mb": 8000, "gpus": []},
        "command": ["/home/someone/launch.py", "lr=0.25", "model.variants=[{hidden:[5]}]"],
    }
    (tmp_path / "a" / "environment.json").write_text(json.dumps(environment))
    page = report(tmp_path / "a")
    text = words(page)
    assert "git checkout abc123 python launch.py lr=0.25 'model.variants=[{hidden:[5]}]'" in text
    assert "with uncommitted changes" in text and "2 of 4 processors, 8.00 GB of memory, no GPU" in text
    assert "torch 2.14.1" in text and "/home/someone" not in page
    settings = page[page.index('id="settings"') : page.index("<details", page.index('id="settings"'))]
    assert "<dt>lr</dt><dd>0.25</dd>" in settings
    assert words(settings[settings.index("<dt>model</dt>") :]).startswith("model mlp hidden=[100] clients 2 ")
    assert "momentum" not in settings  # as by default
    assert "momentum: 0.0" in page  # but in config.yaml


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "run <script>", [[(5, 10), (9, 10)]], method='<b>mine</b> & "his"')
    make_run(tmp_path / "other", [[(6, 10), (8, 10)]], method="fedavg")
    page = report(tmp_path / "run <script>", tmp_path / "other")
    assert page.count("<script") == 1 and "<b>mine" not in page
    assert "&lt;b&gt;mine&lt;/b&gt; &amp; &#34;his&#34;" in page and "run &lt;script&gt;" in page


def test_pictures_are_in_the_page(tmp_path: Path) -> None:
    columns = {"label": "use", "client": "district", "features": ["age", "urban"]}
    make_run(tmp_path / "a", [[(5, 10), (9, 10)]], parts={"data": columns})
    inputs = {"shape": [5], "dtype": "float32", "scale": 1.0, "mean": None, "std": None, "tokens": None}
    about = {"hash": "0" * 64, "data": "digits", "partition": "dirichlet", "clients": 2, "classes": 3, "inputs": inputs}
    counts = [{split: row for split in ("train", "val", "test")} for row in ([3, 0, 2], [1, 4, 0])]
    (tmp_path / "a" / "partition.json").write_text(json.dumps({**about, "class_counts": counts}))
    half = np.array([[0.5, 0.25], [np.nan, 1.0]], np.float32)
    axes = Axis("receiver"), Axis("sender")
    members = Matrix("clusters", "", Axis("cluster"), Axis("client"), np.eye(2, dtype=np.float32))
    confusion = Matrix("confusion", "", Axis("class"), Axis("class"), half)
    alpha = Matrix("alpha/a", "Weights of <fusion>", *axes, half)
    write_matrices(tmp_path / "a", RoundMatrices(7, (confusion, alpha, members)))
    page = report(tmp_path / "a")
    text = words(page)
    assert "Weights of <fusion>, a" in text and "self 0.75, others 0.25" in text and "seed 0 A B" in text
    assert "Label: column use ; clients: column district ; 5 inputs from the columns age and urban." in text
    data = page[page.index('id="data"') : page.index('id="settings"')]
    assert re.findall(r"<title>(\d+)</title>", data) == ["3", "2", "1", "4"] and data.count(">5</text>") == 2


def test_the_page_loads_nothing(page: str) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|<link(?! rel=\"icon\" href=\"data:,\")", page)
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {f"#{name}" for name in re.findall(r'id="([^"]*)"', page)}
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert {name.removeprefix("#") for name in re.findall(r'href="(#[^"]*)"', page)} <= set(ids)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two methods by two learning rates by two momenta; validation and test accuracy rank them in opposite orders."""
    root = tmp_path_factory.mktemp("grid")
    for number, (method, lr, momentum) in enumerate(product(("fedavg", "ditto"), (0.5, 0.1), (0.0, 0.5))):
        settings = {"val": [[(number + 1, 10)] * 2], "method": method, "lr": lr, "momentum": momentum}
        make_run(root / f"{number}", [[(16 - number, 20)] * 2], **settings)
    return report(*sorted(root.iterdir()))


def test_of_a_grid_the_best_by_validation_are_shown(grid: str) -> None:
    """The last setting of each method has the best validation and the worst test accuracy."""
    assert row(grid, "FedAvg")[-1] == "0.650" and row(grid, "Ditto")[-1] == "0.450"
    assert "settings of" not in words(grid[grid.index("<h1>") : grid.index("</h1>")])
    assert "<dt>momentum</dt><dd>0.5</dd>" in grid


def test_conditions_of_an_experiment_are_no_settings_to_choose_from(tmp_path: Path) -> None:
    """The best learning rate of every method by validation is shown for each attack, which nobody chooses."""
    for n, (method, attack, lr) in enumerate(product(("local", "fedavg"), ("none", "alie", "ipm"), (0.1, 0.2))):
        counts = [[(n // 2 + 5 * (lr < 0.2), 20)] * 3]
        make_run(tmp_path / f"{n:02}", counts, val=counts, method=method, names={"attack": attack}, lr=lr)
    page, names = report(tmp_path / "*"), product(("Local", "FedAvg"), ("none", "alie", "ipm"))
    shown = {name: row(page, f"{name[0]} attack={name[1]}")[-1] for name in names}
    assert [*shown.values()] == [f"{(n + 5) / 20:.3f}" for n in range(6)] and 'id="sweep"' in page


def test_a_grid_has_a_cell_for_every_setting(grid: str) -> None:
    table = re.findall(r"<table.*?</table>", grid[grid.index('id="sweep"') :], re.DOTALL)[0]
    cells = re.findall(r'<td class="num heat( best)?" style="--shade:(\d+)%">([\d.]+)<br><small>([\d.]+)', table)
    lines = re.findall(r'<th scope="row">(\w+)</th><td>([\d.]+)</td>', table)
    assert lines == [("FedAvg", "0.0"), ("FedAvg", "0.5"), ("Ditto", "0.0"), ("Ditto", "0.5")]
    # by line: momentum, across: lr 0.1 and 0.5; run n has n + 1 of 10 right on validation and 16 - n of 20 on test data
    order = [2, 0, 3, 1, 6, 4, 7, 5]
    assert [(float(val), float(test)) for *_, val, test in cells] == [((n + 1) / 10, (16 - n) / 20) for n in order]
    assert [n for n, (best, *_) in zip(order, cells, strict=True) if best] == [3, 7]
    assert [int(shade) for _, shade, *_ in cells[:4]] == [37, 0, 55, 18]


def test_unlike_runs_have_a_section_for_each_set(tmp_path: Path) -> None:
    """Two methods on each of two partitions; one page with two comparisons."""
    for number in range(2):
        for method in ("fedavg", "local"):
            rounds, parts = [[(5 + number, 10)] * 2], {"partition": {"alpha": number + 1.0}}
            make_run(tmp_path / f"{method}{number}", rounds, method=method, digest=f"{number:064d}", parts=parts)
    page = report(*sorted(tmp_path.iterdir()))
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(set(ids)) == len(ids) and {"table", "table-1"} <= set(ids)
    assert row(page, "FedAvg", "forest study") == ["FedAvg", "", "0.500 0.0", "", "0.600 0.0"]
    one = report(*sorted(tmp_path.glob("*0")))
    assert "forest study" not in one and 'id="table-1"' not in one


def test_a_study_of_tune_has_its_trials_and_the_chosen_values(tmp_path: Path) -> None:
    for number, right in enumerate((4, 7, 6)):
        counts = [[(right, 10)] * 2]
        make_run(tmp_path / "trials" / f"fedavg-00{number}", counts, val=counts, lr=0.1 * (number + 1))
    make_run(tmp_path / "runs" / "fedavg-s1", [[(7, 10)] * 2], val=[[(7, 10)] * 2], seed=1, lr=0.2)
    plan = {"methods": ["fedavg"], "trials": 3, "space": {"fedavg": {"lr": [0.1, 0.2]}}}
    (tmp_path / "tuned.json").write_text(json.dumps({"plan": plan, "chosen": {"fedavg": {"lr": 0.2}}}))
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert row(page, "FedAvg", 'aria-label="Chosen values"') == [
        "FedAvg",
        "3",
        "lr=0.2 lr at an edge",
        "lr=[0.1,0.2]",
        "0.7000",
    ]
    dots = re.findall(r'class="gain"><title>(lr=[\d.]+): [\d.]+</title></circle>(<circle [^>]*class="ring")?', page)
    assert [bool(ring) for _, ring in dots] == [False, True, False] and dots[1][0] == "lr=0.2"


# Runs that are unlike others, reported without a warning -------------------------------------------------------------


def test_nothing_evaluated_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a", [[(3, 10), (4, 10)]], every=3, complete=False)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    (folder / "run.log").write_text("error: the run ended: loss is inf\n")
    assert main(["report", str(folder)]) == 2
    found = capsys.readouterr().err
    assert "no run has an evaluated round" in found and "2 of 3 rounds are done: loss is inf" in found


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.yaml", lambda text: "{}"),
        ("summary.json", lambda text: "{}"),
        ("summary.json", lambda text: text.replace('"clients": 2', '"clients": "two"')),
        ("summary.json", lambda text: text.replace('"name": "accuracy"', '"name": "other"')),
        ("summary.json", lambda text: text.replace('"phase"', '"phases"')),
        ("metrics.jsonl", lambda text: text.replace('"total"', '"all"')),
        ("environment.json", lambda text: text.replace('"gpus"', '"none"')),
        ("metrics.jsonl", lambda text: text.replace('"cohort": 2', '"cohort": null')),
        ("per_client.csv", lambda text: text + text.splitlines()[-1] + "\n"),
        ("partition.json", lambda text: "no JSON"),
        ("per_client.csv", lambda text: "nothing of the kind"),
        ("metrics.jsonl", lambda text: text.partition("\n")[0] + "\n"),
        ("metrics.jsonl", lambda text: ""),
    ],
)
def test_damaged_runs_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: Callable[[str], str]
) -> None:
    """Also files that can be read and have less, or more, than the run says."""
    folder = make_run(tmp_path / "a", [[(3, 10), (4, 10)]] * 3)
    text = (folder / name).read_text()
    (folder / name).write_text(change(text))
    assert main(["report", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and name in line


def test_a_killed_run_has_the_rounds_and_the_time_of_its_records(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [[(5, 10), (9, 10)]] * 3, rounds=8, complete=False, seconds=2.0)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "rounds": 0, "seconds": 0.0}))  # as a start writes it
    groups = group_runs([read_run(folder)])
    assert list(incomplete(groups[0].runs)) == [f"{folder} is not complete: 3 of 8 rounds are done"]
    assert comparison.row(groups[0], "last").figures["seconds_total"].mean == 6.0
