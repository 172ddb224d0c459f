"""Labelled texts as token sequences: a column of a table, or a folder of text files for each class."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pflsim.config.settings import Count
from pflsim.data.dataset import MAX_TOKENS, Dataset
from pflsim.data.federated import Partition
from pflsim.data.sources.columns import card_of
from pflsim.data.sources.frames import Source, check_columns, defaults_of, read_rows
from pflsim.errors import reading

UNKNOWN = 1
"""Token of what is not in the vocabulary; 0 is padding."""
FIELDS = ("input_ids", "attention_mask")
COVERED, LONGEST = 0.95, 512
"""The share of texts that the default length covers, and its limit for models without one, in tokens."""


@dataclass(frozen=True)
class TextEncoder:
    """Maps texts to token sequences.

    Args:
        column: of the texts in a frame.
        length: of a sequence, in tokens; longer texts are cut, shorter ones padded.
        mask: whether a sequence has an attention mask.
        characters: whether tokens are characters, not words and punctuation marks in lower case.
        numbers: of the tokens, from 2.
        tokenizer: of transformers, in place of characters and words.
    """

    column: str
    length: int
    mask: bool
    characters: bool
    numbers: dict[str, int]
    tokenizer: Any = None

    @property
    def inputs(self) -> list[str]:
        """Return the names of the columns."""
        return [self.column]

    def unknown(self, frame: Any) -> Sequence[str]:
        """Return nothing: unknown tokens are usual."""
        return ()

    def split(self, text: str) -> Sequence[str]:
        """Return the characters of a text, or its words and punctuation marks in lower case."""
        return text if self.characters else re.findall(r"\w+|[^\w\s]", text.lower())

    def fit(self, texts: Sequence[str], size: int) -> TextEncoder:
        """Return the encoder with the most frequent tokens of texts, `size` with padding and the unknown token."""
        if self.tokenizer is not None:
            return self
        counts = Counter(token for text in texts for token in self.split(text))
        kept = sorted(counts, key=lambda token: (-counts[token], token))[: max(size - 2, 0)]
        return replace(self, numbers={token: number for number, token in enumerate(kept, UNKNOWN + 1)})

    def lengths(self, texts: Sequence[str]) -> np.ndarray:
        """Return the number of tokens of each text, [n] int64."""
        if self.tokenizer is None:
            return np.array([len(self.split(text)) for text in texts])
        return np.array([len(ids) for ids in self.tokenizer([*texts], verbose=False)["input_ids"]])

    @property
    def size(self) -> int:
        """Return the number of different tokens."""
        return len(self.numbers) + UNKNOWN + 1 if self.tokenizer is None else len(self.tokenizer)

    def __call__(self, texts: Any, client: int | None = None) -> np.ndarray:
        """Return the tokens [n, length], or with the mask [n, 2, length], int64, of texts or of rows of a frame."""
        if hasattr(texts, "columns"):
            check_columns("the table", texts, [self.column])
            texts = [str(text) for text in texts[self.column].fillna("")]
        if self.tokenizer is not None:
            options: dict[str, Any] = {"padding": "max_length", "truncation": True, "max_length": self.length}
            found = self.tokenizer([*texts], return_tensors="np", **options)
            ids, present = (found[name].astype(np.int64) for name in FIELDS)
        else:
            ids = np.zeros((len(texts), self.length), np.int64)
            for row, text in zip(ids, texts, strict=True):
                tokens = self.split(text)[: self.length]
                row[: len(tokens)] = [self.numbers.get(token, UNKNOWN) for token in tokens]
            present = (ids != 0).astype(np.int64)
        return np.stack([ids, present], axis=1) if self.mask else ids


def load(
    *,
    path: str | None = None,
    test: str | None = None,
    text: str = "text",
    label: str = "label",
    client: str | None = None,
    group: str | None = None,
    tokens: str = "words",
    length: Count | None = None,
    vocabulary: Count = 10_000,
    mask: bool | None = None,
    missing: list[str | int | float | None] | None = None,
    min_examples: Count = 8,
) -> Dataset:
    """Load labelled texts as padded token sequences. The training rows determine the vocabulary.

    Defaults are those of `data=table`, with `model=text_transformer`.

    Args:
        path: a CSV, JSON-lines or Parquet file, or a folder with text files CLASS/*.
        test: a file or folder of test rows; None: `split` draws them.
        text: column of the texts.
        label: column of the classes or values.
        client: column of the clients, whose values are their names.
        group: column of groups, as in `data=table`.
        tokens: words, characters, or the folder of a tokenizer of transformers (AutoTokenizer).
        length: of a sequence, in tokens; longer texts are cut, shorter ones padded. None: 95% of the texts in `path`
            are not cut, up to the tokenizer's limit, or 512.
        vocabulary: at most so many different tokens, the most frequent ones; with padding 0 and 1 for all others.
        mask: inputs are `input_ids` and `attention_mask`, for models of transformers; None: with a tokenizer.
        missing: words that are missing values in the columns of labels, clients and groups, as in `data=table`.
        min_examples: clients with fewer usable rows in `path` are left out.

    Returns:
        x [n, length], or [n, 2, length] with the mask, int64, after the partition. The name is the file name.

    Raises:
        SettingsError: a file or a tokenizer cannot be read, or a column is missing.
    """
    given = dict(path=path, test=test, label=label, client=client, group=group, missing=missing)
    source, tokenizer = Source.of({**given, "min_examples": min_examples}), None
    rows = read_rows("text", source, [text], [text])
    if tokens not in ("words", "characters"):
        with reading(f"data.tokens={tokens}", "words, characters, or a tokenizer's folder (pip install 'pflsim[hf]')"):
            from transformers import AutoTokenizer

            if not Path(tokens).is_dir():
                raise NotADirectoryError(tokens)
            tokenizer = AutoTokenizer.from_pretrained(tokens, local_files_only=True)
    masked = tokenizer is not None if mask is None else mask
    encoder = TextEncoder(text, length or 1, masked, tokens == "characters", {}, tokenizer)
    texts = [str(each) for each in rows.frame[text].fillna("")]
    sizes = encoder.lengths(texts)
    if length is None:
        covering = int(np.quantile(sizes[: rows.targets.train_size], COVERED, method="inverted_cdf"))
        limit = getattr(tokenizer, "model_max_length", LONGEST)
        length = max(1, min(covering, LONGEST if limit > MAX_TOKENS else limit))
        encoder = replace(encoder, length=length)
    cut = int((sizes > length).sum())
    told = f"{cut:,} of {len(sizes):,} texts are longer than data.length={length} tokens and cut; the longest has"
    notes = (*rows.targets.notes, f"{rows.targets.name}: {told} {sizes.max():,}") if cut else rows.targets.notes

    def fitted(dataset: Dataset, partition: Partition) -> Dataset:
        whole = np.unique(np.concatenate(partition.common))
        every = encoder.fit([texts[row] for row in whole], vocabulary)
        fields = FIELDS if masked else ()
        return replace(dataset, x=every(rows.frame), vocabulary=every.size, fields=fields, encoder=every)

    content: Any = rows.frame[[text]].astype(str)
    empty = int((sizes == 0).sum())
    about = f"{np.median(sizes):g} tokens at the median, {sizes.max():,} at most"
    card = card_of(source, rows, (), (text, about + f"; {empty:,} are empty" * (empty > 0)))
    return replace(rows.dataset(content, np.int64, fit=fitted), notes=notes, card=card)


def defaults(load: partial[Dataset]) -> dict[str, Any]:
    """Return the settings of a run that texts choose unless they are given, by key; `load` has its settings."""
    return defaults_of(load, "text_transformer", lambda source, its: read_rows("text", source, *[[its["text"]]] * 2))
