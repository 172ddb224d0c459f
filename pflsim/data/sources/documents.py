"""Texts whose next tokens are predicted: documents are divided among clients, and then packed in blocks of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np

from pflsim.data.dataset import IGNORED, Card, Dataset
from pflsim.data.federated import Partition
from pflsim.data.sources.columns import card_of
from pflsim.data.sources.frames import Source, defaults_of, read_rows
from pflsim.data.sources.text_encoder import TextEncoder, tokenizer_of
from pflsim.errors import SettingsError
from pflsim.types import SPLITS

LENGTH = 128
"""The default length of a block, in tokens."""


@dataclass(frozen=True, slots=True)
class Packer:
    """Maps the documents of one client and part to blocks of inputs and next tokens.

    Args:
        length: L of a block, in tokens.
        end: the token that ends a document.
        padding: the token that fills a block, on the right.
    """

    length: int
    end: int
    padding: int

    def packed(self, documents: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Join documents, each with its end token, and return blocks with stride L.

        Every token but the first is predicted once, from the tokens before it in its block.

        Returns:
            Inputs and next tokens, each [blocks, L] int64.
        """
        tokens = np.array([token for document in documents for token in (*document, self.end)], np.int64)
        return self._filled(tokens, 0)

    def answered(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return one block [1, L] each, in which only the answer and its end token are predicted.

        What is too long is cut: the prompt from its left, then the answer from its right.
        """
        over = max(len(prompt) + len(answer) - self.length, 0)  # the end token is no input
        tokens = np.array([*prompt[over:], *answer, self.end], np.int64)[: self.length + 1]
        return self._filled(tokens, max(len(prompt) - over, 0))

    def _filled(self, tokens: np.ndarray, given: int) -> tuple[np.ndarray, np.ndarray]:
        predicted = max(len(tokens) - 1, 0)
        size = -(-predicted // self.length) * self.length
        x, y = np.full(size, self.padding), np.full(size, IGNORED)
        x[:predicted], y[:predicted] = tokens[:predicted], tokens[1:]
        y[: max(given - 1, 0)] = IGNORED
        return x.reshape(-1, self.length), y.reshape(-1, self.length)


def load(labelled: partial[Dataset]) -> Dataset:
    """Load documents whose next tokens are predicted. The training documents determine the vocabulary.

    Documents are divided among clients and parts first; those of one client and part are then packed in blocks, see
    `Packer`.

    Args:
        labelled: `pflsim.data.sources.text.load` with its settings.

    Raises:
        SettingsError: see there; or a label, a mask or only one of prompt and answer is given.
    """
    its = _settings(labelled)
    for name, default in (("label", "label"), ("mask", None)):
        if its[name] != default:
            raise SettingsError(f"data.{name}={its[name]}: task=language_model has none; leave it out")
    answer, template = its["answer"], its["template"]
    if (its["prompt"] or answer) and not (answer and (its["prompt"] or template)):
        raise SettingsError("data.prompt and data.answer: give both, or data.template in place of the prompt")
    named = [name for _, name, _, _ in Formatter().parse(template or "") if name]
    inputs: list[str] = [*(named or [its["prompt"] or its["text"]]), *([answer] if answer else [])]
    columns = [*dict.fromkeys(inputs)]
    line = its["document"] == "line"
    source = Source.of({**its, "label": columns[0], "lines": columns[0] if line else None})
    try:
        rows = read_rows("text", source, columns, columns)
    except SettingsError as error:
        hint = "; data.document=line makes each line a document" * ("no rows are left" in str(error) and not line)
        raise SettingsError(f"{error}{hint}") from error
    tokenizer = tokenizer_of(its["tokens"])
    if tokenizer is not None and tokenizer.eos_token_id is None:
        raise SettingsError(f"data.tokens={its['tokens']}: the tokenizer has no end token (eos_token)")
    length = its["length"] or min(LENGTH, getattr(tokenizer, "model_max_length", LENGTH))
    encoder = TextEncoder(columns[0], length, False, its["tokens"] == "characters", {}, tokenizer)
    cells: Any = rows.frame[columns].fillna("").astype(str)
    texts = [template.format(**row) for row in cells.to_dict("records")] if template else cells[columns[0]].tolist()
    answers = cells[answer].tolist() if answer else None
    about = card_of(source, rows, (), (columns[0], f"{len(texts):,} documents"))
    about = replace(about, lines=tuple(line for line in about.lines if not line[0].startswith("label")))
    found = rows.dataset(cells, np.int64, fit=partial(_fitted, encoder, its["vocabulary"], texts, answers))
    notes = tuple(note.replace("without a label", "without a text") for note in found.notes)
    empty = np.zeros((len(texts), 1), np.int64)
    return replace(found, y=empty, num_classes=1, values=None, language=True, card=about, notes=notes)


def _settings(labelled: partial[Dataset]) -> dict[str, Any]:
    """Return all settings of a loader; in a folder CLIENT/*, the name of a file's folder is its client."""
    its = {name: parameter.default for name, parameter in signature(labelled).parameters.items()}
    folder = its["path"] and Path(its["path"]).is_dir()
    return {**its, "client": "label"} if folder else its


def _fitted(
    encoder: TextEncoder, vocabulary: int, texts: Sequence[str], answers: Sequence[str] | None, dataset: Dataset,
    partition: Partition,
) -> tuple[Dataset, Partition]:  # fmt: skip
    """Return the blocks of all clients and parts, and their rows; the division is that of documents."""
    whole = np.unique(np.concatenate(partition.common)).tolist()
    seen = [part[row] for part in (texts, answers or ()) for row in whole if part]
    known = encoder.fit([*map(str, seen)], max(vocabulary - 1, 3))
    tokenizer, packer = known.tokenizer, Packer(known.length, *known.marks)
    ids, replies = known.ids(texts), known.ids(answers) if answers else None
    found, rows, first = list[tuple[np.ndarray, np.ndarray]](), dict[str, list[np.ndarray]](), 0
    for name in SPLITS:
        rows[name] = []
        for own in getattr(partition, name):
            some = [ids[row] for row in own]
            if replies is None:
                blocks = [packer.packed(some)]
            else:
                blocks = [packer.answered(prompt, replies[row]) for prompt, row in zip(some, own, strict=True)]
            found += blocks
            number = sum(len(x) for x, _ in blocks)
            rows[name].append(np.arange(first, first + number))
            first += number
    x, y = (np.concatenate(parts) for parts in zip(*found, strict=True))
    predicted = [int((y[own] != IGNORED).sum()) for own in rows["train"]]
    if not all(predicted):
        who = partition.called(predicted.index(0))
        raise SettingsError(f"{who} has no token to predict in training; data.document=line makes more documents")
    documents = replace(dataset, fit=None)
    packed = replace(
        documents, x=x, y=y, num_classes=known.size + (tokenizer is None), train_size=sum(map(len, rows["train"])),
        vocabulary=known.size + (tokenizer is None), encoder=known, clients=None, client_names=(), groups=None,
        rows=None, content=None, card=_card(dataset.card, x, y, packer, predicted, ids, replies, known.unknown_token),
    )  # fmt: skip
    parts = {name: tuple(own) for name, own in rows.items()}
    return packed, replace(partition, **parts, documents=(documents, partition))


def _card(
    card: Card, x: np.ndarray, y: np.ndarray, packer: Packer, predicted: Sequence[int], ids: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]] | None, unknown: int | None,
) -> Card:  # fmt: skip
    """Return the card with what became of the documents."""
    present = np.arange(x.shape[1]) <= np.where(y != IGNORED, np.arange(x.shape[1]), -1).max(1, keepdims=True)
    span = f"{min(predicted):,} to {max(predicted):,} to predict in training, median {np.median(predicted):,g}"
    lines = [
        ("tokens of a client", span),
        ("blocks", f"{len(x):,} of {packer.length} tokens, {1 - present.mean():.1%} padding"),
    ]
    if unknown is not None:
        lines.append(("unknown tokens", f"{(x[present] == unknown).mean():.1%}"))
    if answers is not None:
        cut = sum(len(a) + len(b) > packer.length for a, b in zip(ids, answers, strict=True))
        lines.append(("documents cut", f"{cut:,} of {len(ids):,}"))
    return replace(card, lines=(*card.lines, *lines))


def defaults(labelled: partial[Dataset]) -> dict[str, Any]:
    """Return the settings of a run that documents choose unless they are given, by key."""
    its = _settings(labelled)
    known = partial(labelled.func, **its)
    return defaults_of(known, "char_lstm", lambda *_: load(labelled))
