"""Reads prompt files; every error has file and line."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

from forerun.errors import DataError
from forerun.utils.files import check_text, parsed

GZIP = b"\x1f\x8b"  # first bytes of gzip files


def read_text(path: Path) -> str:
    """UTF-8 text of a plain or gzip file, with Unix line ends. Raises DataError."""
    try:
        return read_bytes(path).decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        at = 1 + error.object.count(b"\n", 0, error.start)
        raise DataError(f"{path} line {at} is not UTF-8 text: {error.reason}") from None


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, decompressed if it is a gzip file. Raises OSError, DataError."""
    data = path.read_bytes()
    if not data.startswith(GZIP):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}; copy it again") from None


def objects(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Pairs ("FILE line N", object) of a JSON lines file. Raises DataError with the line number."""
    found = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            value = parsed(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON: {error}; write an object per line") from None
        if not isinstance(value, dict):
            raise DataError(f"{where}: expected an object, got {type(value).__name__}")
        found.append((where, value))
    if not found:
        raise DataError(f"{path} is empty; write one JSON object per line")
    return found


def texts(where: str, name: str, value: Any) -> tuple[str, ...]:
    """The value as a tuple of texts that are not empty. Raises DataError."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {name} must be a list of texts, got {value!r}")
    for text in value:
        check(where, name, text)
    return tuple(value)


def check(where: str, name: str, text: Any) -> str:
    """The value, if it is a text that is neither blank nor invalid UTF-8. Raises DataError."""
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: {name} must be a text that is not empty, got {text!r}")
    return encoded(where, name, text)


def field(where: str, value: dict[str, Any], name: str) -> str:
    """A required field with a text that is not blank. Raises DataError."""
    if name not in value:
        there = ", ".join(value) or "none"
        raise DataError(f"{where}: field {name!r} is missing; there: {there}")
    return check(where, name, value[name])


def encoded(where: str, name: str, text: str) -> str:
    """The text, if it is valid UTF-8. Raises DataError."""
    check_text(f"{where}: {name}", text)
    return text
