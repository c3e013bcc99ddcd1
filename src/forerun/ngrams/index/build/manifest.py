"""Layout, manifest and lock of an index on disk.

    INDEX/manifest.json     written last; without it there is no index
    INDEX/data-XXXXXXXX/    tokens.S.bin     token ids, little-endian, a separator before a document
                            suffixes.S.bin   the suffix array: one packed position per token
                            buckets.S.bin    int64: first rank per bucket of first tokens
                            fences.S.bin     uint64: first tokens of every 16th suffix
                            documents.S.bin  int64: position of each document's separator
                            metadata.S.jsonl one object per document; lines.S.bin: line offsets
                            pages.S.bin      uint64: checksums of the 4-KiB pages of these files
                            tokenizer/       the tokenizer, if it can be saved
    INDEX/building/         a running or interrupted build
    INDEX/lock              locked during a build

S is the shard number. The separator is the largest value of the token type and not a token id.
Queries use the tokenizer's eos id for it. A new build writes its own data folder, so the earlier
index stays valid until the manifest is replaced.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import CapacityError, ConfigError, DataError
from forerun.ngrams.index.build.suffix_array import TYPES, separator
from forerun.state.array_file import reading
from forerun.utils.files import write_advice

FORMAT, VERSION = "forerun-index", 1
KINDS = {
    "tokens": "bin",
    "suffixes": "bin",
    "buckets": "bin",
    "fences": "bin",
    "documents": "bin",
    "metadata": "jsonl",
    "lines": "bin",
    "pages": "bin",
}


def file_name(kind: str, shard: int) -> str:
    """The file name of a shard, such as tokens.00000.bin."""
    return f"{kind}.{shard:05d}.{KINDS[kind]}"


@dataclass(frozen=True)
class FileInfo:
    """Expected size and checksum of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardInfo:
    """Size and files of one shard."""

    tokens: int  # positions, separators included
    documents: int
    top: int  # largest id
    pointer_width: int  # bytes per position in the suffix array
    shift: int  # see Shard
    files: Mapping[str, FileInfo]  # by kind
    step: int = 0  # ranks between fences; 0: no fences


@dataclass(frozen=True)
class Manifest:
    """Description of an index: its files, tokenizer and build."""

    folder: str  # below the index
    width: int  # bytes per token
    eos: int  # the id for the separator in queries
    tokenizer: Mapping[str, Any]  # name, kind, vocabulary (or None), fingerprint, files
    shards: tuple[ShardInfo, ...]
    sources: tuple[str, ...] = ()
    skipped: Mapping[str, Any] = field(default_factory=dict)  # unreadable records: count, examples
    build: Mapping[str, Any] = field(default_factory=dict)  # options, seconds, peak memory, date
    notes: tuple[str, ...] = ()

    @property
    def separator(self) -> int:
        """The value before every document."""
        return separator(TYPES[self.width])

    @property
    def tokens(self) -> int:
        """Number of positions in all shards, separators included."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Number of documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    def bytes_of(self, *kinds: str) -> int:
        """Bytes of the files of these kinds; no kinds: of all files."""
        wanted = kinds or tuple(KINDS)
        return sum(s.files[kind].bytes for s in self.shards for kind in wanted if kind in s.files)

    def to_json(self) -> str:
        """The text of the manifest file, with its checksum."""
        body = {"format": FORMAT, "version": VERSION} | asdict(self)
        return json.dumps(body | {"checksum": _digest(body)}, indent=1, ensure_ascii=False) + "\n"


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the index at `path`. Raises DataError: missing, unfinished or damaged."""
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
            f"{file} has format {name!r} version {version}, expected {FORMAT!r} version {VERSION}; "
            "build the index again, or use the forerun release that wrote it"
        )
    if _digest({"format": name, "version": version} | body) != checksum:
        raise DataError(
            f"{file} is damaged: its checksum does not match; restore it from a copy, or build "
            "the index again"
        )
    try:
        return _manifest(body)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{file} has unknown or missing fields ({error}); use the forerun release that wrote "
            "it, or build the index again"
        ) from None


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
            f"{path} has no index, only an interrupted or running build; run the same "
            "`forerun index build` again to continue"
        )
    if not path.exists():
        return f"no index at {path}: no such folder; create it with `forerun index build`"
    return f"no index in {path}: manifest.json is missing; create it with `forerun index build`"


def open_array(
    file: Path, size: int, dtype: Any, *, load: bool = False, is_sparse: bool = False
) -> np.ndarray:
    """A file as an array. Raises DataError if it is missing or not `size` bytes long."""
    problem = size_problem(file, size)
    if problem:
        raise DataError(f"{problem}; restore it from a copy, or build the index again")
    little = np.dtype(dtype).newbyteorder("<")
    with reading(file):
        if load or not size:
            return np.fromfile(file, little)
        return memory_map(file, little, is_sparse)


def memory_map(file: Path, dtype: Any, is_sparse: bool = False) -> np.ndarray:
    """A file as a read-only mapped array; `is_sparse`: without read-ahead.

    Read-ahead loads a small index into memory during the first queries. For an index larger than
    memory it would evict pages that other queries need.
    """
    with file.open("rb") as stream:
        pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    if is_sparse and hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, dtype)


def is_larger_than_cache(size: int) -> bool:
    """Whether `size` bytes exceed half of the machine's memory."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return False
    return 2 * size > memory


def size_problem(file: Path, size: int) -> str:
    """The problem with a file's existence or size; empty if there is none."""
    try:
        found = file.stat().st_size
    except OSError:
        return f"{file} is missing"
    if found != size:
        return f"{file} is {'truncated' if found < size else 'too long'}: {found} of {size} bytes"
    return ""


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_error(file: Path | str, error: OSError) -> CapacityError:
    """The error for a failed write, for example on a full disk."""
    return CapacityError(
        f"cannot write {file}: {error.strerror or error}; {write_advice(error)} and run the same "
        "command again to continue. An earlier index in this folder is unchanged"
    )


class Lock:
    """An exclusive build lock of `path`, as a context manager; raises ConfigError if it is taken.

    The system releases it when the process ends.
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
                f"another build is running in {self.file.parent}"
                f"{f' ({holder})' if holder else ''}; wait until it ends, or use another folder"
            ) from None
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()}\n".encode())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._handle is not None
        os.ftruncate(self._handle, 0)
        os.close(self._handle)
        self._handle = None
