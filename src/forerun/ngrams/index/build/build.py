"""Builds an index: tokenizes, sorts, computes checksums, and writes the manifest last.

A build works in INDEX/building. An earlier index stays valid until the new manifest is written.
After an interruption the same command continues the build. After bad input, which makes the user
change something, a build with other options or sources continues if it can, or else starts again.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import secrets
import shutil
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build import encoders, sort, tokenize
from forerun.ngrams.index.build.documents import Reading, identity, list_sources, total_bytes
from forerun.ngrams.index.build.manifest import (
    FileInfo,
    Lock,
    Manifest,
    ShardInfo,
    file_name,
    sha256_of,
    write_error,
)
from forerun.ngrams.index.build.page_sums import FILES
from forerun.ngrams.index.build.sparse_index import STEP, fence_pieces
from forerun.ngrams.index.build.suffix_array import TYPES, find_buckets, pointer_width, separator
from forerun.ngrams.index.build.verify import tokenizer_files, write_page_sums
from forerun.state.array_file import reading
from forerun.utils.files import write_whole
from forerun.utils.numbers import whole

Report = Callable[[str, int, int], None]  # stage, done, total
Call = Callable[..., Any]
MIN_MEMORY_BYTES = 64 << 20


def no_report(stage: str, done: int, total: int) -> None:
    """Reports nothing."""


@dataclass(frozen=True)
class Options:
    """Options of a build. width 0: 2 bytes per token, or 4 if the vocabulary needs them.

    Only memory, threads and workers may change when an interrupted build continues.
    """

    tokenizer: encoders.Spec = encoders.DEFAULT
    reading: Reading = Reading()
    width: int = 0
    shards: int = 1
    on_error: str = "fail"
    memory: int = 2 << 30  # bytes, for sorting and merging
    threads: int = 2
    workers: int = 2  # tokenizer processes
    part: int = 0  # tokens per part; 0: derived from memory
    overlap: int = 0  # tokens compared beyond the end of a part; 0: the default

    def __post_init__(self) -> None:
        if self.width not in (0, *TYPES):
            raise ConfigError(
                f"width={self.width} is unknown; use 1, 2 or 4 bytes, or 0 to choose by vocabulary"
            )
        for name in ("shards", "threads", "workers"):
            whole(name, getattr(self, name))
        for name in ("memory", "part", "overlap"):
            whole(name, getattr(self, name), 0)
        if self.on_error not in ("fail", "skip"):
            raise ConfigError(f"on_error={self.on_error!r} is unknown; use 'fail' or 'skip'")
        if self.memory < MIN_MEMORY_BYTES:
            raise ConfigError(
                f"memory={self.memory / 2**20:.1f}MB is too small; use at least "
                f"{MIN_MEMORY_BYTES >> 20}MB"
            )

    def plan(self, sources: list[Path]) -> dict[str, Any]:
        """The values that must not change when a build continues."""
        name = self.tokenizer if isinstance(self.tokenizer, str) else "function"
        return {
            "tokenizer": name,
            "reading": [self.reading.field, self.reading.split, self.reading.is_ids],
            "width": self.width,
            "shards": self.shards,
            "on_error": self.on_error,
            "part": [self.part, self.overlap],
            "sources": identity(sources),
        }


def build(
    path: str | Path,
    sources: Many[str | Path],
    options: Options | None = None,
    *,
    overwrite: bool = False,
    restart: bool = False,
    report: Report = no_report,
    call: Call | None = None,
) -> Manifest:
    """Builds an index at `path` from files and folders, or continues; returns its manifest.

    overwrite: replace an existing index when the new one is finished. restart: discard an
    interrupted build. call: runs function(*arguments) in another process, possibly on another
    machine with the same folders; default: this process. Raises ConfigError, DataError,
    CapacityError, ModelError.
    """
    options = options or Options()
    path, files = Path(path), list_sources(sources)
    with reading(path):
        is_taken = (path / "manifest.json").exists()
    if is_taken and not overwrite:
        raise ConfigError(
            f"{path} already contains an index; use another folder, or replace it with --overwrite"
        )
    encoder = encoders.load(options.tokenizer)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from error
    with Lock(path):
        return _Build(path, files, options, encoder, report, call).run(restart)


class _Build:
    """One build; the caller holds the lock."""

    def __init__(
        self,
        path: Path,
        sources: list[Path],
        options: Options,
        encoder: encoders.Encoder,
        report: Report,
        call: Call | None,
    ) -> None:
        self.path, self.sources, self.options, self.report = path, sources, options, report
        self.call = call
        self.encoder, self.folder = encoder, path / "building"
        self.width, self.notes = choose_width(options.width, encoder)
        self.state: dict[str, Any] = {}
        self.done: dict[str, int] = {}

    def run(self, restart: bool) -> Manifest:
        self._begin(restart)
        start = time.perf_counter()
        sort.warm_up(self.width)
        self._timed("compile", start)
        try:
            self._tokenise()
        except DataError:
            self._mark_refused()
            raise
        self._sort()
        return self._finish()

    def _begin(self, restart: bool) -> None:
        """Reads the state of an interrupted build, or begins a new one."""
        plan = self.options.plan(self.sources)
        for state in self.path.glob("data-*/state.json"):  # only the manifest is missing
            if not self.folder.exists():
                os.rename(state.parent, self.folder)
        if restart:
            shutil.rmtree(self.folder, ignore_errors=True)
        found = _read_state(self.folder / "state.json")
        if found is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            with _write_errors(self.folder):
                self.folder.mkdir()
            found = {"plan": plan, "seconds": {}, "resumed": 0}
        else:
            found["resumed"] += 1
        differ = [key for key in plan if plan[key] != found["plan"].get(key)]
        if differ == ["on_error"] and not found.get("tokenise", {}).get("skipped"):
            found["plan"] = plan  # no record was skipped so far: both options give the same files
        elif differ and found.get("is_refused"):
            return self._begin(restart=True)
        elif differ:
            raise ConfigError(
                f"{self.path} has an interrupted build with other {', '.join(differ)}; continue "
                "with the same options, or discard it with --restart"
            )
        found.pop("is_refused", None)
        self.state = found
        self._save()

    def _mark_refused(self) -> None:
        """Records that the input was bad; the next build may have other options."""
        if self.folder.is_dir():
            self.state["is_refused"] = True
            self._save()

    def _save(self) -> None:
        text = json.dumps(self.state | {"checksum": _checksum(self.state)})
        write_whole(self.folder / "state.json", text, write_error)

    def _saver(self, key: str) -> Callable[[Any], None]:
        def save(state: Any) -> None:
            self.state[key] = state.to_dict()
            self._save()

        return save

    def _timed(self, name: str, start: float) -> None:
        seconds = self.state["seconds"]
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        self.state["peak"] = max(self.state.get("peak", 0), peak_bytes())
        self._save()

    def _tokenise(self) -> None:
        shards = self.options.shards
        kept = self.state.get("tokenise")
        state = (
            tokenize.Tokenised(**kept)
            if kept
            else tokenize.Tokenised(sizes=[{} for _ in range(shards)], tops=[0] * shards)
        )
        if not state.is_done:
            start, total = time.perf_counter(), total_bytes(self.sources)
            tokenize.Stage(
                self.sources,
                self.options.reading,
                self.options.tokenizer,
                self.folder,
                self.width,
                self.encoder,
                self.options.on_error,
                self.options.workers,
                self._saver("tokenise"),
                lambda at: self.report("tokenise", at, total),
                self.call,
            ).run(state)
            self._timed("tokenise", start)
        if sum(sizes["tokens"] for sizes in state.sizes) == state.documents * self.width:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise DataError(
                f"expected text to index, found none in {len(self.sources)} files "
                f"({state.documents} empty documents, {state.skipped} unreadable records); "
                "use other sources"
            )
        self.tokenised = state

    def _sort(self) -> None:
        lengths = [sizes["tokens"] // self.width for sizes in self.tokenised.sizes]
        kept = self.state.get("sort")
        o = self.options
        state = (
            sort.Sorted(**kept)
            if kept
            else sort.plan_parts(lengths, self.width, o.memory, o.threads, o.part, o.overlap)
        )
        start, total = time.perf_counter(), sum(lengths)

        def report(stage: str, count: int) -> None:
            self.done[stage] = self.done.get(stage, 0) + count
            self.report(stage, min(total, self.done[stage]), total)

        sort.Stage(
            self.folder,
            self.width,
            self.tokenised.tops,
            o.threads,
            self._saver("sort"),
            report,
            self.call,
        ).run(state)
        self.parts = [len(borders) - 1 for borders in state.borders]
        self._timed("sort", start)

    def _finish(self) -> Manifest:
        start = time.perf_counter()
        with _write_errors(self.folder):
            self.encoder.save(self.folder / "tokenizer")
            shards = self._shards()
            self.tokenizer_files = tokenizer_files(self.folder)
        self._timed("checksums", start)
        manifest = self._manifest(tuple(shards))
        final = self.path / manifest.folder
        with _write_errors(self.path):
            os.rename(self.folder, final)
        write_whole(self.path / "manifest.json", manifest.to_json(), write_error)
        (final / "state.json").unlink()
        for old in self.path.glob("data-*"):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
        return manifest

    def _shards(self) -> list[ShardInfo]:
        jobs = [(self.folder, i, self.width, top) for i, top in enumerate(self.tokenised.tops)]
        with ThreadPoolExecutor(self.options.threads) as pool:
            if self.call is None:
                return list(pool.map(lambda job: shard_info(*job), jobs))
            call = self.call
            return list(pool.map(lambda job: call(shard_info, *job), jobs))

    def _manifest(self, shards: tuple[ShardInfo, ...]) -> Manifest:
        skipped = {"count": self.tokenised.skipped, "examples": self.tokenised.examples}
        eos = self.encoder.eos
        return Manifest(
            folder=f"data-{secrets.token_hex(4)}",
            width=self.width,
            eos=separator(TYPES[self.width]) if eos is None else eos,
            tokenizer=self.encoder.describe() | {"files": self.tokenizer_files},
            shards=shards,
            sources=tuple(str(source) for source in self.sources[:1000]),
            skipped=skipped,
            notes=tuple(self.notes),
            build={
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": {k: round(v, 3) for k, v in self.state["seconds"].items()},
                "resumed": self.state["resumed"],
                "memory": self.options.memory,
                "peak_bytes": self.state["peak"],
                "threads": self.options.threads,
                "workers": self.options.workers,
                "parts": self.parts,
            },
        )


def shard_info(folder: Path, shard: int, width: int, top: int) -> ShardInfo:
    """Writes buckets, fences and page checksums of a sorted shard; describes its files."""
    text = sort.text_of(folder, shard, width)
    buckets, shift = find_buckets(text, top)
    buckets.astype("<i8").tofile(folder / file_name("buckets", shard))
    positions = pointer_width(len(text))
    table = np.asarray(np.memmap(folder / file_name("suffixes", shard), np.uint8, "r"))
    with (folder / file_name("fences", shard)).open("wb") as stream:
        for piece in fence_pieces(text, table, positions):
            stream.write(piece.astype("<u8").data)
    paths = {kind: folder / file_name(kind, shard) for kind in FILES}
    files: dict[str, FileInfo] = {
        kind: FileInfo(path.stat().st_size, sha256_of(path)) for kind, path in paths.items()
    }
    files["pages"] = write_page_sums(folder, shard, width)
    documents = files["documents"].bytes // 8
    return ShardInfo(len(text), documents, top, positions, shift, files, STEP)


def choose_width(wanted: int, encoder: encoders.Encoder) -> tuple[int, list[str]]:
    """Bytes per token, and a note if they differ from `wanted`."""
    needed = 2 if encoder.size is None else next(w for w in TYPES if encoder.size < 1 << 8 * w)
    chosen = max(2, needed) if not wanted else max(wanted, needed if encoder.size else wanted)
    if wanted and chosen != wanted:
        return chosen, [
            f"{wanted} bytes per token cannot hold {encoder.size} ids (maximum "
            f"{(1 << 8 * wanted) - 1}); using {chosen} bytes per token"
        ]
    return chosen, []


def peak_bytes() -> int:
    """Peak resident memory of this process, including mapped files."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _read_state(file: Path) -> dict[str, Any] | None:
    """The state of an interrupted build; None if there is none, or it is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        state = dict(json.loads(file.read_text()))
        if state.pop("checksum") == _checksum(state):
            return state
    return None


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


class _write_errors:
    """Turns an OSError into a CapacityError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise write_error(error.filename or self.path, error) from error
