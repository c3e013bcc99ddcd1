"""Reads documents from text, JSON lines, folders, Parquet and Hugging Face datasets on disk.

Everything comes in one fixed order, so that a build which was cut short can skip what it has. A
record that cannot be read is no document but a `Bad`, which says where it stands and why.
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

from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build.parquet import dataset_batches, is_dataset, table_batches
from forerun.state.array_file import reading
from forerun.utils.files import check_text, parsed

SPLITS = ("file", "paragraph", "line")


class Document(NamedTuple):
    """A text, or ids where `tokens` is what was asked for, and where it stands."""

    text: str
    ids: Many[int] | None
    path: str
    line: int  # 1 and up; of a file without lines, the number of the document
    fields: dict[str, Any]  # all other fields of the record


class Bad(NamedTuple):
    """A record that cannot be used."""

    where: str
    reason: str


Record = Document | Bad


@dataclass(frozen=True)
class Reading:
    """How files become documents.

    field: of a JSON object, a column of a dataset. split: what is a document of a text file.
    is_ids: `field` holds token ids.
    """

    field: str = "text"
    split: str = "file"
    is_ids: bool = False

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"split must be one of {', '.join(SPLITS)}, got {self.split!r}")


def list_sources(paths: Iterable[str | Path]) -> list[Path]:
    """Files in a fixed order; a folder gives what is below it.

    A Hugging Face dataset folder counts as one source. Hidden files are left out. Raises DataError
    for one that is missing, or has a name that could not be kept.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        with reading(path):
            if not path.exists():
                raise DataError(f"there is no {path}; give files or folders that exist")
            found += [path] if path.is_file() or is_dataset(path) else _below(path)
    if not found:
        raise DataError("expected files to index, found none; give files, or folders that hold any")
    for path in found:
        check_text(f"the file name {str(path)!r}", str(path))
    return list(dict.fromkeys(found))


def _below(folder: Path) -> list[Path]:
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        files += _below(path) if path.is_dir() and not is_dataset(path) else [path]
    return files


def identity(paths: Iterable[Path]) -> list[list[Any]]:
    """Name, size and time of every source: what must not change while a build goes on."""
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
    """Bytes of all sources, as they lie on disk."""
    return sum(row[1] for row in identity(paths))


def read(
    paths: Iterable[Path], how: Reading, on_bytes: Callable[[int], None] = lambda n: None
) -> Iterator[Record]:
    """All records of all sources, in order. `on_bytes` hears how many bytes have been read.

    A file that cannot be opened or unpacked is Bad from there on.
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
        except _damages(path) as error:
            yield Bad(str(path), f"damaged, or of another kind ({error})")
        before += size
        on_bytes(before)


def _records(path: Path, how: Reading, size: int) -> Iterator[tuple[Record, int]]:
    """Records of one source, with the bytes read so far."""
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
    """A file's bytes, unpacked by its suffix, and a function that tells how many were read."""
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
            "files that end in .zst need the package zstandard; try pip install 'forerun[index]'"
        ) from None
    return zstandard


def _damages(path: Path) -> tuple[type[Exception], ...]:
    """What reading a damaged file raises."""
    own = (_zstandard().ZstdError,) if path.suffix == ".zst" else ()
    return (OSError, EOFError, ValueError, zlib.error, *own)


def _texts(stream: IO[bytes], split: str) -> Iterator[tuple[int, bytes]]:
    """The documents of a text file and the lines at which they start."""
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
        return Bad(f"{path}:{number}", f"no UTF-8 ({error.reason} at byte {error.start})")
    if not how.is_ids:
        return Document(text.rstrip("\n") if how.split != "file" else text, None, path, number, {})
    try:
        return Document("", [int(word) for word in text.split()], path, number, {})
    except ValueError as error:
        return Bad(f"{path}:{number}", f"expected token ids, {error}")


def _object(raw: bytes, path: str, number: int, how: Reading) -> Record:
    try:
        record = parsed(raw.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        return Bad(f"{path}:{number}", f"no UTF-8 ({error.reason} at byte {error.start})")
    except ValueError as error:
        return Bad(f"{path}:{number}", f"no JSON ({error})")
    if not isinstance(record, dict):
        return Bad(f"{path}:{number}", f"expected an object, got {type(record).__name__}")
    return _document(record, path, number, how)


def _document(record: dict[str, Any], path: str, number: int, how: Reading) -> Record:
    """The document in a record's field; what is missing or of another type is named."""
    where = f"{path}:{number}"
    if how.field not in record:
        return Bad(where, f"no field {how.field!r}; it has {sorted(record)[:8]}")
    value = record.pop(how.field)
    if how.is_ids:
        if isinstance(value, list) and all(type(i) is int for i in value):
            return Document("", value, path, number, record)
        return Bad(where, f"field {how.field!r} is no list of token ids")
    if not isinstance(value, str):
        return Bad(where, f"field {how.field!r} is {type(value).__name__}, not text")
    try:
        check_text(f"field {how.field!r}", value)
    except DataError as error:
        return Bad(where, str(error))
    return Document(value, None, path, number, record)


def _columns(
    batches: Iterator[tuple[Any, float]], path: str, how: Reading, size: int
) -> Iterator[tuple[Record, int]]:
    """Rows of Arrow record batches."""
    number = 0
    for batch, share in batches:
        for row in batch.to_pylist():
            number += 1
            yield _document(row, path, number, how), int(share * size)
