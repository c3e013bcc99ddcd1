"""Text files as documents of token ids, and tri-gram counts of them in a file.

A file is one document; a file that ends in .jsonl holds one per line, in the field "text". Either
may be gzip-compressed (.gz). Long documents come in pieces that end at line breaks, so that memory
stays bounded: the few n-grams across such a border are not counted.
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

PIECE = 1 << 16  # characters, about
KIND = "tri-gram counts"


def tokenised(paths: Many[str | Path], tokenizer: Tokenizer | None) -> Iterator[np.ndarray]:
    """Token ids, int32, of every document or piece of one that is not blank.

    Raises ConfigError without a tokenizer, DataError for a file that cannot be read.
    """
    if tokenizer is None:
        raise ConfigError(
            "a corpus of text needs the target's tokenizer, got none; pass tokenizer=Tokenizer.load"
            "(model), or let forerun.load make the drafter"
        )
    encode = _encoder(tokenizer)
    for path in paths:
        for text in documents(Path(path)):
            if not text.isspace():
                yield np.array(encode(text), dtype=np.int32)


def documents(path: Path) -> Iterator[str]:
    """The documents of a file, long ones in pieces. Raises DataError with the line at fault."""
    if path.suffixes[-2:-1] == [".jsonl"] or path.suffix == ".jsonl":
        for number, line in enumerate(lines(path), 1):
            if line.strip():
                yield from pieces(_text_of(path, number, line).splitlines(keepends=True))
    else:
        yield from pieces(lines(path))


def lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 file, line ends kept. Raises DataError."""
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
    except (OSError, EOFError, ValueError) as error:  # ValueError: no name at all
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"the corpus file {path} cannot be read: {reason}; check it") from None


def pieces(texts: Iterator[str] | Many[str]) -> Iterator[str]:
    """The same text in pieces of PIECE characters or a little more; none is empty."""
    held: list[str] = []
    size = 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= PIECE:
            yield "".join(held)
            held, size = [], 0
    if size:
        yield "".join(held)


def save(path: Path, matrix: TrigramMatrix, tokenizer: Tokenizer | None) -> None:
    """Writes the counts of a corpus, whole or not at all."""
    settings = {"entries": matrix.entries}
    counts = {"tokens": matrix.learned, "evicted": matrix.dropped, "rows": len(matrix)}
    snapshot = Snapshot(KIND, matrix.rows()._asdict(), settings, counts)
    array_file.write(path, snapshot, array_file.Origin(tokenizer=fingerprint(tokenizer)))


def load(
    path: Path, tokenizer: Tokenizer | None, *, entries: int = 12, budget: int = 1 << 30
) -> TrigramMatrix:
    """Reads what `save` wrote. Raises DataError if it is damaged or of another vocabulary."""
    snapshot, origin = array_file.read(path, KIND)
    ours = fingerprint(tokenizer)
    if ours and origin.tokenizer and ours != origin.tokenizer:
        raise DataError(
            f"{path} was counted with another tokenizer (fingerprint {origin.tokenizer[:12]}, the "
            f"target's is {ours[:12]}); count the corpus anew with the target's"
        )
    snapshot.check({"entries": entries})
    rows = check(snapshot.arrays, entries)
    matrix = TrigramMatrix(entries=entries, budget=budget)
    if len(rows.keys) > matrix.most_rows:
        raise ConfigError(
            f"{path} holds {len(rows.keys)} pairs, the budget has room for {matrix.most_rows}; "
            "raise corpus_mb"
        )
    matrix.absorb(rows)
    matrix.learned = snapshot.counts["tokens"]
    return matrix


def fingerprint(tokenizer: Tokenizer | None) -> str:
    """A text that two tokenizers share only if their tokens have the same ids; "" for none."""
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
            "give plain text another file name than .jsonl"
        )
    check_text(f"{path}, line {number},", record["text"])
    return record["text"]


def _encoder(tokenizer: Tokenizer) -> Any:
    """Text to ids, without special tokens and without a warning that it exceeds the context."""
    backend = getattr(tokenizer.inner, "backend_tokenizer", None)
    if backend is None:
        return lambda text: tokenizer.encode(text, special=False)
    return lambda text: backend.encode(text, add_special_tokens=False).ids
