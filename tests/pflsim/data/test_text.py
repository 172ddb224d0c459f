"""Text, tokens and tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_wine
from support import check_loaded, prepared, refusing, settings_of

import pflsim
from pflsim.cli import main
from pflsim.config.components import reading_folder
from pflsim.data.content import row_digests
from pflsim.data.dataset import Dataset, check_dataset
from pflsim.data.federate import load_federation
from pflsim.data.federated import Partition, shard
from pflsim.data.record import read_encoder
from pflsim.data.sources import npz, text
from pflsim.data.sources.own import as_dataset
from pflsim.data.sources.scikit_learn import breast_cancer, wine
from pflsim.errors import SettingsError

RUN = ["executor=inline", "progress=none", "rounds=1", "method=fedavg", "run_dir=run"]


def notes() -> pd.DataFrame:
    texts = {"good": "A fine day!", "bad": "what a mess, no"}
    rows = [(texts[["good", "bad"][i % 2]] + f" w{i}", ["good", "bad"][i % 2], f"c{i % 3}") for i in range(60)]
    return pd.DataFrame(rows, columns=["text", "label", "who"])


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    notes().to_csv("notes.csv", index=False)
    notes().to_parquet("notes.parquet")
    notes().to_json("notes.jsonl", orient="records", lines=True)


def federation(*words: str) -> tuple[Dataset, Partition, Any]:
    settings = settings_of("data=text", *words, "method=fedavg")
    return *load_federation(settings), settings


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_words_of_the_training_rows(ending: str) -> None:
    words = (f"data.path=notes.{ending}", "data.client=who", "data.length=6", "data.min_examples=4")
    dataset, partition, settings = federation(*words)
    assert (settings.clients, partition.names) == (3, ("c0", "c1", "c2"))
    assert (settings.names["model"], settings.names["split"]) == ("text_transformer", "merged")
    train = {*np.concatenate(partition.train).tolist()}
    assert dataset.tokens == 2 + len({"a", "fine", "day", "!", "what", "mess", ",", "no"}) + len(train)
    unseen = [row for row in range(60) if row not in train]
    assert all(1 in dataset.x[row] for row in unseen) and not any(1 in dataset.x[row] for row in train)
    good, bad = dataset.x[0], dataset.x[1]
    assert dataset.x.shape == (60, 6) and good[5] == 0 and good[0] == bad[1], "the word a, and padding"
    assert dataset.y.tolist() == [1, 0] * 30


def test_characters_and_their_mask_from_a_folder() -> None:
    for number in range(20):
        file = Path("texts", "ab"[number % 2], f"{number}.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x" * (number + 1))
    words = ("data.path=texts", "data.tokens=characters", "data.length=4", "data.mask=true", "partition=iid")
    dataset, *_ = federation(*words, "clients=2")
    assert dataset.fields == ("input_ids", "attention_mask") and dataset.x.shape == (20, 2, 4) and dataset.tokens == 3
    assert np.array_equal(dataset.x[:, 1], dataset.x[:, 0] != 0) and {*dataset.x[:, 0].ravel()} == {0, 2}
    Path("texts/a/.hidden").touch()
    Path("texts/b/20.txt").write_text("")
    dataset, *_ = federation(*words, "clients=2")
    card = dict(dataset.card.lines)
    assert card["label (label)"] == "2 classes: a 10, b 11" and "1 are empty" in card["texts (text)"]
    Path("texts/b/21.txt").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match=r"21\.txt"):
        federation(*words)
    Path("texts/a/more").mkdir()
    with pytest.raises(SettingsError, match="a/more is a folder"):
        federation(*words)


def lengths(*counts: int, test: tuple[int, ...] = (), **options: Any) -> Dataset:
    """The data set of texts with these numbers of words."""
    for name, part in (("path", counts), ("test", test)):
        rows = [("word " * count if count else None, index % 2) for index, count in enumerate(part)]
        pd.DataFrame(rows, columns=["text", "label"]).to_csv(f"{name}.csv", index=False)
    return text.load(path="path.csv", test="test.csv" if test else None, **options)


@pytest.mark.parametrize(
    ("counts", "test", "options", "length", "cut"),
    [
        ([7] * 20, (), {}, 7, ""),
        ([7] * 19 + [90], (), {}, 7, "1 of 20"),
        ([7] * 18 + [90, 95], (), {}, 90, "1 of 20"),
        ([5, 3], (9, 9), {}, 5, "2 of 4"),
        ([0, 1], (), {}, 1, ""),
        ([600] * 4, (), {}, 512, "4 of 4"),
        ([300] * 4, (), {"length": 128}, 128, "4 of 4"),
        ([300] * 4, (), {"length": 300}, 300, ""),
        ([3] * 4, (), {"tokens": "characters"}, 15, ""),
    ],
    ids=str,
)
def test_the_length_covers_95_percent_of_the_texts(
    counts: list[int], test: tuple[int, ...], options: dict[str, Any], length: int, cut: str
) -> None:
    data = lengths(*counts, test=test, **options)
    rows = np.arange(len(data.y))
    assert data.fit is not None
    assert data.fit(data, Partition((rows,), (rows[:0],), (rows[:0],))).x.shape == (len(rows), length)
    assert bool(data.notes) == bool(cut) and cut in " ".join(data.notes)


@pytest.mark.slow
def test_a_run_and_its_model_encode_new_texts() -> None:
    assert main(["data=text", "data.path=notes.csv", "data.client=who", "data.length=6", *RUN]) == 0
    model = pflsim.load_model("run", client="c1")
    with torch.no_grad():
        scores = model(["a fine day", "unheard"])
        assert scores.shape == (2, 2) and torch.equal(scores, model(pd.DataFrame({"text": ["A FINE day", "unheard"]})))


@pytest.mark.slow
def test_distilbert_trains_one_by_one_with_a_tokenizer() -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    known = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "fine", "mess", "day"])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]")
    wrapped.save_pretrained("tokenizer")
    config = transformers.DistilBertConfig(
        vocab_size=5, dim=8, hidden_dim=16, n_layers=1, n_heads=2, max_position_embeddings=16, num_labels=2
    )
    transformers.DistilBertForSequenceClassification(config).save_pretrained("bert")
    words = ["data=text", "data.path=notes.csv", "data.client=who", "data.tokens=tokenizer", "data.length=6"]
    assert main([*words, "model=hf", "model.path=bert", *RUN]) == 0
    assert "one by one" in Path("run/run.log").read_text()
    with reading_folder("run", trusted=False):
        read = read_encoder(Path("run"))
    assert read([notes().text[0]]).tolist() == load_federation(settings_of(*words, "method=fedavg"))[0].x[:1].tolist()
    assert pflsim.load_model("run", client=0, trusted=True)(["fine day"]).shape == (1, 2)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["data.path=notes.csv", "data.text=words"], "'words'"),
        (["data.path=notes.csv", "data.tokens=nowhere"], "data.tokens=nowhere"),
        (["data.path=none.csv"], "data.path=none.csv"),
        ([], "data.path"),
    ],
)
def test_wrong_texts_are_refused(words: list[str], names: str, refused: Callable[..., str]) -> None:
    assert names in refused("data=text", *words, "partition=iid", "clients=2", *RUN)


def archive(tmp_path: Path, x: np.ndarray, y: np.ndarray | None = None) -> str:
    """An archive with the last third as test part."""
    y, n = np.arange(len(x)) % 2 if y is None else y, len(x) * 2 // 3
    np.savez(tmp_path / "mine.npz", x_train=x[:n], y_train=y[:n], x_test=x[n:], y_test=y[n:])
    return str(tmp_path / "mine.npz")


def sentences(examples: int = 360, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of common tokens, about a third of which are the token of the class; padded with 0."""
    rng = np.random.default_rng(0)
    y = np.arange(examples) % classes
    x = np.where(rng.random((examples, 8)) < 0.35, 1 + y[:, None], rng.integers(classes + 1, 20, (examples, 8)))
    x[np.arange(8) >= rng.integers(4, 9, examples)[:, None]] = 0
    return x, y


@pytest.mark.parametrize(("source", "bunch"), [(breast_cancer, load_breast_cancer()), (wine, load_wine())])
def test_the_bundled_tables_are_those_of_scikit_learn(source: Any, bunch: Any) -> None:
    data, raw = source(), source(standardize=False)
    check_dataset(data, "it")
    assert data.kind == "tables" and data.num_classes == len(bunch.target_names) and raw.mean is None
    ours = {(*x.tolist(), y) for x, y in zip(data.x, data.y.tolist(), strict=True)}
    assert ours == {(*x.tolist(), y) for x, y in zip(bunch.data.astype(np.float32), bunch.target.tolist(), strict=True)}
    train = data.x[: data.train_size].astype(np.float64)
    assert np.allclose(data.mean, train.mean(0), rtol=1e-6) and np.allclose(data.std, train.std(0), rtol=1e-6)
    for c, total in enumerate(np.bincount(bunch.target)):
        assert (data.y[: data.train_size] == c).sum() == int(0.8 * total + 0.5)
    rows = np.arange(data.train_size)
    inputs, _ = shard(data, Partition((rows,), (rows[:0],), (rows[:0],)), 0).train.batch(slice(None))
    assert inputs.mean(0).abs().max() < 1e-4 and (inputs.std(0, unbiased=False) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_integers_are_token_sequences(tmp_path: Path, dtype: Any) -> None:
    x, y = sentences()
    path = archive(tmp_path, x.astype(dtype), y)
    for data in (npz.load(path=path), as_dataset((x[:240].astype(dtype), y[:240]), (x[240:].astype(dtype), y[240:]))):
        check_dataset(data, "it")
        assert (data.kind, data.x.dtype, data.tokens, data.input_shape) == ("token sequences", np.int64, 20, (8,))
        assert np.array_equal(data.x, x)
    assert npz.load(path=path, vocabulary=50).tokens == 50
    rows = np.arange(3)
    inputs, _ = shard(data, Partition((rows,), (rows,), (rows,)), 0).train.batch(slice(None))
    assert np.array_equal(inputs, x[:3]) and str(inputs.dtype) == "torch.int64"


def test_large_tokens_have_digests_of_their_own() -> None:
    """float32 cannot tell 2^24 and 2^24 + 1 apart."""
    data = Dataset("it", np.array([[2**24], [2**24 + 1]]), np.zeros(2, np.int64), 1, 2)
    assert len(np.unique(row_digests(data), axis=0)) == 2


@pytest.mark.parametrize(
    ("x", "settings", "words"),
    [
        (np.array([[1, -1]] * 6), {}, ("-1..1", "float32")),
        (np.ones((6, 3, 3), int), {}, ("x_train", "[n, length]")),
        (np.array([[1, 5]] * 6), {"vocabulary": 5}, ("data.vocabulary=5", "1..5")),
        (np.array([[1, 5]] * 6), {"standardize": True}, ("data.standardize", "token sequences")),
        (np.array([[1.5, 5]] * 6), {"vocabulary": 9}, ("data.vocabulary=9", "tables")),
    ],
)
def test_refused_archives(tmp_path: Path, x: np.ndarray, settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with refusing(*words):
        npz.load(path=archive(tmp_path, x), **settings)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data=npz", "data.path=FILE"], ("model=mlp", "data=npz", "token sequences", "model=text_transformer")),
        (["data=npz", "data.path=FILE", "model=text_transformer", "model.vocabulary=7"], ("model.vocabulary=7", "20")),
        (["data=wine", "model=text_transformer"], ("model=text_transformer", "tables", "model=tabular_mlp")),
        (["data=wine", "model=cnn"], ("cnn", "images", "[13]")),
        (["data=npz", "data.path=FILE", "augment=crop_flip", "model=text_transformer"], ("augment", "token sequences")),
    ],
)
def test_models_that_do_not_fit_are_refused(tmp_path: Path, overrides: list[str], words: tuple[str, ...]) -> None:
    path = archive(tmp_path, *sentences())
    with refusing(*words):
        prepared("clients=2", "partition=iid", "method=fedavg", *(text.replace("FILE", path) for text in overrides))


@pytest.mark.parametrize(
    ("method", "data", "model", "chance"),
    [
        ("fedavg", "npz", "text_transformer", 1 / 3),
        ("fedavg", "breast_cancer", "tabular_mlp", 0.63),
        ("fedproto", "wine", "tabular_mlp", 0.4),
    ],
)
@pytest.mark.slow
def test_runs_learn_and_are_exported(here: Path, method: str, data: str, model: str, chance: float) -> None:
    """FedAvg trains in lockstep, FedProto shares class means."""
    path = [f"data.path={archive(here, *sentences())}"] if data == "npz" else []
    run = pflsim.run(
        method=method, data=data, model=model, clients=3, rounds=8, partition="dirichlet", executor="inline",
        progress="none", overrides=["partition.alpha=5", "batch_size=10", "local_epochs=2", *path],
    )  # fmt: skip
    assert run.accuracy > chance + 0.25
    check_loaded(run, 1)
