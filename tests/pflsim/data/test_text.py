"""data=text: tokens of files, masks, and runs with text_transformer and a model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import settings_of

import pflsim
from pflsim.cli import main
from pflsim.data.dataset import Dataset
from pflsim.data.federate import load_federation
from pflsim.data.federated import Partition

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


def test_a_run_and_its_model_encode_new_texts() -> None:
    assert main(["data=text", "data.path=notes.csv", "data.client=who", "data.length=6", *RUN]) == 0
    model = pflsim.load_model("run", client="c1")
    with torch.no_grad():
        scores = model(["a fine day", "unheard"])
        assert scores.shape == (2, 2) and torch.equal(scores, model(pd.DataFrame({"text": ["A FINE day", "unheard"]})))


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
    assert pflsim.load_model("run", client=0)(["fine day"]).shape == (1, 2)


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
