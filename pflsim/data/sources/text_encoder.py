"""Maps texts to tokens: characters, words, or those of a tokenizer of transformers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pflsim.data.sources.frames import check_columns
from pflsim.errors import reading

UNKNOWN = 1
"""Token of what is not in the vocabulary; 0 is padding."""
FIELDS = ("input_ids", "attention_mask")
LONGEST = 512
"""The limit of the default length for models without one, in tokens."""


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

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, neither cut nor padded, without a tokenizer's own marks."""
        if self.tokenizer is None:
            return [[self.numbers.get(token, UNKNOWN) for token in self.split(text)] for text in texts]
        found: list[list[int]] = self.tokenizer([*texts], add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def lengths(self, texts: Sequence[str]) -> np.ndarray:
        """Return the number of tokens of each text, [n] int64."""
        if self.tokenizer is None:
            return np.array([len(self.split(text)) for text in texts])
        return np.array([len(ids) for ids in self.tokenizer([*texts], verbose=False)["input_ids"]])

    @property
    def size(self) -> int:
        """Return the number of different tokens."""
        return len(self.numbers) + UNKNOWN + 1 if self.tokenizer is None else len(self.tokenizer)

    @property
    def known(self) -> dict[str, int]:
        """Return the number of each token, without those of marks unless a tokenizer has them."""
        return self.numbers if self.tokenizer is None else self.tokenizer.get_vocab()

    @property
    def marks(self) -> tuple[int, int]:
        """Return the token that ends a document, and that which fills a block after it."""
        if self.tokenizer is None:
            return self.size, 0
        end, padding = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        return end, end if padding is None else padding

    @property
    def unknown_token(self) -> int | None:
        """Return the token of what is not in the vocabulary; None: there is none, or it is the end token too."""
        token = UNKNOWN if self.tokenizer is None else self.tokenizer.unk_token_id
        return None if token == self.marks[0] else token

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; those that stand for no text are left out."""
        if self.tokenizer is not None:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        named = {number: token for token, number in self.numbers.items()}
        return ("" if self.characters else " ").join(named[token] for token in tokens if token in named)

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


def tokenizer_of(tokens: str) -> Any:
    """Return the tokenizer of a folder; None for words and characters.

    Raises:
        SettingsError: it cannot be read.
    """
    if tokens in ("words", "characters"):
        return None
    with reading(f"data.tokens={tokens}", "words, characters, or a tokenizer's folder (pip install 'pflsim[hf]')"):
        from transformers import AutoTokenizer

        if not Path(tokens).is_dir():
            raise NotADirectoryError(tokens)
        return AutoTokenizer.from_pretrained(tokens, local_files_only=True, trust_remote_code=False)
