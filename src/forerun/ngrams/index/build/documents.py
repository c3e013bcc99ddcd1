"""Reads documents from text, JSON lines, folders, Parquet and Hugging Face datasets on disk.

The order is fixed, so an interrupted build can skip the documents it has. An unreadable record
becomes a `BadRecord` with place and reason.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from forerun.errors import ConfigError, DataError, install_extra
from forerun.ngrams.index.build.parquet import dataset_batches, is_dataset, table_batches
from forerun.state.array_file import reading
from forerun.utils.files import check_text, parsed

SPLITS = ("file", "paragraph", "line")


class Document(NamedTuple):
    """A text, or token ids if `Reading.is_ids`, with its place."""

    text: str
    ids: Many[int] | None
    path: str
    line: int  # from 1; in a file without lines: the number of the document
    fields: dict[str, Any]  # all other fields of the record


class BadRecord(NamedTuple):
    """A record that cannot be read."""

    where: str
    reason: str


Record = Document | BadRecord


@dataclass(frozen=True)
class Reading:
    """Options for reading files.

    field: field of a JSON object, or column of a dataset. split: the unit of a text file that is a
    document. is_ids: `field` contains token ids.
    """

    field: str = "text"
    split: str = "file"
    is_ids: bool = False

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"split={self.split!r} is unknown; use one of {', '.join(SPLITS)}")


def list_sources(paths: Iterable[str | Path]) -> list[Path]:
    """All files of the paths and their sub-folders, in a fixed order.

    A Hugging Face dataset folder is one source. Hidden files are skipped. Raises DataError for a
    missing path and for a file name that is not valid UTF-8.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        with reading(path):
            if not path.exists():
                raise DataError(f"{path} does not exist; use existing files or folders")
            found += [path] if path.is_file() or is_dataset(path) else _files_below(path)
    if not found:
        raise DataError("expected files to index, found none; use files, or folders with files")
    for path in found:
        check_text(f"the file name {str(path)!r}", str(path))
    return list(dict.fromkeys(found))


def _files_below(folder: Path) -> list[Path]:
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        files += _files_below(path) if path.is_dir() and not is_dataset(path) else [path]
    return files


def identity(paths: Iterable[Path]) -> list[list[Any]]:
    """Name, size and modification time per source; must not change when a build continues."""
    rows = []
    for path in paths:
        parts = [path, *path.rglob("*")] if path.is_dir() else [path]
        stats = [part.stat() for part in parts]
        rows.append(
            [
                str(path),
                sum(s.st_size for s in stats),
                max(s.st_mtime_ns for s in stats),
                len(parts),
            ]
        )
    return rows


def total_bytes(paths: Iterable[Path]) -> int:
    """Bytes of all sources on disk, before unpacking."""
    return sum(row[1] for row in identity(paths))


def read(
    paths: Iterable[Path], how: Reading, on_bytes: Callable[[int], None] = lambda n: None
) -> Iterator[Record]:
    """All records of all sources, in order. `on_bytes` receives the number of bytes read so far.

    A file that cannot be opened or unpacked ends with one BadRecord.
    """
    before = 0
    for path in paths:
        size = total_bytes([path])
        try:
            for record, at in _records(path, how, size):
                on_bytes(before + min(at, size))
                yield record
        except ConfigError:  # a package is missing
            raise
        except _read_errors(path) as error:
            yield BadRecord(str(path), f"damaged, or in another format ({error})")
        before += size
        on_bytes(before)


def _records(path: Path, how: Reading, size: int) -> Iterator[tuple[Record, int]]:
    """Records of one source, each with the bytes read so far."""
    stem = path.name.removesuffix(".gz").removesuffix(".zst")
    if is_dataset(path):
        yield from _columns(dataset_batches(path), str(path), how, size)
    elif stem.endswith((".parquet", ".arrow")):
        yield from _columns(table_batches(path), str(path), how, size)
    elif stem.endswith((".jsonl", ".ndjson", ".json")):
        with unpacked(path) as (stream, at):
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _object(line, str(path), number, how), at()
    else:
        with unpacked(path) as (stream, at):
            for number, text in _texts(stream, how.split):
                yield _plain(text, str(path), number, how), at()


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """A file's bytes, unpacked by its suffix, and a function for the packed bytes read so far."""
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            with gzip.open(raw) as stream:
                yield stream, raw.tell  # type: ignore[misc]
        elif path.suffix == ".zst":
            with _zstandard().ZstdDecompressor().stream_reader(raw, read_across_frames=True) as out:
                yield io.BufferedReader(out), raw.tell
        else:
            yield raw, raw.tell


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"files that end in .zst need the package zstandard; {install_extra('index')}"
        ) from None
    return zstandard


def _read_errors(path: Path) -> tuple[type[Exception], ...]:
    """The exceptions of reading a damaged file."""
    zstd = (_zstandard().ZstdError,) if path.suffix == ".zst" else ()
    return (OSError, EOFError, ValueError, zlib.error, *zstd)


def _texts(stream: IO[bytes], split: str) -> Iterator[tuple[int, bytes]]:
    """The documents of a text file, each with its first line number."""
    if split == "file":
        whole = stream.read()
        if whole.strip():
            yield 1, whole
        return
    lines: list[bytes] = []
    first = 1
    for number, line in enumerate(stream, 1):
        if line.strip():
            if not lines:
                first = number
            lines.append(line)
        if lines and (split == "line" or not line.strip()):
            yield first, b"".join(lines)
            lines = []
    if lines:
        yield first, b"".join(lines)


def _plain(raw: bytes, path: str, number: int, how: Reading) -> Record:
    try:
        text = raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return BadRecord(f"{path}:{number}", f"not UTF-8 ({error.reason} at byte {error.start})")
    if not how.is_ids:
        return Document(text.rstrip("\n") if how.split != "file" else text, None, path, number, {})
    try:
        return Document("", [int(word) for word in text.split()], path, number, {})
    except ValueError as error:
        return BadRecord(f"{path}:{number}", f"expected token ids, {error}")


def _object(raw: bytes, path: str, number: int, how: Reading) -> Record:
    try:
        record = parsed(raw.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        return BadRecord(f"{path}:{number}", f"not UTF-8 ({error.reason} at byte {error.start})")
    except ValueError as error:
        return BadRecord(f"{path}:{number}", f"not JSON ({error})")
    if not isinstance(record, dict):
        return BadRecord(f"{path}:{number}", f"expected an object, got {type(record).__name__}")
    return _document(record, path, number, how)


def _document(record: dict[str, Any], path: str, number: int, how: Reading) -> Record:
    """The document in a record's field, or a BadRecord if the field is missing or mistyped."""
    where = f"{path}:{number}"
    if how.field not in record:
        return BadRecord(where, f"no field {how.field!r} in {sorted(record)[:8]}")
    value = record.pop(how.field)
    if how.is_ids:
        if isinstance(value, list) and all(type(i) is int for i in value):
            return Document("", value, path, number, record)
        return BadRecord(where, f"field {how.field!r} is not a list of token ids")
    if not isinstance(value, str):
        return BadRecord(where, f"field {how.field!r} is {type(value).__name__}, not text")
    try:
        check_text(f"field {how.field!r}", value)
    except DataError as error:
        return BadRecord(where, str(error))
    return Document(value, None, path, number, record)


def _columns(
    batches: Iterator[tuple[Any, float]], path: str, how: Reading, size: int
) -> Iterator[tuple[Record, int]]:
    """Records of Arrow record batches."""
    number = 0
    for batch, share in batches:
        for row in batch.to_pylist():
            number += 1
            yield _document(row, path, number, how), int(share * size)
