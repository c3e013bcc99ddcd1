"""Passages with titles, their file, and their FM-index: " title" end-of-title " body" per document.

The index needs no store of texts beside it: a passage is extracted from it and decoded.
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
from forerun.utils.files import parsed

TITLE_END = "<|title-end|>"
BODY, TITLE, PASSAGE = "<|body|>", "<|title|>", "<|passage|>"  # what a prompt asks for
SPECIAL = (TITLE_END, BODY, TITLE, PASSAGE)


@dataclass(frozen=True)
class Passage:
    """What is searched for. held_out: a sentence that was taken out of it, to ask with."""

    title: str
    body: str
    held_out: str = ""


def read_passages(path: Path | str) -> list[Passage]:
    """Passages of a JSON-lines file: title, body, perhaps held_out. Raises DataError."""
    path = Path(path)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read passages from {path}: {error}") from None
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
        raise DataError(f"{path} holds no passages; write one JSON object per line")
    return out


def write_passages(path: Path | str, passages: Iterable[Passage]) -> None:
    """The file that `read_passages` reads."""
    lines = (json.dumps(asdict(p), ensure_ascii=False) for p in passages)
    Path(path).write_text("\n".join(lines) + "\n", "utf-8")


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the markers and, under "eos", of the end. Raises ConfigError without them."""
    known = tokenizer.vocabulary()
    missing = [name for name in SPECIAL if name not in known]
    if missing or not tokenizer.eos_ids:
        raise ConfigError(
            f"this tokenizer has no {', '.join(missing) or 'end id'}; use the one of a model that "
            "forerun.training.recipes.seal trained"
        )
    return {name: known[name] for name in SPECIAL} | {"eos": tokenizer.eos_ids[0]}


def encode_all(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of texts, as `spaced` makes them; longer ones than a model reads are welcome."""
    if not texts:
        return []
    whole = [spaced(text) for text in texts]
    return tokenizer.inner(whole, add_special_tokens=False, verbose=False)["input_ids"]


def spaced(text: str) -> str:
    """The text as it is tokenised: single spaces, one in front."""
    return " " + " ".join(text.split())


class PassageIndex:
    """An FM-index of passages and the tokenizer that it was built with."""

    def __init__(self, index: FMIndex, tokenizer: Tokenizer) -> None:
        self.index, self.tokenizer = index, tokenizer
        self.ids = special_ids(tokenizer)
        if index.eos != self.ids["eos"] or index.largest_id >= tokenizer.vocab_size:
            raise ConfigError(
                f"the index ends documents with id {index.eos} and holds ids up to "
                f"{index.largest_id}, this tokenizer has {tokenizer.vocab_size} ids and ends with "
                f"{self.ids['eos']}; use the tokenizer that it was built with"
            )

    @classmethod
    def of(
        cls, passages: Iterable[Passage], tokenizer: Tokenizer, *, sample: int = SAMPLE
    ) -> PassageIndex:
        """The index of passages. Raises DataError if there are none."""
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
        """The index in a file. Raises DataError if damaged, ConfigError for another tokenizer."""
        return cls(FMIndex.load(path, tokenizer_hash(tokenizer)), tokenizer)

    def save(self, path: Path | str) -> None:
        """Writes one file, whole or not at all."""
        self.index.save(path)

    def __len__(self) -> int:
        """How many passages there are."""
        return self.index.num_documents

    def passage(self, number: int) -> Passage:
        """A passage, from the index alone."""
        ids = self.index.extract(number)
        cut = np.flatnonzero(ids == self.ids[TITLE_END])
        end = int(cut[0]) if len(cut) else 0
        title, body = ids[:end].tolist(), ids[end + 1 :].tolist()
        return Passage(self.tokenizer.decode(title).strip(), self.tokenizer.decode(body).strip())
