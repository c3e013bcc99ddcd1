"""Datastores of retrieval drafters: an index on disk, or one made in memory of files or ids.

All are suffix arrays of documents in the target's own token ids; what is of another tokenizer, or
too small to continue anything, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forerun.core.roles import Target
from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build.encoders import fingerprint
from forerun.ngrams.index.build.shards import shard_of
from forerun.ngrams.index.build.suffix_array import TYPES, separator
from forerun.ngrams.index.counts import corpus as corpora
from forerun.ngrams.index.query.engine import Index

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

Files = str | Path | Many[str | Path]


def open_datastore(
    name: str,
    *,
    index: str | Path | Index | None = None,
    corpus: Files = (),
    ids: Many[int] = (),
    tokenizer: Tokenizer | None = None,
    least: int = 2,
) -> Index:
    """The datastore that the options of drafter `name` describe, of `least` tokens or more.

    index: a folder, mapped from disk, or an open Index. corpus: text or .jsonl files. ids: one
    document. Raises ConfigError, DataError.
    """
    files = (corpus,) if isinstance(corpus, str | Path) else tuple(corpus)
    if (index is not None) + bool(files) + bool(len(ids)) != 1:
        raise ConfigError(
            f"{name} needs a datastore, one of index, corpus and ids; give {name}:corpus=FILE, or "
            f"`forerun index build FOLDER TEXTS --tokenizer MODEL` and {name}:index=FOLDER"
        )
    if index is not None:
        found = index if isinstance(index, Index) else Index.open(index)
        told = str(getattr(found, "path", "the index"))
        check_tokenizer(found, tokenizer)
    elif files:
        told = f"the corpus {', '.join(map(str, files))}"
        found = in_memory(corpora.tokenised(files, tokenizer), tokenizer, told)
    else:
        told, found = "the list of ids", in_memory([np.asarray(ids)], tokenizer, "the list of ids")
    if _held(found) < least:
        raise DataError(
            f"{told} holds {_held(found)} tokens, and {name} needs at least {least}: a match and "
            "what follows it; give more text"
        )
    return found


def in_memory(
    documents: Iterable[np.ndarray], tokenizer: Tokenizer | None, told: str = "the corpus"
) -> Index:
    """An index in memory of documents of token ids [n], in as few bytes as the ids allow."""
    texts = [np.asarray(text, np.int64) for text in documents]
    held = [text for text in texts if len(text)]
    if not held:
        raise DataError(f"{told} holds no text; give another one")
    low, top = min(int(text.min()) for text in held), max(int(text.max()) for text in held)
    vocab = max(top + 1, 0 if tokenizer is None else tokenizer.vocab_size)
    width = 2 if vocab <= separator(np.uint16) else 4
    if low < 0 or vocab > separator(TYPES[width]):
        raise DataError(f"token ids must be in 0..{separator(np.uint32) - 1}, got {low}..{top}")
    end = separator(TYPES[width])
    eos = min(tokenizer.eos_ids, default=end) if tokenizer is not None else end
    text = np.concatenate([piece for text in held for piece in ([end], text)])
    text = np.where(text == eos, end, text).astype(TYPES[width])
    return Index([shard_of(text)], eos, threads=1)


def check_tokenizer(index: Index, tokenizer: Tokenizer | None) -> None:
    """Raises ConfigError if the index on disk was built with another vocabulary."""
    if index.manifest is None or tokenizer is None:
        return
    built = index.manifest.tokenizer
    if built["fingerprint"] and built["fingerprint"] != fingerprint(tokenizer.vocabulary()):
        raise ConfigError(
            f"the index was built with tokenizer {built['name']!r} ({built['vocabulary']} ids), "
            f"which is not the target's ({tokenizer.vocab_size} ids); build one with --tokenizer "
            "and the target's folder"
        )


def check_ids(index: Index, target: Target) -> None:
    """Raises ConfigError if the datastore holds ids that the target has not."""
    if (top := index.largest_id) >= target.vocab_size:
        raise ConfigError(
            f"the datastore holds token id {top}, the target has {target.vocab_size} ids: it was "
            "made with another tokenizer; use the target's own"
        )


def _held(index: Index) -> int:
    """Tokens without the separators."""
    if index.manifest is not None:
        return index.tokens - index.manifest.documents
    return sum(int((shard.text != index.separator).sum()) for shard in index.shards)
