"""Titled passages, their JSON-lines file, and their FM-index.

A document of the index is " title", end-of-title marker, " body". The index replaces a text store:
passages are extracted from it and decoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from forerun.errors import ConfigError, DataError
from forerun.models.identity import tokenizer_hash
from forerun.models.tokenizer import Tokenizer
from forerun.ngrams.index.fm.index import SAMPLE, FMIndex
from forerun.utils.files import parsed, read_lines

TITLE_END = "<|title-end|>"
BODY, TITLE, PASSAGE = "<|body|>", "<|title|>", "<|passage|>"  # last token of a prompt
SPECIAL = (TITLE_END, BODY, TITLE, PASSAGE)


@dataclass(frozen=True)
class Passage:
    """A title and a text. held_out: a sentence removed from the body, used as a question."""

    title: str
    body: str
    held_out: str = ""


def read_passages(path: Path | str) -> list[Passage]:
    """Reads a JSON-lines file with title, body and optional held_out. Raises DataError."""
    path = Path(path)
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read passages from {path}: {error}; expected a text file of JSON lines"
        ) from None
    out = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parsed(line)
            title, body = str(record["title"]), str(record["body"])
        except (ValueError, KeyError, TypeError) as error:
            why = f" ({error})" if isinstance(error, ValueError) else ""
            raise DataError(
                f'{path}, line {number}: expected {{"title": ..., "body": ...}}, got '
                f"{line[:60]!r}{why}"
            ) from None
        out.append(Passage(title, body, str(record.get("held_out", ""))))
    if not out:
        raise DataError(f"{path} has no passages; write one JSON object per line")
    return out


def write_passages(path: Path | str, passages: Iterable[Passage]) -> None:
    """Writes a file for `read_passages`."""
    lines = (json.dumps(asdict(p), ensure_ascii=False) for p in passages)
    Path(path).write_text("\n".join(lines) + "\n", "utf-8")


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Token ids of the markers and of "eos". Raises ConfigError if one is missing."""
    known = tokenizer.vocabulary()
    missing = [name for name in SPECIAL if name not in known]
    if missing or not tokenizer.eos_ids:
        raise ConfigError(
            f"this tokenizer has no {', '.join(missing) or 'eos id'}; use the tokenizer of a model "
            "trained by `forerun seal build`"
        )
    return {name: known[name] for name in SPECIAL} | {"eos": tokenizer.eos_ids[0]}


def encode_all(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of `spaced` texts; they may exceed the model's context."""
    if not texts:
        return []
    normalised = [spaced(text) for text in texts]
    return tokenizer.inner(normalised, add_special_tokens=False, verbose=False)["input_ids"]


def spaced(text: str) -> str:
    """The text with single spaces and one leading space, as it is tokenized."""
    return " " + " ".join(text.split())


class PassageIndex:
    """An FM-index of passages with its tokenizer."""

    def __init__(self, index: FMIndex, tokenizer: Tokenizer) -> None:
        self.index, self.tokenizer = index, tokenizer
        self.ids = special_ids(tokenizer)
        if index.eos != self.ids["eos"] or index.largest_id >= tokenizer.vocab_size:
            raise ConfigError(
                f"index and tokenizer do not match: eos {index.eos} and {self.ids['eos']}, largest "
                f"id {index.largest_id} and vocabulary size {tokenizer.vocab_size}; use the "
                "tokenizer of the index"
            )

    @classmethod
    def of(
        cls, passages: Iterable[Passage], tokenizer: Tokenizer, *, sample: int = SAMPLE
    ) -> PassageIndex:
        """Builds the index of passages. Raises DataError if there are none."""
        passages, ids = list(passages), special_ids(tokenizer)
        titles = encode_all(tokenizer, [p.title for p in passages])
        bodies = encode_all(tokenizer, [p.body for p in passages])
        documents = (
            [*title, ids[TITLE_END], *body] for title, body in zip(titles, bodies, strict=True)
        )
        eos, code = ids["eos"], tokenizer_hash(tokenizer)
        return cls(FMIndex.of(documents, eos, sample=sample, tokenizer=code), tokenizer)

    @classmethod
    def load(cls, path: Path | str, tokenizer: Tokenizer) -> PassageIndex:
        """Loads an index file. Raises DataError if damaged, ConfigError for another tokenizer."""
        return cls(FMIndex.load(path, tokenizer_hash(tokenizer)), tokenizer)

    def save(self, path: Path | str) -> None:
        """Writes the index file atomically."""
        self.index.save(path)

    def __len__(self) -> int:
        """The number of passages."""
        return self.index.num_documents

    def passage(self, number: int) -> Passage:
        """A passage, extracted from the index."""
        ids = self.index.extract(number)
        cut = np.flatnonzero(ids == self.ids[TITLE_END])
        end = int(cut[0]) if len(cut) else 0
        title, body = ids[:end].tolist(), ids[end + 1 :].tolist()
        return Passage(self.tokenizer.decode(title).strip(), self.tokenizer.decode(body).strip())
