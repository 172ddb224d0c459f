"""Labelled texts as token sequences: a column of a table, or a folder of text files for each class."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from pflsim.config.settings import Count
from pflsim.data.dataset import MAX_TOKENS, Dataset
from pflsim.data.federated import Partition
from pflsim.data.sources import documents
from pflsim.data.sources.columns import card_of
from pflsim.data.sources.frames import Source, defaults_of, read_rows
from pflsim.data.sources.text_encoder import FIELDS, LONGEST, TextEncoder, tokenizer_of
from pflsim.errors import SettingsError

COVERED = 0.95
"""The share of texts that the default length covers."""


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
    document: Literal["row", "line"] = "row",
    prompt: str | None = None,
    answer: str | None = None,
    template: str | None = None,
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
        document: with task=language_model, which has no label: what a document is, a row or file, or each of its lines.
        prompt: with task=language_model, column of the prompts.
        answer: with task=language_model, column of the answers, of which alone the tokens are predicted.
        template: with task=language_model, text of a document, or of a prompt, with {columns} of the row.

    Returns:
        x [n, length], or [n, 2, length] with the mask, int64, after the partition. The name is the file name.

    Raises:
        SettingsError: a file or a tokenizer cannot be read, or a column is missing.
    """
    own = {"document": document != "row", "prompt": prompt, "answer": answer, "template": template}
    if unused := [name for name, value in own.items() if value]:
        raise SettingsError(f"data.{unused[0]} is a setting of task=language_model; leave it out")
    given = dict(path=path, test=test, label=label, client=client, group=group, missing=missing)
    source = Source.of({**given, "min_examples": min_examples})
    rows, tokenizer = read_rows("text", source, [text], [text]), tokenizer_of(tokens)
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


load.language_model = documents.load  # type: ignore[attr-defined]


def defaults(load: partial[Dataset]) -> dict[str, Any]:
    """Return the settings of a run that texts choose unless they are given, by key; `load` has its settings."""

    def targets(source: Source, its: dict[str, Any]) -> Dataset:
        return read_rows("text", source, [its["text"]], [its["text"]]).targets

    return defaults_of(load, "text_transformer", targets)
