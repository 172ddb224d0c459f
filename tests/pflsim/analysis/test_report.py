"""What stands in a report, against numbers worked out here from the counts that the runs were made of."""

import html
import json
import re
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_run

from pflsim.analysis.comparison import row as row_of
from pflsim.analysis.groups import group_runs
from pflsim.analysis.report import main
from pflsim.analysis.runs import incomplete, read_run
from pflsim.records.environment import FORMAT
from pflsim.records.trace import RoundMatrices, write_matrices
from pflsim.types import Axis, Matrix

TESTS = 20
"""Test examples of every client."""
CLIENTS = 20
"""So that the worst tenth are two."""


def rights(rng: np.random.Generator, low: int, rounds: int = 4) -> list[list[tuple[int, int]]]:
    return [[(int(n), TESTS) for n in rng.integers(low, TESTS + 1, CLIENTS)] for _ in range(rounds)]


def report(*arguments: object) -> str:
    """The page, written beside the first run."""
    out = Path(str(arguments[0])).parent / "page.html"
    assert main([*map(str, arguments), "--out", str(out)]) == 0
    return out.read_text()


def words(page: str) -> str:
    """What a reader sees, in one line."""
    body = re.sub(r"<style>.*?</style>|<svg.*?</svg>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def row(page: str, name: str, table: int = 0) -> list[str]:
    """The cells of the table's row that begins with a name."""
    found = re.findall(r"<table>.*?</table>", page, re.DOTALL)[table]
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


def expected(method: str, seed: int) -> np.ndarray:
    low, best = (12, 1) if method == "local" else (2, 1), (1, 2)[seed]
    return np.sort([n / t for n, t in rights(np.random.default_rng([seed, low[0]]), low[0])[best]])


def test_headline_figures(page: str) -> None:
    for method in ("local", "fedavg"):
        rates = [expected(method, seed) for seed in (0, 1)]
        figures = [[r.mean(), r.mean(), r[:2].mean(), np.median(r), r[-2:].mean(), r.std()] for r in rates]
        wanted = [f"{statistics.fmean(f):.3f} ± {statistics.stdev(f):.3f}" for f in zip(*figures, strict=True)]
        cells = row(page, method, 1)
        assert cells[3:9] == wanted  # all clients have as many test examples
        assert cells[2] == "2, 3"
    assert row(page, "fedavg", 1)[1] == "global, as received from the server"
    assert "oracle" not in words(page[page.index('id="short"') : page.index("Other rounds")])
    assert "(oracle)" in words(page)
    # 20 clients, 2 rounds of seed 0 and 3 of seed 1: 2.5 rounds on the mean
    assert row(page, "fedavg", 1)[9:] == ["50.0 kB", "150 kB", "5.0 s"]
    assert row(page, "local", 1)[9:] == ["0 B", "0 B", "5.0 s"]


def test_the_summary_compares_with_local_and_has_the_bytes(page: str) -> None:
    means, worst = (
        {m: [take(expected(m, seed)) for seed in (0, 1)] for m in ("local", "fedavg")}
        for take in (np.mean, lambda r: r[:2].mean())
    )
    local, fedavg = row(page, "local"), row(page, "fedavg")
    for cells, method in ((local, "local"), (fedavg, "fedavg")):
        wanted = [f"{statistics.fmean(f):.3f} ± {statistics.stdev(f):.3f}" for f in (means[method], worst[method])]
        assert [cells[1], cells[3]] == wanted
    difference = statistics.fmean(means["fedavg"]) - statistics.fmean(means["local"])
    assert fedavg[4] == f"{difference:.4f}".replace("-", "−")
    assert " to " in fedavg[5] and " to −0." in fedavg[6] and fedavg[7:] == ["clear", "200 kB"]
    assert local[4:] == ["—", "—", "—", "reference", "0 B"]
    assert "fedavg is clearly worse" in words(page[page.index('id="short"') : page.index("<table>")])


def test_without_validation_data_the_last_round_is_the_headline(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [[(1, 10), (9, 10)], [(4, 10), (8, 10)]])
    page = report(tmp_path / "a")
    assert row(page, "fedavg", 1)[2:6] == ["2", "0.6000", "0.6000", "0.4000"]
    assert "no validation data" in words(page)


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", [[(1, 10), (9, 10)]])
    assert main([str(tmp_path / "none")]) == 2
    assert main([str(tmp_path / "a"), "--out", "nowhere/x.html"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines)


def test_what_cannot_be_compared_has_a_banner(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [[(5, 10), (9, 10)]], method="fedavg", digest="a" * 64)
    make_run(tmp_path / "b", [[(1, 10), (2, 10)]], method="ditto", digest="b" * 64)
    text = words(report(tmp_path / "a", tmp_path / "b"))
    assert "should not be compared" in text and "partition hash" in text
    assert "clear" not in text and "difference to" not in text


def test_an_incomplete_run_is_marked(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [[(5, 10), (9, 10)]] * 3, rounds=8, complete=False)
    text = words(report(tmp_path / "a"))
    assert "a is not complete: 3 of 8 rounds are done." in text


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


def test_settings_environment_and_command(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [[(5, 10), (9, 10)]], lr=0.25, batch_size=20)
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
    settings = page[page.index('id="settings"') : page.index("<details>", page.index('id="settings"'))]
    assert "<code>lr=0.25</code>" in settings
    assert "batch_size" not in settings  # as by default
    assert "batch_size: 20" in page  # but in config.yaml


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "run <script>", [[(5, 10), (9, 10)]], method='<b>mine</b> & "his"')
    make_run(tmp_path / "other", [[(6, 10), (8, 10)]], method="fedavg")
    page = report(tmp_path / "run <script>", tmp_path / "other")
    assert "<script" not in page and "<b>mine" not in page
    assert "&lt;b&gt;mine&lt;/b&gt; &amp; &#34;his&#34;" in page and "run &lt;script&gt;" in page


@pytest.mark.slow
def test_pictures_are_in_the_page(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [[(5, 10), (9, 10)]])
    about = {"hash": "0" * 64, "data": "digits", "partition": "dirichlet", "clients": 2, "classes": 3}
    counts = [{split: row for split in ("train", "val", "test")} for row in ([3, 0, 2], [1, 4, 0])]
    (tmp_path / "a" / "partition.json").write_text(json.dumps({**about, "class_counts": counts}))
    half = np.array([[0.5, 0.5], [np.nan, 1.0]], np.float32)
    names = ("alpha/a", "alpha/b", "confusion")
    matrices = tuple(Matrix(name, "Weights of <fusion>", Axis("receiver"), Axis("sender"), half) for name in names)
    write_matrices(tmp_path / "a", RoundMatrices(7, matrices))
    page = report(tmp_path / "a")
    charts = re.findall(r'<svg[^>]* aria-label="(Examples|Heat map)[^"]*".*?</svg>', page, re.DOTALL)
    assert charts == ["Examples", "Heat map", "Heat map"]
    partition = page[page.index('id="data"') : page.index('id="matrices"')]
    assert {">6<", ">8<"} <= set(re.findall(r">\d+<", partition)) and "var(--ink)" in partition
    assert "fedavg, seed 0, round 7: Weights of <fusion>." in words(page)


def test_the_page_loads_nothing(page: str) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link(?! rel=\"icon\" href=\"data:,\")", page)
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
    assert row(grid, "fedavg")[1:3] == ["lr=0.1 momentum=0.5", "0.6500"]
    assert row(grid, "ditto")[1:3] == ["lr=0.1 momentum=0.5", "0.4500"]
    assert len(re.findall(r'aria-label="[^"]*every client', grid)) == 2


def test_a_grid_has_a_cell_for_every_setting(grid: str) -> None:
    table = re.findall(r"<table>.*?</table>", grid, re.DOTALL)[1]
    cells = re.findall(r'<td class="n heat( best)?" style="--shade:(\d+)%">([\d.]+)<br><small>([\d.]+)', table)
    lines = re.findall(r'<th scope="row">(\w+)</th><td>([\d.]+)</td>', table)
    assert lines == [("fedavg", "0.0"), ("fedavg", "0.5"), ("ditto", "0.0"), ("ditto", "0.5")]
    # by line: momentum, across: lr 0.1 and 0.5; run n has n + 1 of 10 right on validation and 16 - n of 20 on test data
    order = [2, 0, 3, 1, 6, 4, 7, 5]
    assert [(float(val), float(test)) for *_, val, test in cells] == [((n + 1) / 10, (16 - n) / 20) for n in order]
    assert [n for n, (best, *_) in zip(order, cells, strict=True) if best] == [3, 7]
    assert [int(shade) for _, shade, *_ in cells[:4]] == [37, 0, 55, 18]


@pytest.mark.slow
def test_unlike_runs_have_a_section_for_each_set(tmp_path: Path) -> None:
    """Two methods on each of two partitions; one page with two comparisons."""
    for number in range(2):
        for method in ("fedavg", "local"):
            rounds, parts = [[(5 + number, 10)] * 2], {"partition": {"alpha": number + 1.0}}
            make_run(tmp_path / f"{method}{number}", rounds, method=method, digest=f"{number:064d}", parts=parts)
    page = report(*sorted(tmp_path.iterdir()))
    assert words(page).count("Client by client against local") == 2 and "2 sets" in words(page)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(set(ids)) == len(ids) and {"accuracy", "accuracy-1"} <= set(ids)
    assert row(page, "fedavg", 0) == ["fedavg", "0.0000, not clear", "0.0000, not clear"]
    one = report(*sorted(tmp_path.glob("*0")))
    assert "on each benchmark" not in words(one) and "2 sets" not in words(one) and 'id="accuracy-1"' not in one


@pytest.mark.slow
def test_a_grid_of_different_partitions_is_not_ranked(tmp_path: Path) -> None:
    for number in range(8):
        alpha = {"partition": {"alpha": number + 1.0}}
        make_run(tmp_path / f"{number}", [[(number, 10)] * 2], digest=f"{number:064d}", parts=alpha)
    page = report(*sorted(tmp_path.iterdir()))
    assert 'id="grid"' not in page and "should not be compared" in words(page)


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [[(3, 10), (4, 10)]] * 3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["losses"] = {"ce": None, "prox": 1e-9 * 10.0 ** (3 * line["round"])}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "Loss term prox against rounds." in report(folder)


def test_clients_without_test_examples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [[(0, 0), (4, 10), (6, 10)]])
    assert '<td class="n">0.5000</td>' in report(folder)


def test_nothing_evaluated_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a", [[(3, 10), (4, 10)]], every=3, complete=False)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    assert main([str(folder)]) == 2
    assert "no evaluated round" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.yaml", lambda text: "{}"),
        ("summary.json", lambda text: "{}"),
        ("summary.json", lambda text: text.replace('"clients": 2', '"clients": "two"')),
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
    assert main([str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and name in line


def test_a_killed_run_has_the_rounds_and_the_time_of_its_records(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [[(5, 10), (9, 10)]] * 3, rounds=8, complete=False, seconds=2.0)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "rounds": 0, "seconds": 0.0}))  # as a start writes it
    groups = group_runs([read_run(folder)])
    assert list(incomplete(groups[0].runs)) == [f"{folder} is not complete: 3 of 8 rounds are done"]
    assert row_of(groups[0], "last").figures["seconds_total"].mean == 6.0
