"""Documents whose next tokens are predicted: how they are divided and packed."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support import prepared, refusing

from pflsim.data.sources.documents import Packer
from pflsim.tasks.language import IGNORED

TEXTS = {"ann": "to be or not to be", "bob": "all the world is a stage", "eve": "the rest is silence"}
WORDS = ["task=language_model", "data=text", "data.tokens=characters", "method=fedavg", "data.min_examples=1"]


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    for name, text in TEXTS.items():
        (here / "docs" / name).mkdir(parents=True)
        for number in range(4):
            (here / "docs" / name / f"{number}.txt").write_text(f"{text} {number}\nand {name}\n")


def test_each_token_but_the_first_is_predicted_once() -> None:
    x, y = Packer(4, end=9, padding=0).packed([[1, 2, 3], [4, 5, 6]])
    assert x.tolist() == [[1, 2, 3, 9], [4, 5, 6, 0]]
    assert y.tolist() == [[2, 3, 9, 4], [5, 6, 9, IGNORED]]
    x, y = Packer(4, end=9, padding=0).packed([[1, 2, 3, 4]])
    assert (x.tolist(), y.tolist()) == ([[1, 2, 3, 4]], [[2, 3, 4, 9]])
    assert Packer(4, 9, 0).packed([])[0].shape == (0, 4) and Packer(4, 9, 0).packed([[]])[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("prompt", "answer", "x", "y"),
    [
        ([1, 2], [3], [1, 2, 3, 0], [IGNORED, 3, 9, IGNORED]),
        ([1, 2, 3], [4, 5], [2, 3, 4, 5], [IGNORED, 4, 5, 9]),
        ([1], [2, 3, 4, 5, 6], [2, 3, 4, 5], [3, 4, 5, 6]),
        ([], [2, 3], [2, 3, 0, 0], [3, 9, IGNORED, IGNORED]),
    ],
)
def test_only_answers_are_predicted(prompt: list[int], answer: list[int], x: list[int], y: list[int]) -> None:
    found = Packer(4, end=9, padding=0).answered(prompt, answer)
    assert (found[0].tolist(), found[1].tolist()) == ([x], [y])


def test_documents_are_divided_and_then_packed() -> None:
    """Each client's blocks are its own documents in turn, with one end token each; records count documents."""
    made = prepared(*WORDS, "data.path=docs", "data.length=16")
    assert (made.settings.clients, made.partition.names) == (3, tuple(TEXTS))
    assert (made.settings.names["model"], made.dataset.task) == ("char_lstm", "language_model")
    documents, divided = made.partition.documents or pytest.fail("no documents")
    assert len(documents.y) == 12 and sum(map(len, divided.train)) + sum(map(len, divided.test)) <= 12
    letters = {number: letter for letter, number in made.dataset.encoder.numbers.items()} | {
        made.dataset.tokens - 1: "|"
    }
    for split in ("train", "test"):
        for name, rows in zip(TEXTS, getattr(made.partition, split), strict=True):
            x, y = made.dataset.x[rows].ravel(), made.dataset.y[rows].ravel()
            tokens = [x[0], *y[y != IGNORED]]
            text = "".join(letters.get(token, "?") for token in tokens)
            found = [re.sub(r"\d", "#", part) for part in text.replace("?", "#").split("|")]
            assert found == [f"{TEXTS[name]} #\nand {name}\n"] * (len(found) - 1) + [""]
    other = prepared(*WORDS, "data.path=docs", "data.length=5")
    assert other.meta.partition_hash == made.meta.partition_hash
    assert len(other.dataset.y) > len(made.dataset.y)


def test_lines_templates_and_answers(here: Path) -> None:
    lines = prepared(*WORDS, "data.path=docs", "data.document=line")
    assert len((lines.partition.documents or ())[0].y) == 24
    rows = [{"q": f"why {i}", "a": "because", "who": ["x", "y"][i % 2]} for i in range(12)]
    pd.DataFrame(rows).to_json("qa.jsonl", orient="records", lines=True)
    asked = [*WORDS, "data.path=qa.jsonl", "data.client=who", "data.answer=a", "data.length=24"]
    plain = prepared(*asked, "data.prompt=q")
    assert (
        plain.dataset.x.shape == (12, 24) and (plain.dataset.y != IGNORED).sum(1).tolist() == [len("because") + 1] * 12
    )
    shaped = prepared(*asked, "data.template='Q: {q} A:'")
    assert sorted((shaped.dataset.x != 0).sum(1)) == sorted(len(f"Q: why {i} A:because") for i in range(12))
    assert np.array_equal((shaped.dataset.y != IGNORED).sum(1), (plain.dataset.y != IGNORED).sum(1))


def test_a_tokenizer_whose_end_token_is_its_padding(here: Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    known = {word: number for number, word in enumerate(["<end>", "[UNK]", "the", "rest", "is", "silence"])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    options = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **options).save_pretrained("own")
    made = prepared(*WORDS, "data.path=docs", "data.tokens=own", "data.length=50")
    x, y = (part[made.partition.train[2]] for part in (made.dataset.x, made.dataset.y))
    document = [2, 3, 4, 5, 1, 1, 1, 0]  # the rest is silence NUMBER and eve, and the end
    number = len(made.partition.documents[1].train[2]) if made.partition.documents else 0
    assert y[y != IGNORED].tolist() == (document * number)[1:] and made.dataset.tokens == 6
    assert not x[y == IGNORED].any()
    inputs = [part for part in made.dataset.x if part.any()]
    share = sum(int((part == 1).sum()) for part in inputs) / int((made.dataset.y != IGNORED).sum())
    assert dict(made.dataset.card.lines)["unknown tokens"] == f"{share:.1%}"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data.label=who"], r"data\.label"),
        (["data.mask=true"], r"data\.mask"),
        (["data.prompt=text"], r"data\.answer"),
        (["data.min_examples=8"], r"data\.document=line"),
        (["eval.metrics=[accuracy]"], "accuracy"),
        (["task.class_weights=balanced"], "class_weights"),
        (["method=fedproto"], "fedproto.*fedavg"),
        (["model=text_transformer", "model.causal=false"], "next tokens"),
        (["data=digits", "data.path=null"], "data=text"),
        (["task=auto", "data.document=line"], "language_model"),
    ],
)
def test_refused(words: list[str], named: str) -> None:
    given = dict(word.split("=", 1) for word in [*WORDS, "data.path=docs", *words])
    if given["data"] == "digits":
        given = {key: value for key, value in given.items() if not key.startswith("data.")}
    with refusing(match=named):
        prepared(*(f"{key}={value}" for key, value in given.items()))
