"""Datastores of retrieval drafters: an index on disk, or an index built in memory.

A datastore is a suffix array of documents in the target's token ids. One of another tokenizer, or
with too few tokens, raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forerun.core.roles import Target
from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build.shards import shard_of
from forerun.ngrams.index.build.suffix_array import TYPES, separator
from forerun.ngrams.index.counts import corpus as corpora
from forerun.ngrams.index.query.engine import Index
from forerun.ngrams.index.query.tokenizer_check import check_tokenizer
from forerun.utils.numbers import token_ids

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
    """The datastore from the options of drafter `name`, with at least `least` tokens.

    index: a folder (mapped from disk) or an open Index. corpus: text or .jsonl files. ids: one
    document. Raises ConfigError, DataError.
    """
    files = (corpus,) if isinstance(corpus, str | Path) else tuple(corpus)
    if (index is not None) + bool(files) + bool(len(ids)) != 1:
        raise ConfigError(
            f"{name} needs exactly one of index, corpus and ids; use {name}:corpus=FILE, or run "
            f"`forerun index build FOLDER TEXTS --tokenizer MODEL` and use {name}:index=FOLDER"
        )
    if index is not None:
        found = index if isinstance(index, Index) else Index.open(index)
        source = str(found.path or "the index")
        check_tokenizer(found, tokenizer)
    elif files:
        source = f"the corpus {', '.join(map(str, files))}"
        found = in_memory(corpora.tokenised(files, tokenizer), tokenizer, source)
    else:
        source = "the list of ids"
        found = in_memory([token_ids(ids)], tokenizer, source)
    if (size := _num_tokens(found)) < least:
        raise DataError(
            f"{source} has {size} tokens, and {name} needs at least {least}: a match and its "
            "continuation; add more text"
        )
    return found


def in_memory(
    documents: Iterable[np.ndarray], tokenizer: Tokenizer | None, source: str = "the corpus"
) -> Index:
    """An index in memory of documents of token ids [n], with the smallest possible token type."""
    texts = [text for document in documents if len(text := token_ids(document))]
    if not texts:
        raise DataError(f"{source} has no text; use another one")
    low, top = min(int(text.min()) for text in texts), max(int(text.max()) for text in texts)
    vocab = max(top + 1, 0 if tokenizer is None else tokenizer.vocab_size)
    width = 2 if vocab <= separator(np.uint16) else 4
    if low < 0 or vocab > separator(TYPES[width]):
        raise DataError(
            f"token ids must be in 0..{separator(np.uint32) - 1}, got {low}..{top}; remove others"
        )
    end = separator(TYPES[width])
    eos = min(tokenizer.eos_ids, default=end) if tokenizer is not None else end
    text = np.concatenate([piece for text in texts for piece in ([end], text)])
    text = np.where(text == eos, end, text).astype(TYPES[width])
    return Index([shard_of(text)], eos, threads=1)


def check_ids(index: Index, target: Target) -> None:
    """Raises ConfigError if the datastore has ids outside the target's vocabulary."""
    if (top := index.largest_id) >= target.vocab_size:
        raise ConfigError(
            f"the datastore has token id {top}, the target has {target.vocab_size} ids; build the "
            "datastore with the target's tokenizer"
        )


def _num_tokens(index: Index) -> int:
    """Number of tokens without separators."""
    if index.manifest is not None:
        return index.tokens - index.manifest.documents
    return sum(int((shard.text != index.separator).sum()) for shard in index.shards)
