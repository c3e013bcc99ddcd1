"""An index of tokens on disk: which files it has, what they must be, and who may write.

    INDEX/manifest.json     written last: without it there is no index
    INDEX/data-XXXXXXXX/    tokens.S.bin     token ids, little-endian, a separator before a document
                            suffixes.S.bin   the suffix array: a position per token, packed
                            buckets.S.bin    int64: where suffixes of each first token start
                            fences.S.bin     uint64: first tokens of every 16th suffix
                            documents.S.bin  int64: where each document's separator stands
                            metadata.S.jsonl one object per document; lines.S.bin: where lines start
                            tokenizer/       what made the ids, as far as it can be saved
    INDEX/building/         a build under way, or one that was cut short and can be continued
    INDEX/lock              held while somebody builds

S counts shards. The separator is the largest value of the token type and no id; it also stands for
the end of a document wherever a query names the tokenizer's end id. A new build of an index goes
to a folder of its own, so the earlier one stays valid until the manifest is replaced.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import CapacityError, ConfigError, DataError
from forerun.ngrams.index.build.shards import read_only
from forerun.ngrams.index.build.sparse_index import NONE
from forerun.ngrams.index.build.suffix_array import TYPES, Shard, separator
from forerun.state.array_file import reading

FORMAT, VERSION = "forerun-index", 1
KINDS = {
    "tokens": "bin",
    "suffixes": "bin",
    "buckets": "bin",
    "fences": "bin",
    "documents": "bin",
    "metadata": "jsonl",
    "lines": "bin",
}


def file_name(kind: str, shard: int) -> str:
    """The file of a shard: tokens.00000.bin."""
    return f"{kind}.{shard:05d}.{KINDS[kind]}"


@dataclass(frozen=True)
class FileInfo:
    """What a file must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardInfo:
    """One shard: its size and its files by kind."""

    tokens: int  # positions, separators included
    documents: int
    top: int  # largest id
    pointer_width: int  # bytes per position in the suffix array
    shift: int  # see Shard
    files: Mapping[str, FileInfo]
    step: int = 0  # ranks from fence to fence; 0: no fences


@dataclass(frozen=True)
class Manifest:
    """All that is known of an index without reading its files."""

    folder: str  # below the index
    width: int  # bytes per token
    eos: int  # the id that queries use for the end of a document
    tokenizer: Mapping[str, Any]  # name, kind, vocabulary (or None), fingerprint
    shards: tuple[ShardInfo, ...]
    sources: tuple[str, ...] = ()
    skipped: Mapping[str, Any] = field(default_factory=dict)  # unreadable records: count, examples
    build: Mapping[str, Any] = field(default_factory=dict)  # options, seconds, peak memory, when
    notes: tuple[str, ...] = ()

    @property
    def separator(self) -> int:
        """The value before every document."""
        return separator(TYPES[self.width])

    @property
    def tokens(self) -> int:
        """Positions of all shards, separators included."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    def bytes_of(self, *kinds: str) -> int:
        """Bytes of files of these kinds (of all kinds without any)."""
        wanted = kinds or tuple(KINDS)
        return sum(s.files[kind].bytes for s in self.shards for kind in wanted if kind in s.files)

    def to_json(self) -> str:
        """The file's text, with a checksum of itself."""
        body = {"format": FORMAT, "version": VERSION} | asdict(self)
        return json.dumps(body | {"checksum": _digest(body)}, indent=1, ensure_ascii=False) + "\n"


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the index at `path`. Raises DataError: no index, unfinished, damaged."""
    path = Path(path)
    file = path / "manifest.json"
    with reading(path):
        if not file.is_file():
            raise DataError(_no_index(path))
        data = file.read_bytes()
    try:
        body = json.loads(data)
        checksum = body.pop("checksum")
        name, version = body.pop("format"), body.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(
            f"{file} is damaged ({type(error).__name__}: {error}); restore it from a copy, or "
            "build the index again"
        ) from None
    if name != FORMAT or version != VERSION:
        raise DataError(
            f"{file} is a {name!r} of version {version}, this forerun reads {FORMAT!r} of version "
            f"{VERSION}; build the index again, or use the forerun that made it"
        )
    if _digest({"format": name, "version": version} | body) != checksum:
        raise DataError(
            f"{file} is damaged: its checksum does not match; restore it from a copy, or build "
            "the index again"
        )
    return _manifest(body)


def _manifest(body: dict[str, Any]) -> Manifest:
    shards = tuple(
        ShardInfo(**s | {"files": {k: FileInfo(**f) for k, f in s["files"].items()}})
        for s in body.pop("shards")
    )
    sources, notes = tuple(body.pop("sources")), tuple(body.pop("notes"))
    return Manifest(shards=shards, sources=sources, notes=notes, **body)


def _no_index(path: Path) -> str:
    if (path / "building").is_dir():
        return (
            f"{path} holds no finished index: a build was cut short, or still runs; give the same "
            "`forerun index build` again to go on where it stopped"
        )
    if not path.exists():
        return f"there is no index at {path}: no such folder; make one with `forerun index build`"
    return f"there is no index in {path}: no manifest.json; make one with `forerun index build`"


def open_shards(
    path: Path, manifest: Manifest, *, load: bool = False, numbers: Iterable[int] | None = None
) -> list[Shard]:
    """The shards as arrays on disk, or in memory with `load`; all, or those of `numbers`.

    Raises DataError for a file of a wrong size.
    """
    shards, is_sparse = [], is_larger_than_cache(manifest.bytes_of())
    for number in range(len(manifest.shards)) if numbers is None else numbers:
        info = manifest.shards[number]

        def array(kind: str, dtype: Any, number: int = number, info: ShardInfo = info) -> Any:
            file = path / manifest.folder / file_name(kind, number)
            sparse = is_sparse and kind in ("tokens", "suffixes")
            return open_array(file, info.files[kind].bytes, dtype, load=load, is_sparse=sparse)

        shards.append(
            read_only(
                Shard(
                    array("tokens", TYPES[manifest.width]),
                    array("suffixes", np.uint8),
                    info.pointer_width,
                    array("buckets", np.int64),
                    info.shift,
                    array("fences", np.uint64) if info.step else NONE,
                    info.step,
                )
            )
        )
    return shards


def open_array(
    file: Path, size: int, dtype: Any, *, load: bool = False, is_sparse: bool = False
) -> np.ndarray:
    """A file as an array. Raises DataError if it is missing or not `size` bytes long."""
    problem = wrong_size(file, size)
    if problem:
        raise DataError(f"{problem}; restore it from a copy, or build the index again")
    little = np.dtype(dtype).newbyteorder("<")
    with reading(file):
        if load or not size:
            return np.fromfile(file, little)
        return mapped(file, little, is_sparse)


def mapped(file: Path, dtype: Any, is_sparse: bool = False) -> np.ndarray:
    """A file as a read-only array; `is_sparse`: the system is told not to read ahead.

    Reading ahead brings an index into memory within its first queries, which pays where it stays
    there. Of one that is larger it would push out what other queries have brought.
    """
    with file.open("rb") as stream:
        pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    if is_sparse and hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, dtype)


def is_larger_than_cache(size: int) -> bool:
    """Whether so many bytes are more than half of the machine's memory."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return False
    return 2 * size > memory


def wrong_size(file: Path, size: int) -> str:
    """What is wrong with a file's existence or size; empty if nothing is."""
    try:
        found = file.stat().st_size
    except OSError:
        return f"{file} is missing"
    if found != size:
        return f"{file} is {'truncated' if found < size else 'too long'}: {found} of {size} bytes"
    return ""


def sha256_of(file: Path) -> str:
    """The checksum of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def no_room(file: Path | str, error: OSError) -> CapacityError:
    """The error for a write that failed, such as on a full disk."""
    return CapacityError(
        f"cannot write {file}: {error.strerror or error}; what was finished is kept: free some "
        "space and give the same command again, it goes on from there. An earlier index at this "
        "place is untouched"
    )


class Lock:
    """Held in a `with` while one process builds at `path`; a second one gets a ConfigError.

    The system frees it when the process ends, however it ends.
    """

    def __init__(self, path: Path) -> None:
        self.file = path / "lock"
        self._handle: int | None = None

    def __enter__(self) -> Lock:
        import fcntl

        self._handle = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._handle, 100).decode(errors="replace").strip()
            os.close(self._handle)
            self._handle = None
            raise ConfigError(
                f"another build is at work in {self.file.parent}"
                f"{f' ({holder})' if holder else ''}; wait for its end, or build elsewhere"
            ) from None
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()}\n".encode())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._handle is not None
        os.ftruncate(self._handle, 0)
        os.close(self._handle)
        self._handle = None
