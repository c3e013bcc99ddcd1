"""Reads text files as documents of token ids; saves and loads tri-gram counts.

A file is one document; a .jsonl file has one document per line, in the field "text". Both may be
gzip-compressed (.gz). Long documents are split at line breaks to bound memory; n-grams across a
split are not counted.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.core.records import Snapshot
from forerun.errors import ConfigError, DataError
from forerun.ngrams.tables.trigram.table import TrigramMatrix, check
from forerun.state import array_file
from forerun.utils.files import check_text, parsed

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

PIECE_CHARACTERS = 1 << 16  # approximate size of a piece
KIND = "tri-gram counts"


def tokenised(paths: Many[str | Path], tokenizer: Tokenizer | None) -> Iterator[np.ndarray]:
    """Token ids, int32, of every document or piece that is not blank.

    Raises ConfigError without a tokenizer, DataError for a file that cannot be read.
    """
    if tokenizer is None:
        raise ConfigError(
            "a corpus of text needs the target's tokenizer, got none; pass "
            "tokenizer=Tokenizer.load(model), or create the drafter by forerun.load"
        )
    encode = _encoder(tokenizer)
    for path in paths:
        for text in documents(Path(path)):
            if not text.isspace():
                yield np.array(encode(text), dtype=np.int32)


def documents(path: Path) -> Iterator[str]:
    """The documents of a file, long ones in pieces. Raises DataError with the line number."""
    if path.suffixes[-2:-1] == [".jsonl"] or path.suffix == ".jsonl":
        for number, line in enumerate(lines(path), 1):
            if line.strip():
                yield from pieces(_text_of(path, number, line).splitlines(keepends=True))
    else:
        yield from pieces(lines(path))


def lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, with line ends. Raises DataError."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):  # noqa: B007
                yield line.decode("utf-8" if number > 1 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}, is not UTF-8: byte 0x{error.object[error.start]:02x} at "
            f"position {error.start}; convert the file, as with iconv -f latin1 -t utf-8"
        ) from None
    except (OSError, EOFError, ValueError) as error:  # ValueError: an invalid file name
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"the corpus file {path} cannot be read: {reason}; check it") from None


def pieces(texts: Iterator[str] | Many[str]) -> Iterator[str]:
    """The text in non-empty pieces of at least PIECE_CHARACTERS, except the last."""
    pending: list[str] = []
    size = 0
    for text in texts:
        pending.append(text)
        size += len(text)
        if size >= PIECE_CHARACTERS:
            yield "".join(pending)
            pending, size = [], 0
    if size:
        yield "".join(pending)


def save(path: Path, matrix: TrigramMatrix, tokenizer: Tokenizer | None) -> None:
    """Writes the counts of a corpus atomically."""
    settings = {"entries": matrix.entries}
    counts = {"tokens": matrix.learned, "evicted": matrix.dropped, "rows": len(matrix)}
    snapshot = Snapshot(KIND, matrix.rows()._asdict(), settings, counts)
    array_file.write(path, snapshot, array_file.Origin(tokenizer=fingerprint(tokenizer)))


def load(
    path: Path, tokenizer: Tokenizer | None, *, entries: int = 12, budget: int = 1 << 30
) -> TrigramMatrix:
    """Loads a file of `save`. Raises DataError if it is damaged or has another vocabulary."""
    snapshot, origin = array_file.read(path, KIND)
    ours = fingerprint(tokenizer)
    if ours and origin.tokenizer and ours != origin.tokenizer:
        raise DataError(
            f"{path} was counted with another tokenizer (fingerprint {origin.tokenizer[:12]}, the "
            f"target's is {ours[:12]}); count the corpus again with the target's tokenizer"
        )
    snapshot.check({"entries": entries})
    rows = check(snapshot.arrays, entries)
    matrix = TrigramMatrix(entries=entries, budget=budget)
    if len(rows.keys) > matrix.max_rows:
        raise ConfigError(
            f"{path} has {len(rows.keys)} pairs, more than the budget of {matrix.max_rows}; "
            "raise corpus_mb"
        )
    matrix.absorb(rows)
    matrix.learned = snapshot.counts["tokens"]
    return matrix


def fingerprint(tokenizer: Tokenizer | None) -> str:
    """A hash of the vocabulary, equal only for the same tokens at the same ids; "" without one."""
    if tokenizer is None:
        return ""
    vocabulary = sorted(tokenizer.vocabulary().items())
    return hashlib.sha256(repr(vocabulary).encode()).hexdigest()


def _text_of(path: Path, number: int, line: str) -> str:
    why = ""
    try:
        record: Any = parsed(line)
    except ValueError as error:
        record, why = None, f" ({error})"
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataError(
            f'{path}, line {number}: expected a JSON object with "text", got {line[:40]!r}{why}; '
            "rename the file if it is plain text"
        )
    check_text(f"{path}, line {number},", record["text"])
    return record["text"]


def _encoder(tokenizer: Tokenizer) -> Any:
    """A function from text to ids, without special tokens and without length warnings."""
    backend = getattr(tokenizer.inner, "backend_tokenizer", None)
    if backend is None:
        return lambda text: tokenizer.encode(text, special=False)
    return lambda text: backend.encode(text, add_special_tokens=False).ids
