"""First stage of a build: documents to token files, in a process pool, resumable.

Document i goes to shard i mod S. Every few seconds the files are synced and the state records their
sizes. A continued build truncates the files to these sizes and skips the documents in them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import DataError
from forerun.ngrams.index.build import encoders
from forerun.ngrams.index.build.documents import BadRecord, Document, Reading, Record, read
from forerun.ngrams.index.build.manifest import file_name, write_error
from forerun.ngrams.index.build.suffix_array import TYPES, separator
from forerun.utils.signals import ignored_by_children

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, 1 << 20
SAVE_SECONDS = 5.0  # between two states
MAX_EXAMPLES = 10  # unreadable records listed in the manifest
STREAMS = ("tokens", "documents", "metadata", "lines")


@dataclass
class Tokenised:
    """Progress of the stage, sufficient to continue it."""

    records: int = 0  # records read, including unreadable ones
    documents: int = 0
    sizes: list[dict[str, int]] = field(default_factory=list)  # bytes per file, per shard
    tops: list[int] = field(default_factory=list)  # largest id per shard
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    bytes_read: int = 0
    is_done: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class Writer:
    """Appends documents to the files of one shard."""

    def __init__(self, folder: Path, shard: int, sizes: dict[str, int], width: int) -> None:
        dtype = np.dtype(TYPES[width])
        self.separator = np.full(1, separator(dtype), dtype).tobytes()
        self.files = {}
        for kind in STREAMS:
            path = folder / file_name(kind, shard)
            self.files[kind] = path.open("r+b" if path.exists() else "w+b")
            self.files[kind].truncate(sizes.get(kind, 0))
            self.files[kind].seek(0, 2)
        self.at = self.files["tokens"].tell() // width
        self.line = self.files["metadata"].tell()

    def add(self, ids: np.ndarray, metadata: dict[str, Any]) -> None:
        """Appends one document: separator, ids, position and metadata."""
        line = json.dumps(metadata, ensure_ascii=False, default=str).encode() + b"\n"
        self.files["documents"].write(np.int64(self.at).tobytes())
        self.files["lines"].write(np.int64(self.line).tobytes())
        self.files["metadata"].write(line)
        self.files["tokens"].write(self.separator)
        self.files["tokens"].write(ids.tobytes())
        self.at, self.line = self.at + 1 + len(ids), self.line + len(line)

    def sync(self) -> dict[str, int]:
        """Syncs all files; returns their sizes."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        return {kind: file.tell() for kind, file in self.files.items()}

    def close(self) -> None:
        for file in self.files.values():
            with contextlib.suppress(OSError):  # a full disk was already reported
                file.close()


@dataclass(frozen=True)
class Stage:
    """Tokenizes `sources` into `folder`. `save` stores the state, `report` receives progress."""

    sources: list[Path]
    reading: Reading
    spec: encoders.Spec
    folder: Path
    width: int
    encoder: encoders.Encoder  # of `spec`
    on_error: str  # "fail" or "skip"
    workers: int
    save: Callable[[Tokenised], None]
    report: Callable[[int], None]  # bytes read
    call: Callable[..., Any] | None = None  # runs function(*arguments) in another process

    def run(self, state: Tokenised) -> None:
        """Completes the stage from `state`. Raises DataError, CapacityError."""
        writers: list[Writer] = []
        try:
            for shard, sizes in enumerate(state.sizes):
                writers.append(Writer(self.folder, shard, sizes, self.width))
            self._fill(state, writers)
        except OSError as error:
            raise write_error(error.filename or self.folder, error) from error
        finally:
            for writer in writers:
                writer.close()

    def _fill(self, state: Tokenised, writers: list[Writer]) -> None:
        position = [state.bytes_read]
        records = read(self.sources, self.reading, lambda n: position.__setitem__(0, n))
        records = itertools.islice(records, state.records, None)
        saved = time.monotonic()
        batches = ((batch, position[0]) for batch in in_batches(records))
        for batch, at, encoded in self._encoded(batches):
            self._add(state, writers, batch, encoded)
            state.bytes_read = at
            self.report(at)
            if time.monotonic() - saved >= SAVE_SECONDS:
                self._save_state(state, writers)
                saved = time.monotonic()
        state.is_done = True
        self._save_state(state, writers)

    def _save_state(self, state: Tokenised, writers: list[Writer]) -> None:
        state.sizes = [writer.sync() for writer in writers]
        self.save(state)

    def _encoded(
        self, batches: Iterator[tuple[list[Record], int]]
    ) -> Iterator[tuple[list[Record], int, list[np.ndarray]]]:
        """Batches with the ids of their documents, in order, with a few batches in flight."""
        if self.reading.is_ids or (self.workers <= 1 and self.call is None):
            for batch, at in batches:
                yield batch, at, self.encoder.encode_arrays(texts_of(batch))
            return
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(self._pool())
            stack.callback(pool.shutdown, cancel_futures=True)
            waiting: deque[tuple[list[Record], int, Future[list[np.ndarray]]]] = deque()
            for batch, at in batches:
                waiting.append((batch, at, self._submit(pool, texts_of(batch))))
                if len(waiting) > 3 * self.workers:
                    yield _result(*waiting.popleft())
            while waiting:
                yield _result(*waiting.popleft())

    def _pool(self) -> Executor:
        """A pool of tokenizer processes, or of threads that wait for `call`."""
        if self.call is not None:
            return ThreadPoolExecutor(self.workers)
        return ProcessPoolExecutor(self.workers, get_context("spawn"), initializer=_start)

    def _submit(self, pool: Executor, texts: list[str]) -> Future[list[np.ndarray]]:
        job = (self.spec, self.encoder.fingerprint, texts)
        if self.call is not None:
            return pool.submit(self.call, encode, *job)
        with ignored_by_children():  # the first tasks start the processes
            return pool.submit(encode, *job)

    def _add(
        self,
        state: Tokenised,
        writers: list[Writer],
        batch: list[Record],
        encoded: list[np.ndarray],
    ) -> None:
        ids = iter(encoded)
        for record in batch:
            state.records += 1
            if isinstance(record, BadRecord):
                self._skip(state, record)
                continue
            given = next(ids) if record.ids is None else record.ids
            shard = state.documents % len(writers)
            tokens, top = self._checked(given, record)
            metadata = {"path": record.path, "line": record.line, "fields": record.fields}
            writers[shard].add(tokens, metadata)
            state.tops[shard] = max(state.tops[shard], top)
            state.documents += 1

    def _skip(self, state: Tokenised, bad: BadRecord) -> None:
        if self.on_error == "fail":
            raise DataError(
                f"{bad.where}: {bad.reason}; repair the record, or skip such records with "
                "--on-error skip"
            )
        state.skipped += 1
        if len(state.examples) < MAX_EXAMPLES:
            state.examples.append(f"{bad.where}: {bad.reason}")

    def _checked(self, given: Many[int] | np.ndarray, record: Document) -> tuple[np.ndarray, int]:
        """Stored ids and the largest id. eos becomes a separator; at either end it is removed.

        Raises DataError for an id out of range.
        """
        dtype = TYPES[self.width]
        end, eos = separator(dtype), self.encoder.eos
        wide = np.asarray(given)
        ends = np.flatnonzero(wide == eos) if eos is not None else np.empty(0, np.int64)
        is_end = np.zeros(len(wide), bool)
        is_end[ends] = True
        if len(ends):
            inner = np.flatnonzero(~is_end)
            low, high = (inner[0], inner[-1] + 1) if len(inner) else (0, 0)
            wide, is_end = wide[low:high], is_end[low:high]
        ids = wide[~is_end] if len(ends) else wide
        if len(ids) and (ids.min() < 0 or ids.max() >= end):
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            hint = "ids start at 0" if wrong < 0 else "build with --width 4"
            raise DataError(
                f"{record.path}:{record.line}: token id {wrong} does not fit {self.width} bytes "
                f"(0 to {end - 1}); {hint}"
            )
        stored = wide.astype(dtype)
        stored[is_end] = end
        return stored, int(ids.max(initial=0))


def in_batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Records in batches for the process pool."""
    batch: list[Record] = []
    characters = 0
    for record in records:
        batch.append(record)
        characters += len(record.text) if isinstance(record, Document) else 0
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def texts_of(batch: list[Record]) -> list[str]:
    """Texts of the documents without ids."""
    return [r.text for r in batch if isinstance(r, Document) and r.ids is None]


_loaded: dict[Any, encoders.Encoder] = {}  # the last encoder of this process


def encode(spec: encoders.Spec, fingerprint: str, texts: list[str]) -> list[np.ndarray]:
    """Ids of texts; runs in a worker process, possibly on another machine. Raises DataError."""
    key = (spec, fingerprint)
    if key not in _loaded:
        _loaded.clear()
        encoder = encoders.load(spec)
        if encoder.fingerprint != fingerprint:
            raise DataError(
                f"tokenizer {spec!r} has another vocabulary on {platform.node()} than on the "
                "machine that started the build; install the same tokenizer on both"
            )
        _loaded[key] = encoder
    return _loaded[key].encode_arrays(texts)


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process


def _result(
    batch: list[Record], at: int, future: Future[list[np.ndarray]]
) -> tuple[list[Record], int, list[np.ndarray]]:
    return batch, at, future.result()
