"""What cells of tables are read as: numbers, names and categories, what is missing, what stops a run, and the card."""

from __future__ import annotations

import decimal
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn import datasets
from support import settings_of

import pflsim
from pflsim.data.content import partition_hash
from pflsim.data.dataset import Dataset
from pflsim.data.federate import load_federation
from pflsim.data.sources.table import load
from pflsim.errors import SettingsError

WORDS = ("data=table", "data.path=t.csv", "data.label=y", "data.client=site")
VISITS = Path(__file__).resolve().parents[3] / "examples" / "visits.csv"
N = 60
rng = np.random.default_rng(0)
BASE = pd.DataFrame({
    "site": np.array(["Bern", "Chur", "Genf"])[np.arange(N) % 3], "a": rng.normal(size=N).round(3),
    "b": rng.normal(size=N).round(3), "y": np.array(["no", "yes"])[rng.integers(0, 2, N)],
})  # fmt: skip


@pytest.fixture(autouse=True)
def folder(here: Path) -> None:
    """Tests work in a folder of their own."""


def read(text: str | pd.DataFrame, name: str = "t.csv", **settings: Any) -> Dataset:
    """Write a file, or a frame as CSV without its index, and read it."""
    if isinstance(text, pd.DataFrame):
        text = text.to_csv(index=False)
    Path(name).write_text(text, encoding="utf-8")
    return load(path=name, **{"label": "y", "client": "site", "min_examples": 1, **settings})


def inputs(data: Dataset) -> dict[str, str]:
    """The kinds of the columns, without label and client."""
    return {c["name"]: c["kind"] for c in data.card.columns if c["kind"] not in ("label", "client", "group")}


def column(values: Any, **settings: Any) -> Dataset:
    """The table with one more column."""
    return read(BASE.assign(new=values), **settings)


@pytest.mark.parametrize(
    ("cells", "names"),
    [
        (["007", "7", "07"], ("007", "07", "7")),
        (["1029384756102938475", "1029384756102938476", ""], ("1029384756102938475", "1029384756102938476")),
        (["3.0", "12.0", "5"], ("3", "5", "12")),
        (["3.0", "12.5", "5"], ("3.0", "5", "12.5")),
        ([" Bern ", "Bern", "St.  Gallen"], ("Bern", "St. Gallen")),
        (["Z\u00fcrich", "Zu\u0308rich", "Bern"], ("Bern", "Z\u00fcrich")),
        (["10", "9", "NA"], ("9", "10")),
        (["1e3", "20", "?"], ("20", "1e3")),
        (["True", "False", "True"], ("False", "True")),
    ],
)
def test_names_of_clients_are_as_written(cells: list[str], names: tuple[str, ...]) -> None:
    assert read(BASE.assign(site=cells * (N // 3))).client_names == names


def test_clients_of_typed_files_are_as_written() -> None:
    ids = [1029384756102938475, None, 1029384756102938476] * (N // 3)
    frame = BASE.assign(site=pd.array(ids, dtype="Int64"))
    frame.to_parquet("t.parquet")
    Path("t.jsonl").write_text(
        "\n".join(json.dumps({**r, "site": i}) for r, i in zip(BASE.to_dict("records"), ids, strict=True))
    )
    for path in ("t.parquet", "t.jsonl"):
        data = load(path=path, label="y", client="site", min_examples=1)
        assert data.client_names == ("1029384756102938475", "1029384756102938476") and len(data.y) == N * 2 // 3
    with pytest.raises(SettingsError, match="site.*text"):
        load(**pflsim.Table(BASE.assign(site=np.array(ids, float)), label="y", client="site").settings())


@pytest.mark.parametrize("key", ["label", "client", "group"])
@pytest.mark.parametrize("word", ["NA", "None", "NULL", "NaN", "\\N", "n/a", "-", "?"])
def test_a_word_for_missing_among_names_is_asked_about(key: str, word: str) -> None:
    name = {"label": "y", "client": "site", "group": "g"}[key]
    frame = BASE.assign(g=BASE["site"])
    frame.loc[::4, name] = word
    group = {"group": "g"} if key == "group" else {}
    with pytest.raises(SettingsError, match=rf"15 cells {re.escape(word)}.*data\.missing=\[") as error:
        read(frame, **group)
    remedy = shlex.split(str(error.value).partition(f"{word}: ")[2].partition(" leaves")[0])
    words = [*WORDS, *(["data.group=g"] if group else []), *remedy]
    assert len(load_federation(settings_of(*words, "clients=3", "partition=iid"))[0].y) == N * 3 // 4
    assert len(read(frame, **group, missing=[word.lower()]).y) == N * 3 // 4
    assert len(read(frame, **group, missing=[]).y) == N


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["1", "2", "?"], [1, 2, np.nan]),
        (["1.5", "NA", ""], [1.5, np.nan, np.nan]),
        (["1", "\\N", "3"], [1, np.nan, 3]),
        (["-", ".", "7"], [np.nan, np.nan, 7]),
        (["TRUE", "FALSE", "NA"], [1, 0, np.nan]),
        (["None", "nan", "-1e3"], [np.nan, np.nan, -1000]),
        (["-99", "1", "2"], [np.nan, 1, 2]),
    ],
)
def test_numbers_with_words_for_missing(cells: list[str], values: list[float]) -> None:
    data = column(cells * (N // 3), missing=[-99])
    assert inputs(data)["new"] == "number"
    known = np.array(values * (N // 3))
    found = next(c for c in data.card.columns if c["name"] == "new")
    assert found["missing"] == np.isnan(known).sum() and found["mean"] == pytest.approx(np.nanmean(known))


@pytest.mark.parametrize(
    ("cells", "missing", "count"),
    [
        (["None", "Good", "Poor"], None, 3), (["None", "Good", "Poor"], ["None"], 2), (["NA", "x", ""], None, 2),
        (["?", "a", "b"], [], 3), (["a", "b", "missing"], ["missing"], 2), (["A", "a", " a"], None, 2),
    ],
)  # fmt: skip
def test_words_among_categories_are_categories_unless_listed(
    cells: list[str], missing: list[str] | None, count: int
) -> None:
    data = column(cells * (N // 3), missing=missing)
    found = next(c for c in data.card.columns if c["name"] == "new")
    assert found["kind"] == "category" and len(found["values"]) == count
    asked = missing is None and {*cells} & {"None", "NA"}
    assert any("data.missing" in note and "'new'" in note for note in data.notes) == bool(asked)


NUMBERS = [str(v) for v in rng.normal(size=N).round(3)]
DATES = pd.date_range("2026-01-01", periods=N)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([*NUMBERS[:-2], "missing", "<0.1"], "missing, <0.1"),
        ([*NUMBERS[:40], *["low"] * 20], "low"),
        ([f"{1000 + i},50" for i in range(N)], "marks"),
        ([f"{i}%" for i in range(N)], "marks"),
        ([f"€ {i}.000,00" for i in range(N)], "marks"),
        ([f"{i} 000" for i in range(N)], "marks"),
        ([d.strftime("%Y-%m-%d") for d in DATES], "dates"),
        ([d.strftime("%d.%m.%Y") for d in DATES], "dates"),
        ([d.strftime("%m/%d/%Y") for d in DATES], "dates"),
        ([d.strftime("%Y/%m/%d %H:%M") for d in DATES], "dates"),
        ([d.strftime("%d%b%Y") for d in DATES], "dates"),
        ([f"name {i}" for i in range(N)], "60 different values"),
        ([f"name {i % 35}" for i in range(N)], "35 different values"),
    ],
)  # fmt: skip
def test_columns_that_are_no_categories_stop_the_run_all_at_once(values: list[str], says: str) -> None:
    frame = BASE.assign(new=values, other=[f"text {i}" for i in range(N)], c=1.5)
    with pytest.raises(SettingsError, match=r"data\.exclude=\[c,new,other\]") as error:
        read(frame, exclude=["c"])
    assert says in str(error.value)
    assert {*inputs(read(frame, exclude=["c", "new", "other"]))} - {"c", "new", "other"} == {"a", "b"}
    assert inputs(read(frame, features=["a", "new"]))["new"] == "category"
    assert inputs(read(frame, categorical=["new"], exclude=["other"]))["new"] == "category"


def test_dates_of_typed_files_stop_the_run() -> None:
    BASE.assign(day=DATES).to_parquet("t.parquet")
    with pytest.raises(SettingsError, match=r"'day' is datetime.*data\.exclude=\[day\]"):
        load(path="t.parquet", label="y", client="site")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("y,site,a,y\n1,x,2,1\n", "'y'"),
        ("y;a;a\n1;2;3\n", "'a'"),
        ("5.1,3.5,1.4,0.2,setosa\n4.9,3.0,1.4,0.2,setosa\n", "header"),
        ("1,1,0,3\n2,1,0,3\n", "header"),
        ("y,a\n1,2,3\n4,5,6\n", "y,a, .* 3 cells"),
        ("[{}]", "objects"),
        ("y,a\n1,inf\n2,0.5\n", "infinite"),
        ("y;a\n1,5;2\n2.5;3\n", "1,5.*2.5"),
        ('{"y": 1, "a": 2, "a": 3}', "'a'"),
    ],
)
def test_files_that_are_not_what_they_seem_are_refused(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        read(text, name="t.json" if text[0] in "[{" else "t.csv", client=None)


def test_numbers_of_half_of_europe() -> None:
    frame = BASE.assign(grade=np.tile([1.0, 2.3, 3.7], N // 3), income=["987", "1.011", "18.992"] * (N // 3))
    frame.drop(columns="income").to_csv("t.csv", sep=";", decimal=",", index=False)
    data = load(path="t.csv", label="grade", client="site")
    assert data.task == "regression" and sorted({*data.y[:, 0].tolist()}) == pytest.approx([1, 2.3, 3.7])
    excel = read("y;a\r\n1;1,5\r\n0;2,5\r\n", client=None)
    assert [c.get("mean") for c in excel.card.columns] == [None, 2.0]
    r = read("y;a\n1,5;NA\nNA;0,5\n2,5;1,5\n", client=None, missing=["NA"])
    assert r.y.ravel().tolist() == [1.5, 2.5] and inputs(r) == {"a": "number"}
    for separator, mark in ((";", "."), (";", ","), (",", ".")):
        cells = frame["income"].str.replace(".", mark)
        with pytest.raises(SettingsError, match=rf"'income' has 1\{mark}011 .*thousands"):
            read(frame.assign(income=cells).drop(columns=["a", "b", "grade"]).to_csv(sep=separator, index=False))
    assert inputs(read(frame.assign(income=["987.5", "1.011", "18.992"] * (N // 3))))["income"] == "number"


def test_the_remedy_for_a_column_can_be_pasted() -> None:
    frame = BASE.assign(**{name: [f"t{n}" for n in range(N)] for name in ("2019", "a=b", "it's", "Größe: cm", "null")})
    frame.to_csv("t.csv", index=False)
    with pytest.raises(SettingsError) as caught:
        load_federation(settings_of(*WORDS))
    command = re.search(r"Leave them out with (.*), mend them", str(caught.value))
    assert command and load_federation(settings_of(*WORDS, *shlex.split(command[1])))


def test_a_column_of_lists_is_named_and_can_be_left_out() -> None:
    records = [{**record, "tags": ["a", "b"], "none": None} for record in BASE.to_dict("records")]
    Path("t.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(SettingsError, match=r"'tags'.*data\.exclude=\[tags\]"):
        load(path="t.jsonl", label="y", client="site")
    with pytest.raises(SettingsError, match="'tags' is lists"):
        load(path="t.jsonl", label="y", client="site", features=["tags", "a"])
    found = inputs(load(path="t.jsonl", label="y", client="site", exclude=["tags"]))
    assert found == {"a": "number", "b": "number", "tags": "not used", "none": "not used"}


def test_new_classes_alone_in_the_test_part_are_refused_unless_the_parts_are_joined() -> None:
    BASE.assign(y="a").to_csv("t.csv", index=False)
    BASE.assign(y="b").to_csv("test.csv", index=False)
    with pytest.raises(SettingsError, match=r"test part \(b\), but a"):
        load_federation(settings_of(*WORDS, "data.test=test.csv"))
    assert len(load_federation(settings_of(*WORDS, "data.test=test.csv", "split=merged"))[1].test) == 3


def test_what_only_test_rows_have_is_named() -> None:
    frame = BASE.assign(sex=["f", "m"] * (N // 2))
    frame.assign(sex=frame["sex"].str.upper()).to_csv("test.csv", index=False)
    assert any("sex F, M" in note for note in read(frame, test="test.csv").notes)
    assert any("labels are -99" in note for note in read(BASE.assign(y=[-99, 1, 2, 1, 2] * (N // 5))).notes)


def test_columns_with_most_missing_cells_come_first() -> None:
    frame = BASE.copy()
    frame.loc[:1, "a"], frame.loc[:8, "b"] = np.nan, np.nan
    assert dict(read(frame).card.lines)["missing cells"].startswith("b 9, a 2")


@pytest.mark.parametrize(("separator", "decimal"), [(";", ","), (";", "."), ("\t", "."), (",", ".")])
@pytest.mark.parametrize(("encoding", "path"), [("utf-8", "t.csv"), ("utf-8-sig", "t.csv"), ("utf-8", "t.csv.gz")])
def test_separators_and_decimal_marks(separator: str, decimal: str, encoding: str, path: str) -> None:
    BASE.assign(note='x, "y"; z').to_csv(path, sep=separator, decimal=decimal, index=False, encoding=encoding)
    data = load(path=path, label="y", client="site")
    means = {c["name"]: c.get("mean") for c in data.card.columns}
    assert means["a"] == pytest.approx(BASE["a"].mean()) and data.client_names == ("Bern", "Chur", "Genf")
    assert inputs(data) == {"a": "number", "b": "number", "note": "category"}


def test_typed_columns_keep_their_types() -> None:
    frame = BASE.assign(
        d=[decimal.Decimal(str(v)) for v in BASE["a"]], code=[str(i % 3) for i in range(N)], truth=BASE["a"] > 0,
        cut=pd.Categorical(np.arange(N) % 3),
        mixed=pd.Series([*BASE["b"][:-1], "?"], dtype=object), n=pd.array([*range(N - 1), None], dtype="Int64"),
    )  # fmt: skip
    kinds = {"d": "number", "code": "category", "truth": "number", "mixed": "number", "n": "number", "cut": "category"}
    found = inputs(load(**pflsim.Table(frame, label="y", client="site").settings()))
    assert {name: found[name] for name in kinds} == kinds
    frame.drop(columns="mixed").set_index("site").to_parquet("t.parquet")
    found = inputs(load(path="t.parquet", label="y", client="site"))
    assert {name: found[name] for name in ("d", "code", "truth", "n")} == {
        k: v for k, v in kinds.items() if k not in ("mixed", "cut")
    }
    indexed = pflsim.Table(BASE.set_index(pd.Index(np.arange(N) % 4 / 2, name="i")), label="y", client="site")
    assert inputs(load(**indexed.settings())) == {"i": "not used", "a": "number", "b": "number"}
    assert inputs(load(**replace(indexed, features=["i"]).settings()))["i"] == "number"


@pytest.mark.parametrize("first", [0, 1])
def test_a_column_that_counts_the_rows_is_no_input(first: int) -> None:
    frame = BASE.set_axis(range(first, N + first))
    data = read(frame.to_csv())
    assert inputs(data) == {"Unnamed: 0": "not used", "a": "number", "b": "number"}
    assert inputs(read(frame.to_csv(), features=["Unnamed: 0", "a"]))["Unnamed: 0"] == "number"
    shuffled = frame.iloc[::-1].to_csv()
    assert inputs(read(shuffled))["Unnamed: 0"] == "number" and any("Unnamed: 0" in n for n in read(shuffled).notes)


@pytest.mark.parametrize(
    ("values", "settings", "named"),
    [
        ([-99, -99, *rng.normal(size=N - 2)], {}, "-99"),
        ([*rng.normal(size=N - 2), 999, 999], {}, "999"),
        ([*rng.normal(size=N - 1), 999], {}, ""),
        ([*rng.integers(0, 1000, N - 2), 999, 999], {}, ""),
        ([-99, -99, *rng.normal(size=N - 2)], {"missing": [-99]}, ""),
        (rng.permutation(N) + 100, {}, "data.exclude=[new]"),
        (np.where(BASE["y"] == "yes", 2, 3), {}, "single label"),
        (np.where(BASE["y"] == "yes", "home", "ward"), {}, "single label"),
        (["01067", "8004", "3011"] * (N // 3), {}, "data.categorical=[new]"),
        (["01067", "8004", "3011"] * (N // 3), {"categorical": ["new"]}, ""),
        ([*["Chur", "chur"] * (N // 2)], {}, "Chur, chur"),
        ([*["0.5", "-0.25"] * (N // 2)], {}, ""),
    ],
)
def test_doubtful_columns_are_named(values: Any, settings: dict[str, Any], named: str) -> None:
    notes = [note for note in column(values, **settings).notes if "new" in note]
    assert bool(notes) == bool(named) and all(named in note for note in notes)


@pytest.mark.parametrize(
    ("cells", "named"),
    [
        ([*rng.normal(size=N - 3), -99, -99, -99], "3 labels are -99"),
        (["12%", "7%", "12%"] * (N // 3), "12%"),
        (["1,5", "2,5"] * (N // 2), "1,5"),
        (["a", "b"] * (N // 2), ""),
    ],
)
def test_doubtful_labels_are_named(cells: list[Any], named: str) -> None:
    notes = [note for note in read(BASE.assign(y=cells)).notes if "label" in note]
    assert bool(notes) == bool(named) and all(named in note for note in notes)


def test_names_of_clients_and_labels_that_differ_in_case_only() -> None:
    frame = BASE.assign(site=["Bern", "bern", "Chur"] * (N // 3), y=["no", "No"] * (N // 2))
    assert any("Bern, bern" in note and "No, no" in note and "Chur" not in note for note in read(frame).notes)


@pytest.mark.parametrize(
    ("cells", "values", "classes"),
    [
        (["0", "2", "5"], tuple(range(6)), 6), (["7", "07", "7"], ("07", "7"), 2),
        (["True", "False", ""], (False, True), 2), (["5", "3", "9"], (3, 5, 9), 3), (["1.0", "0.0", ""], (0, 1), 2),
        (["0.5", "2.0", "3.0"], None, 1),
        (["b", "a", "c"], ("a", "b", "c"), 3), (["10", "9", "x"], ("10", "9", "x"), 3), (["3", "NA", "4"], (3, 4), 2),
        ([f"{10**19}", f"{10**19 + 1}", f"{10**19}"], (f"{10**19}", f"{10**19 + 1}"), 2),
    ],
)  # fmt: skip
def test_labels_are_as_written(cells: list[str], values: tuple[Any, ...] | None, classes: int) -> None:
    data = read(BASE.assign(y=cells * (N // 3)))
    assert (data.values, data.num_classes) == (values, classes)
    assert data.y.dtype == (np.float32 if values is None else np.int64)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wine", "9879e12f924d4ba5"), ("breast_cancer", "39c6dad00de19f4a"), ("iris", "232bba0a7362a2fd"),
        ("visits", "98db4131a9681b37"),
    ],
)  # fmt: skip
def test_plain_tables_have_the_partition_of_earlier_versions(name: str, expected: str) -> None:
    """Hashes of commit 7eb01b5, by its reader."""
    words = ["data=table", f"data.path={name}.csv", "method=fedavg", "model=linear", "seed=3"]
    words += ["data.min_examples=2", "split.stratify=true"]
    if name == "visits":
        pd.read_csv(VISITS).to_csv("visits.csv", index=False)
        words += ["data.label=readmitted", "data.client=hospital"]
    else:
        frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
        frame.rename(columns=lambda c: re.sub("[()]", "", c.replace(" ", "_"))).to_csv(f"{name}.csv", index=False)
        words += ["data.label=target", "partition=iid", "clients=4"]
    assert partition_hash(*load_federation(settings_of(*words))).startswith(expected)


def test_a_changed_frame_is_read_again() -> None:
    for kind in ("table", "text"):
        frame = BASE.assign(text="a b c")
        given = pflsim.Table(frame, label="y", client="site").settings()
        settings = [f"data={kind}", *(f"data.{k}={v}" for k, v in given.items()), "split.stratify=true"]
        before = load_federation(settings_of(*settings))[0].y
        frame["y"] = frame["y"].to_numpy()[::-1]
        assert load_federation(settings_of(*settings))[0].y.tolist() == before.tolist()[::-1]


def grouped(per_site: bool) -> tuple[Dataset, Any]:
    """Rows of 20 patients; without `per_site`, patients are seen at several sites."""
    patients = np.arange(N) % 3 * 10 + rng.integers(0, 7, N) if per_site else rng.integers(0, 20, N)
    read(BASE.assign(patient=[f"p{i}" for i in patients]))
    dataset, partition = load_federation(settings_of(*WORDS, "split.validation=0.2", "data.group=patient"))
    assert partition_hash(dataset, partition) != partition_hash(replace(dataset, groups=None), partition)
    return dataset, partition


@pytest.mark.parametrize("per_site", [True, False])
def test_rows_of_a_group_stay_on_one_side(per_site: bool) -> None:
    dataset, partition = grouped(per_site)
    assert dataset.groups is not None and inputs(dataset) == {"a": "number", "b": "number"}
    sides = [{*dataset.groups[np.concatenate(part)]} for part in (partition.train, partition.val, partition.test)]
    assert all(sides) and not sides[0] & sides[1] and not sides[1] & sides[2] and not sides[0] & sides[2]
    rows = sorted(np.concatenate([*partition.train, *partition.val, *partition.test]).tolist())
    assert rows == [*range(N)]
    if per_site:
        assert all(4 <= len(test) <= 10 for test in partition.test)  # a quarter of 20 rows, rounded up to a whole group


@pytest.mark.parametrize("words", [["split=counts"], ["split.stratify=true"], ["split=official"]])
def test_other_divisions_cannot_keep_groups_together(words: list[str]) -> None:
    read(BASE.assign(patient=np.arange(N) // 4))
    with pytest.raises(SettingsError, match=r"data\.group"):
        load_federation(settings_of(*WORDS, "data.group=patient", *words))


def test_rows_keep_the_numbers_of_the_file() -> None:
    frame = BASE.copy()
    frame.loc[[0, 7], "y"] = ""
    frame.loc[3, "site"] = ""
    frame.to_csv("t.csv", index=False)
    dataset, partition = pflsim_partition([], "first")
    saved = json.loads(Path("first/partition.json").read_text())
    rows = sorted(row for part in ("train", "val", "test") for client in saved[part] for row in client)
    assert rows == [row for row in range(N) if row not in (0, 3, 7)] and saved["numbering"] == "file"
    for client, own in enumerate(saved["train"]):
        assert {*frame["site"][own]} == {partition.names[client]}
    explicit = ["partition=explicit", "partition.path=first/partition.json", "clients=3"]
    again = pflsim_partition(explicit, "again")
    assert partition_hash(*again) == saved["hash"]
    older = {**saved, "numbering": "all", "train": [p.tolist() for p in partition.train],
             "val": [p.tolist() for p in partition.val], "test": [p.tolist() for p in partition.test]}  # fmt: skip
    Path("old.json").write_text(json.dumps(older))
    again = pflsim_partition(["partition=explicit", "partition.path=old.json", "clients=3"], "older")
    assert partition_hash(*again) == saved["hash"]
    with pytest.raises(SettingsError, match="row 3 "):
        Path("gone.json").write_text(json.dumps({"numbering": "file", "train": [[1], [2], [3]]}))
        pflsim_partition(["partition=explicit", "partition.path=gone.json", "clients=3"], "gone")


def pflsim_partition(words: list[str], folder: str) -> tuple[Dataset, Any]:
    """The data set and the partition that are written to a folder."""
    from pflsim.data.record import write_federation

    return write_federation(settings_of(*WORDS, *words), Path(folder))
