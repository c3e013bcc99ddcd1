"""Infini-gram: n-gram statistics of any length from a suffix array.

Liu et al., "Infini-gram: Scaling Unbounded n-gram Language Models to a Trillion Tokens", 2024.
count(q) is the length of an interval of ranks; P(x | c) = count(cx) / count(c). The unbounded model
uses the longest suffix of the context that occurs, without smoothing. Counts of several shards add
up.

The end of a document is a token, `Index.eos`, in queries and in next tokens. All methods are
thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build import encoders
from forerun.ngrams.index.build import manifest as store
from forerun.ngrams.index.build.page_sums import PAGE_BYTES, touch_range, wrong_pages
from forerun.ngrams.index.build.shards import open_shards, shard_of
from forerun.ngrams.index.build.suffix_array import TYPES, Shard, largest_id, separator
from forerun.ngrams.index.build.verify import FAST, check_mode, warn_without_pages
from forerun.ngrams.index.query import attribution, kernels, results
from forerun.ngrams.index.query import cnf as clauses
from forerun.ngrams.index.query import documents as passages
from forerun.ngrams.index.query.results import Match, Next, Prob
from forerun.ngrams.index.query.tokenizer_check import check_encoder
from forerun.utils.numbers import token_ids, whole

MAX_SUPPORT = 1000
MIN_PARALLEL_QUERIES = 64  # a smaller batch runs in one thread
NO_ID = -2  # replaces invalid ids; matches nothing
Ids = Many[int] | np.ndarray


class Index:
    """An index open for queries, from `Index.open(folder)` or `Index.of(documents)`."""

    def __init__(
        self,
        shards: Many[Shard],
        eos: int | None = None,
        *,
        library: passages.Library | None = None,
        encoder: encoders.Encoder | None = None,
        threads: int = 2,
        manifest: store.Manifest | None = None,
        numbers: Many[int] | None = None,
        path: Path | None = None,
        is_loaded: bool = True,
    ) -> None:
        self.path, self._is_loaded = path, is_loaded  # the folder on disk, if any
        self.shards = list(shards)
        self._numbers = range(len(self.shards)) if numbers is None else numbers  # on disk
        self._flags = [shard.seen[-1:] for shard in self.shards]  # 1: a page was wrong
        self.separator = separator(self.shards[0].text.dtype)
        self.eos = self.separator if eos is None else eos
        self.library = library or passages.Library.of(self.shards, self.separator)
        self.threads, self.manifest, self._encoder = whole("threads", threads), manifest, encoder
        self.tokens = sum(len(shard.text) for shard in self.shards)
        self._max_distinct = max(1 << s.shift + 1 for s in self.shards) * max(
            len(s.buckets) for s in self.shards
        )

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        tokenizer: encoders.Spec | None = None,
        load: bool = False,
        threads: int = 2,
        blocked: Iterable[int] = (),
        verify: str = FAST,
    ) -> Index:
        """Opens the index in a folder, mapped from disk, or in memory with `load`.

        tokenizer: must be the index's tokenizer; default: the copy in the index. blocked: numbers
        of documents with hidden text. verify: "full" reads all files at once, "fast" verifies each
        page when a query first reads it, "off" verifies sizes only. Raises DataError, ConfigError.
        """
        path = Path(path)
        check_mode(verify)
        manifest = store.read_manifest(path)
        encoder = None if tokenizer is None else encoders.load(tokenizer)
        if encoder is not None:
            check_encoder(path, manifest, encoder)
        shards = open_shards(path, manifest, load=load, verify=verify)
        if verify == FAST:
            warn_without_pages(path, manifest)
        library = passages.Library.open(path, manifest, frozenset(blocked))
        return cls(
            shards,
            manifest.eos,
            library=library,
            encoder=encoder,
            threads=threads,
            manifest=manifest,
            path=path,
            is_loaded=load,
        )

    @classmethod
    def of(
        cls,
        documents: Iterable[Ids],
        *,
        width: int = 2,
        shards: int = 1,
        eos: int | None = None,
        threads: int = 1,
    ) -> Index:
        """Builds an index in memory from documents of token ids."""
        if width not in TYPES:
            raise ConfigError(f"width={width!r} is invalid; use 1, 2 or 4 bytes per token")
        shards = whole("shards", shards)
        end = separator(TYPES[width])
        texts: list[list[int]] = [[] for _ in range(shards)]
        for i, document in enumerate(documents):
            ids = token_ids(document).tolist()
            if any(not 0 <= t < end for t in ids):
                raise DataError(
                    f"document {i}: token ids must be in 0..{end - 1} for {width} bytes, got "
                    f"{min(ids)}..{max(ids)}; use width=4"
                )
            texts[i % shards] += [end, *(end if t == eos else t for t in ids)]
        if not any(texts):
            raise DataError("expected documents to index, got none; pass at least one")
        return cls([shard_of(np.array(text, TYPES[width])) for text in texts], eos, threads=threads)

    @cached_property
    def encoder(self) -> encoders.Encoder:
        """The tokenizer of the index."""
        if self._encoder is not None:
            return self._encoder
        if self.manifest is None or self.path is None:
            return encoders.Ids()
        return encoders.load_saved(self.path / self.manifest.folder, dict(self.manifest.tokenizer))

    @cached_property
    def largest_id(self) -> int:
        """The largest id of any document."""
        if self.manifest is not None:
            return max(shard.top for shard in self.manifest.shards)
        return max(largest_id(shard.text) for shard in self.shards)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory, without files mapped from disk."""
        if not self._is_loaded:
            return 0
        return sum(a.nbytes for s in self.shards for a in (s.text, s.table, s.fences))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, "index")

    # verification

    def check_reads(self) -> None:
        """Raises DataError if a query has read a page that differs from its checksum."""
        for number, flag in enumerate(self._flags):
            if flag[0]:
                raise DataError(self._damage(number))

    def verify(self, number: int, part: int, data: np.ndarray, start: int, stop: int) -> None:
        """Raises DataError unless data[start:stop] of a file of a shard match their checksums."""
        stop = min(stop, len(data))
        if 0 <= start < stop:
            touch_range(*self.shards[number].pages, part, data, start, stop)
        self.check_reads()

    def _damage(self, number: int) -> str:
        kind, page = next(wrong_pages(self.shards[number].pages))
        name = store.file_name(kind, self._numbers[number])
        folder = (self.path or Path()) / (self.manifest.folder if self.manifest else "")
        return (
            f"{folder / name} is damaged: bytes {page * PAGE_BYTES} to "
            f"{(page + 1) * PAGE_BYTES - 1} differ from their checksum; restore it from a copy, or "
            "build the index again"
        )

    # queries

    def find(self, query: Ids) -> Match:
        """The occurrences of a query; an empty query occurs at every position."""
        q = self.ids(query)
        found = [kernels.find(shard, q, 0, len(q)) for shard in self.shards]
        self.check_reads()
        return Match(sum(right - left for left, right in found), found)

    def count(self, query: Ids) -> int:
        """The number of occurrences of a query."""
        q = self.ids(query)
        total = 0
        for shard in self.shards:
            left, right = kernels.find(shard, q, 0, len(q))
            total += right - left
        self.check_reads()
        return total

    def count_many(self, queries: Many[Ids]) -> np.ndarray:
        """Counts of a batch, int64 [m]."""
        flat, starts = self._flat(queries)
        found = self._batch("find_many", flat, starts, 2)
        return (found[:, :, 1] - found[:, :, 0]).sum(axis=0)

    def prob(self, context: Ids, token: int) -> Prob:
        """P(token | context) with the whole context."""
        match = self.find(context)
        return self._prob(match, self.ids([*context, token]), len(context))

    def infgram_prob(self, context: Ids, token: int) -> Prob:
        """P(token | the longest suffix of the context that occurs)."""
        length, match = self.longest_suffix(context)
        tail = [*context][len(context) - length :]
        return self._prob(match, self.ids([*tail, token]), length)

    def ntd(self, context: Ids, max_support: int | None = MAX_SUPPORT) -> Next:
        """Next tokens of a context; exact up to `max_support` occurrences, or with None."""
        return self._next(self.find(context), len(context), max_support)

    def infgram_ntd(self, context: Ids, max_support: int | None = MAX_SUPPORT) -> Next:
        """Next tokens of the longest suffix of the context that occurs."""
        length, match = self.longest_suffix(context)
        return self._next(match, length, max_support)

    def longest_suffix(self, context: Ids) -> tuple[int, Match]:
        """The length of the longest suffix that occurs, and its occurrences."""
        q = self.ids(context)
        found = [kernels.longest_of(shard[:], q) for shard in self.shards]
        self.check_reads()
        best = max(length for length, _, _ in found)
        intervals = [(left, right) if n == best else (0, 0) for n, left, right in found]
        return best, Match(sum(right - left for left, right in intervals), intervals)

    def infgram_many(
        self, contexts: Many[Ids], max_support: int | None = MAX_SUPPORT
    ) -> list[Next]:
        """`infgram_ntd` of a batch."""
        flat, starts = self._flat(contexts)
        found = self._batch("longest_suffixes", flat, starts, 3)
        best = found[:, :, 0].max(axis=0)
        found[:, :, 1:] *= found[:, :, :1] == best[None, :, None]
        totals = (found[:, :, 2] - found[:, :, 1]).sum(axis=0)
        units = np.array([results.unit_for(int(total), max_support) for total in totals], np.int64)
        parts = self._next_tokens(found, units)
        return [
            results.add_up(
                self.eos,
                self.separator,
                [(ids[s[i] : s[i + 1]], counts[s[i] : s[i + 1]]) for ids, counts, s in parts],
                int(totals[i]),
                int(best[i]),
                bool(units[i] > 1),
            )
            for i in range(len(contexts))
        ]

    def find_cnf(self, cnf: Many[Many[Ids]], **options: Any) -> clauses.Ranges:
        """Ranges with a match of every clause; a clause matches if any of its terms does."""
        return clauses.find(self, cnf, **options)

    def search(self, query: Ids, **options: Any) -> list[passages.Passage]:
        """Random passages around a query's occurrences."""
        return passages.search(self, self.find(query), len(query), **options)

    def search_cnf(
        self, cnf: Many[Many[Ids]], *, limits: dict[str, int] | None = None, **options: Any
    ) -> list[passages.Passage]:
        """Random passages around the ranges of `find_cnf(cnf, **limits)`."""
        return passages.search_ranges(self, self.find_cnf(cnf, **(limits or {})).ranges, **options)

    def document(self, number: int, **options: Any) -> passages.Passage:
        """A document by its number."""
        return passages.document(self, number, **options)

    def longest_matches(self, query: Ids, longest: int = 0) -> np.ndarray:
        """The length of the longest match from every position. int64 [n]."""
        return attribution.longest_matches(self, query, longest)

    def attribute(self, query: Ids, **options: Any) -> list[attribution.Span]:
        """The maximal spans of a text that occur, with documents that contain them."""
        return attribution.attribute(self, query, **options)

    # parts

    def ids(self, query: Ids) -> np.ndarray:
        """A query for the kernels, int64: eos becomes the separator, invalid ids NO_ID.

        Raises DataError for fractions and texts.
        """
        q = token_ids(query)
        kernels.normalize_ids(q, self.eos, self.separator, NO_ID)
        return q

    def _flat(self, queries: Many[Ids]) -> tuple[np.ndarray, np.ndarray]:
        """The concatenated queries, and the start of each."""
        try:
            starts = np.zeros(len(queries) + 1, np.int64)
            np.cumsum([len(query) for query in queries], out=starts[1:])
            flat = token_ids(list(chain.from_iterable(queries)))
        except TypeError as error:
            raise DataError(f"expected lists of token ids, got {queries!r:.80} ({error})") from None
        kernels.normalize_ids(flat, self.eos, self.separator, NO_ID)
        return flat, starts

    def _batch(self, name: str, flat: np.ndarray, starts: np.ndarray, columns: int) -> np.ndarray:
        """Runs a kernel over shards and queries, large batches in threads. [S, m, columns]."""
        m, kernel = len(starts) - 1, getattr(kernels, name)
        out = np.empty((len(self.shards), m, columns), np.int64)
        pieces = 1 if m < MIN_PARALLEL_QUERIES else self.threads
        borders = np.linspace(0, m, pieces + 1).astype(int).tolist()
        jobs = [
            (shard, flat, starts, a, out[s, a:b])
            for s, shard in enumerate(self.shards)
            for a, b in zip(borders[:-1], borders[1:], strict=True)
        ]
        if pieces == 1:
            for job in jobs:
                kernel(*job)
        else:
            list(self._pool.map(lambda job: kernel(*job), jobs))
        self.check_reads()
        return out

    def _prob(self, match: Match, whole: np.ndarray, length: int) -> Prob:
        """The share of a context's occurrences followed by the last id of `whole`."""
        count = self._followed(match.intervals, whole, length)
        prob = count / match.count if match.count else None
        return Prob(prob, count, match.count, length)

    def _followed(self, intervals: list[tuple[int, int]], whole: np.ndarray, length: int) -> int:
        """The number of occurrences of the last `length` + 1 ids of `whole` in the intervals."""
        low, n, count = len(whole) - 1 - length, len(whole), 0
        for shard, (left, right) in zip(self.shards, intervals, strict=True):
            if left == right:
                continue
            a, b = kernels.find_within(shard, whole, low, n, left, right)
            count += b - a
            if whole[-1] == self.separator:  # the last document has no separator after it
                count += kernels.next_token(shard, left, length) == kernels.END
        self.check_reads()
        return count

    def _next_tokens(
        self, found: np.ndarray, units: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Next tokens of matches (length, left, right) int64 [S, m, 3], per shard."""
        parts = [
            kernels.next_tokens_many(shard, rows, units, self._max_distinct)
            for shard, rows in zip(self.shards, found, strict=True)
        ]
        self.check_reads()
        return parts

    def _next(self, match: Match, length: int, max_support: int | None) -> Next:
        unit = results.unit_for(match.count, max_support)
        parts = []
        for shard, (left, right) in zip(self.shards, match.intervals, strict=True):
            if left < right:
                capacity = kernels.max_next(right - left, unit, self._max_distinct)
                ids, counts = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
                size = kernels.next_tokens(shard, length, left, right, unit, ids, counts)
                parts.append((ids[:size], counts[:size]))
        self.check_reads()
        return results.add_up(self.eos, self.separator, parts, match.count, length, unit > 1)
