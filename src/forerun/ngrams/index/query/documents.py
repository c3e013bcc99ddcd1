"""Documents of an index: lookup by position, windows of text, metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forerun.errors import ConfigError
from forerun.ngrams.index.build import manifest as store
from forerun.ngrams.index.build.suffix_array import Shard, pointer

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

    def record(self, shard: int, local: int) -> dict[str, Any]:
        """The metadata of a document."""
        if not self.lines:
            return {}
        line, data = self.lines[shard], self.metadata[shard]
        stop = line[local + 1] if local + 1 < len(line) else len(data)
        return json.loads(data[line[local] : stop].tobytes())


def at(index: Index, shard: int, position: int, window: int = WINDOW) -> Passage:
    """The passage around a position, within its document: half of the window is before it."""
    local = int(np.searchsorted(index.library.starts[shard], position, side="right")) - 1
    return around(index, shard, local, position, window)


def around(index: Index, shard: int, local: int, position: int, window: int) -> Passage:
    """`at` for a known document number `local` in the shard."""
    if window < 1:
        raise ConfigError(f"window={window} is too small; use at least 1 token")
    starts, text = index.library.starts[shard], index.shards[shard].text
    begin = int(starts[local]) + 1
    end = int(starts[local + 1]) if local + 1 < len(starts) else len(text)
    hit = max(begin, position)
    low = max(begin, hit - window // 2)
    number = index.library.number(shard, local)
    is_blocked = number in index.library.blocked
    ids = [] if is_blocked else text[low : min(end, low + window)].tolist()
    return Passage(
        number,
        end - begin,
        [index.eos if i == index.separator else i for i in ids],
        hit - low,
        shard,
        position,
        index.library.record(shard, local),
        is_blocked,
    )


def document(index: Index, number: int, *, window: int = WINDOW) -> Passage:
    """The beginning of a document. Raises ConfigError for a number out of range."""
    count = index.library.documents
    if not 0 <= number < count:
        raise ConfigError(f"there is no document {number}; use 0 to {count - 1}")
    local, shard = divmod(number, len(index.shards))
    return around(index, shard, local, int(index.library.starts[shard][local]) + 1, window)


def by_rank(index: Index, shard: int, rank: int, *, window: int = WINDOW) -> Passage:
    """The passage of the suffix at a rank."""
    table = index.shards[shard]
    return at(index, shard, pointer(table.table, table.width, rank), window)


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
    if limit < 1:
        raise ConfigError(f"limit={limit} is too small; use at least 1")
    total, ends = sum(sizes), np.cumsum(sizes)
    rng = np.random.default_rng(seed)
    chosen = rng.choice(max(1, total), min(limit, total), replace=False)
    for i in chosen.tolist():
        group = int(np.searchsorted(ends, i, side="right"))
        yield group, i - int(ends[group]) + sizes[group]
