"""Second stage of a build: the suffix array of every shard, in parts of bounded memory.

Threads sort the parts, each within its share of the memory, into one file of parts. Threads then
merge slices of the result. An interrupted stage continues after the last finished piece.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.ngrams.index.build import merge as merging
from forerun.ngrams.index.build.manifest import file_name, write_error
from forerun.ngrams.index.build.suffix_array import (
    TYPES,
    find_buckets,
    pack,
    part_bytes,
    pointer_width,
    sort_part,
)

OVERLAP_BYTES = 100_000  # compared beyond the end of a part
MIN_SPLIT_TOKENS = 1 << 22  # a shorter shard is sorted by one thread
POSITIONS_PER_WRITE = 1 << 17
MIN_PART_TOKENS = 1 << 16


Report = Callable[[str, int], None]  # "sort" or "merge", tokens done


@dataclass
class Sorted:
    """Finished pieces of the stage. borders[s]: begins and ends of the parts of shard s."""

    borders: list[list[int]] = field(default_factory=list)
    overlap: int = 0  # tokens
    parts: list[list[int]] = field(default_factory=list)  # (shard, part) pairs
    slices: list[list[int]] = field(default_factory=list)
    slices_each: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def plan_parts(
    lengths: list[int], width: int, memory: int, threads: int, part: int = 0, overlap: int = 0
) -> Sorted:
    """Cuts shards of these lengths into parts, so that `threads` sorters need `memory` bytes.

    part, overlap: tokens; 0: derived from memory and OVERLAP_BYTES.
    """
    overlap = overlap or OVERLAP_BYTES // width
    fitting = memory // threads // part_bytes(width) - overlap
    max_tokens = part or max(MIN_PART_TOKENS, fitting)
    state = Sorted(overlap=overlap, slices_each=4 * threads)
    for length in lengths:
        count = -(-length // max_tokens)
        if not part and length >= MIN_SPLIT_TOKENS and len(lengths) < threads:
            count = max(count, threads)
        state.borders.append(np.linspace(0, length, max(1, count) + 1).astype(int).tolist())
    return state


@dataclass(frozen=True)
class Stage:
    """Sorts the token files in `folder`. `save` stores the state, `report` receives progress."""

    folder: Path
    width: int
    tops: list[int]
    threads: int
    save: Callable[[Sorted], None]
    report: Report
    call: Callable[..., Any] | None = None  # runs function(*arguments) in another process

    def run(self, state: Sorted) -> None:
        """Completes the stage from `state`. Raises CapacityError if the disk is full."""
        lock = threading.Lock()

        def finished(kind: list[list[int]], piece: list[int]) -> None:
            with lock:
                kind.append(piece)
                self.save(state)

        def sort(piece: list[int]) -> None:
            shard, part = piece
            start, stop = state.borders[shard][part : part + 2]
            where = (self.folder, shard, self.width)
            largest = self.tops[shard]
            self._run_piece(stop - start, sort_piece, *where, start, stop, state.overlap, largest)
            finished(state.parts, piece)

        parts = [[s, p] for s, b in enumerate(state.borders) for p in range(len(b) - 1)]
        for s in range(len(state.borders)):
            self._allocate(state, s, "parts")
        self._run_all(sort, [piece for piece in parts if piece not in state.parts])
        for s, borders in enumerate(state.borders):
            if len(borders) == 2:  # a single part needs no merge
                if self._file(s, "parts").exists():
                    os.replace(self._file(s, "parts"), self._file(s, "suffixes"))
                continue
            self._merge_shard(state, s, lambda piece: finished(state.slices, piece))

    def _run_all(self, work: Callable[[list[int]], object], pieces: Iterable[list[int]]) -> None:
        """Runs pieces in threads; the first error cancels the rest."""
        with ThreadPoolExecutor(self.threads) as pool:
            futures = [pool.submit(work, piece) for piece in pieces]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _run_piece(self, count: int, piece: Callable[..., None], *arguments: Any) -> None:
        """Runs a piece of `count` tokens in this process or by `call`."""
        if self.call is None:
            piece(*arguments, self.report)
        else:
            self.call(piece, *arguments)
            self.report("sort" if piece is sort_piece else "merge", count)

    def _file(self, shard: int, kind: str) -> Path:
        return table_file(self.folder, shard, kind)

    def _allocate(self, state: Sorted, shard: int, kind: str) -> None:
        """Reserves disk space for all positions, so that a full disk is an early error."""
        path, length = self._file(shard, kind), state.borders[shard][-1]
        if self._file(shard, "suffixes").exists():
            return
        try:
            with path.open("r+b" if path.exists() else "w+b") as file:
                if length:
                    os.posix_fallocate(file.fileno(), 0, length * pointer_width(length))
        except OSError as error:
            raise write_error(path, error) from error

    def _merge_shard(
        self, state: Sorted, shard: int, finished: Callable[[list[int]], None]
    ) -> None:
        if self._file(shard, "suffixes").exists():
            return
        self._allocate(state, shard, "new")
        text = text_of(self.folder, shard, self.width)
        borders, limit = np.array(state.borders[shard], np.int64), state.overlap
        table = np.asarray(np.memmap(self._file(shard, "parts"), np.uint8, "r"))
        width = pointer_width(len(text))
        cuts = merging.cut(text, table, width, borders, state.slices_each, limit)

        def merge(piece: list[int]) -> None:
            low, high = cuts[piece[1]], cuts[piece[1] + 1]
            begin, where = int((low - borders[:-1]).sum()), (self.folder, shard, self.width)
            count = int((high - low).sum())
            self._run_piece(count, merge_slice, *where, begin, low, high, limit)
            finished(piece)

        pieces = [[shard, i] for i in range(state.slices_each)]
        self._run_all(merge, [piece for piece in pieces if piece not in state.slices])
        os.replace(self._file(shard, "new"), self._file(shard, "suffixes"))
        self._file(shard, "parts").unlink()


def sort_piece(
    folder: Path,
    shard: int,
    width: int,
    start: int,
    stop: int,
    overlap: int,
    top: int,
    report: Report = lambda stage, count: None,
) -> None:
    """Sorts the suffixes of a shard that begin in [start, stop) into its file of parts."""
    text = text_of(folder, shard, width)
    order = sort_part(text, start, stop, overlap, top)
    report("sort", stop - start)
    each = pointer_width(len(text))
    chunks = (
        pack(order[at : at + POSITIONS_PER_WRITE].astype(np.int64) + start, each)
        for at in range(0, len(order), POSITIONS_PER_WRITE)
    )
    write_at(table_file(folder, shard, "parts"), start * each, chunks)


def merge_slice(
    folder: Path,
    shard: int,
    width: int,
    begin: int,
    low: np.ndarray,
    high: np.ndarray,
    limit: int,
    report: Report = lambda stage, count: None,
) -> None:
    """Merges ranks [low, high) of a shard's parts; writes the result from rank `begin`."""
    text = text_of(folder, shard, width)
    table = np.asarray(np.memmap(table_file(folder, shard, "parts"), np.uint8, "r"))
    each = pointer_width(len(text))

    def chunks() -> Iterable[np.ndarray]:
        merge = merging.begin(low, high)
        out = np.empty(POSITIONS_PER_WRITE * each, np.uint8)
        while count := merging.advance(text, table, each, merge, limit, out):
            report("merge", count)
            yield out[: count * each]

    write_at(table_file(folder, shard, "new"), begin * each, chunks())


def table_file(folder: Path, shard: int, kind: str) -> Path:
    """The file of a shard's positions: "suffixes" (final), "parts" or "new" (temporary)."""
    name = file_name("suffixes", shard)
    return folder / {"suffixes": name, "parts": f"{name}.parts", "new": f"{name}.new"}[kind]


def text_of(folder: Path, shard: int, width: int) -> np.ndarray:
    """The tokens of a shard, mapped from disk."""
    path = folder / file_name("tokens", shard)
    dtype = TYPES[width]
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)


def warm_up(width: int) -> None:
    """Compiles the kernels for tokens of this width, or loads them from the cache."""
    text = np.array([1, 2, 1, 2, 1, 3, 1], TYPES[width])
    for stop in (3, 7):
        order = sort_part(text, 0, stop, 7, 3)
    table = pack(order.astype(np.int64), 1)
    borders = np.array([0, 7], np.int64)
    cuts = merging.cut(text, table, 1, borders, 2, 7)
    merging.advance(text, table, 1, merging.begin(cuts[0], cuts[1]), 7, np.empty(7, np.uint8))
    find_buckets(text, 3)


def write_at(path: Path, offset: int, chunks: Iterable[np.ndarray]) -> None:
    """Writes the chunks to a file from `offset`, and syncs it."""
    try:
        with path.open("r+b") as file:
            file.seek(offset)
            for chunk in chunks:
                file.write(chunk.data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_error(path, error) from error
