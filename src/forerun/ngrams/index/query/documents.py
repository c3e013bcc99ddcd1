"""Documents of an index: lookup by position, windows of text, metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build import manifest as store
from forerun.ngrams.index.build.page_sums import DOCUMENTS, LINES, METADATA, TEXT
from forerun.ngrams.index.build.suffix_array import Shard
from forerun.ngrams.index.query import kernels
from forerun.utils.numbers import whole

if TYPE_CHECKING:
    from forerun.ngrams.index.query.engine import Index, Match

WINDOW = 1000  # tokens


class Passage(NamedTuple):
    """A window of a document."""

    document: int  # document number
    length: int  # tokens of the document
    ids: list[int]  # the window; empty if the document is blocked
    offset: int  # begin of the hit in the window
    shard: int
    position: int  # of the hit, in the shard
    metadata: dict[str, Any]  # path, line and fields
    is_blocked: bool

    @property
    def shown(self) -> int:
        """Number of tokens in the window."""
        return len(self.ids)


@dataclass(frozen=True)
class Library:
    """Begins of documents [d] per shard, and their metadata if there is any."""

    starts: list[np.ndarray]
    lines: list[np.ndarray]
    metadata: list[np.ndarray]
    blocked: frozenset[int] = frozenset()

    @classmethod
    def of(cls, shards: Many[Shard], separator: int) -> Library:
        """The documents of shards in memory: every separator begins one."""
        return cls([np.flatnonzero(shard.text == separator) for shard in shards], [], [])

    @classmethod
    def open(cls, path: Path, manifest: store.Manifest, blocked: frozenset[int]) -> Library:
        """The documents of an index on disk."""

        def arrays(kind: str, dtype: Any) -> list[np.ndarray]:
            return [
                store.open_array(
                    path / manifest.folder / store.file_name(kind, s), info.files[kind].bytes, dtype
                )
                for s, info in enumerate(manifest.shards)
            ]

        return cls(
            arrays("documents", np.int64),
            arrays("lines", np.int64),
            arrays("metadata", np.uint8),
            blocked,
        )

    @property
    def documents(self) -> int:
        """The number of documents."""
        return sum(map(len, self.starts))

    def number(self, shard: int, local: int) -> int:
        """The document number: document i is in shard i mod S."""
        return local * len(self.starts) + shard

    def span(self, index: Index, shard: int, local: int) -> tuple[int, int]:
        """The positions [begin, end) of a document's tokens. Raises DataError for damage."""
        starts, size = self.starts[shard], len(index.shards[shard].text)
        index.verify(shard, DOCUMENTS, starts, local, local + 2)
        if not 0 <= local < len(starts):
            raise damaged(f"documents of shard {shard}", "a position is in no document")
        begin = int(starts[local]) + 1
        end = int(starts[local + 1]) if local + 1 < len(starts) else size
        if not 0 < begin <= end <= size:
            raise damaged(f"documents of shard {shard}", f"document {local} is {begin}..{end}")
        return begin, end

    def record(self, index: Index, shard: int, local: int) -> dict[str, Any]:
        """The metadata of a document. Raises DataError for damage."""
        if not self.lines:
            return {}
        lines, data = self.lines[shard], self.metadata[shard]
        index.verify(shard, LINES, lines, local, local + 2)
        start = int(lines[local])
        stop = int(lines[local + 1]) if local + 1 < len(lines) else len(data)
        if not 0 <= start < stop <= len(data):
            raise damaged(f"lines of shard {shard}", f"line {local} is {start}..{stop}")
        index.verify(shard, METADATA, data, start, stop)
        try:
            found = json.loads(data[start:stop].tobytes())
        except (ValueError, RecursionError) as error:
            raise damaged(f"metadata of shard {shard}", f"line {local}: {error}") from None
        if not isinstance(found, dict):
            raise damaged(f"metadata of shard {shard}", f"line {local} is not an object")
        return found


def damaged(file: str, problem: str) -> DataError:
    """The error for contradictory data of an index."""
    return DataError(
        f"the index is damaged: {file}: {problem}; find the files with `forerun index check`, and "
        "restore them from a copy"
    )


def at(index: Index, shard: int, position: int, window: int = WINDOW) -> Passage:
    """The passage around a position, within its document: half of the window is before it."""
    local = kernels.document_at(index.shards[shard], index.library.starts[shard], position)
    return around(index, shard, local, position, window)


def around(index: Index, shard: int, local: int, position: int, window: int) -> Passage:
    """`at` for a known document number `local` in the shard."""
    window = whole("window", window)
    text = index.shards[shard].text
    begin, end = index.library.span(index, shard, local)
    hit = max(begin, position)
    low = max(begin, hit - window // 2)
    number = index.library.number(shard, local)
    is_blocked = number in index.library.blocked
    stop = low if is_blocked else min(end, low + window)
    index.verify(shard, TEXT, text, low, stop)
    ids = text[low:stop].tolist()
    return Passage(
        number,
        end - begin,
        [index.eos if i == index.separator else i for i in ids],
        hit - low,
        shard,
        position,
        index.library.record(index, shard, local),
        is_blocked,
    )


def document(index: Index, number: int, *, window: int = WINDOW) -> Passage:
    """The beginning of a document. Raises ConfigError for a number out of range."""
    count = index.library.documents
    if not isinstance(number, int | np.integer) or not 0 <= number < count:
        raise ConfigError(
            f"there is no document {number!r}; use a whole number from 0 to {count - 1}"
        )
    local, shard = divmod(number, len(index.shards))
    begin, _ = index.library.span(index, shard, local)
    return around(index, shard, local, begin, window)


def by_rank(index: Index, shard: int, rank: int, *, window: int = WINDOW) -> Passage:
    """The passage of the suffix at a rank."""
    position = kernels.position_of(index.shards[shard], rank)
    index.check_reads()
    return at(index, shard, position, window)


def search(
    index: Index, match: Match, length: int, *, limit: int = 1, window: int = WINDOW, seed: int = 0
) -> list[Passage]:
    """The passages of up to `limit` distinct hits, drawn uniformly."""
    if not length:
        raise ConfigError("an empty query matches everywhere; use at least one token")
    sizes = [right - left for left, right in match.intervals]
    return [
        by_rank(index, shard, match.intervals[shard][0] + i, window=window)
        for shard, i in draw(sizes, limit, seed)
    ]


def search_ranges(
    index: Index, ranges: Many[np.ndarray], *, limit: int = 1, window: int = WINDOW, seed: int = 0
) -> list[Passage]:
    """`search` for ranges of positions int64 [m, 2] per shard; a hit is the start of a range."""
    return [
        at(index, shard, int(ranges[shard][i, 0]), window)
        for shard, i in draw([len(r) for r in ranges], limit, seed)
    ]


def draw(sizes: Many[int], limit: int, seed: int) -> Iterable[tuple[int, int]]:
    """Up to `limit` distinct (group, member) pairs from groups of these sizes."""
    limit, seed = whole("limit", limit), whole("seed", seed, 0)
    total, ends = sum(sizes), np.cumsum(sizes)
    rng = np.random.default_rng(seed)
    chosen = rng.choice(max(1, total), min(limit, total), replace=False)
    for i in chosen.tolist():
        group = int(np.searchsorted(ends, i, side="right"))
        yield group, i - int(ends[group]) + sizes[group]
