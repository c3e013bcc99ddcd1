"""Files that are written whole or not at all, text that fits into them, JSON that people write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any

from forerun.errors import CapacityError, DataError

SHOWN = 40  # characters of a text that is refused


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` on a file beside `path`, then renames it: all of the file or none."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(beside)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            beside.unlink()
        raise


def cannot_write(path: Path, error: OSError) -> CapacityError:
    """What is said where nothing else is kept that a user should know of."""
    is_taken = isinstance(error, IsADirectoryError | FileExistsError)
    advice = (
        "move away what has that name"
        if is_taken
        else "free some space, make the folder writable, or use a copy of it elsewhere"
    )
    return CapacityError(
        f"cannot write {path.name} into the folder {path.parent}: {error.strerror or error}; "
        f"{advice}"
    )


def write_whole(
    path: Path, text: str, told: Callable[[Path, OSError], CapacityError] = cannot_write
) -> None:
    """Replaces a file by a text that is on the disk when this returns, or leaves it.

    Raises CapacityError as `told` makes it.
    """
    try:
        write_atomically(path, lambda beside: _write_through(beside, text))
    except OSError as error:
        raise told(path, error) from error


def _write_through(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_text(where: str, text: str) -> None:
    """Raises DataError for bytes that are no UTF-8, which Python holds as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        is_byte = 0xDC80 <= code <= 0xDCFF  # as Python lets a byte in that it cannot decode
        what = f"byte 0x{code - 0xDC00:02x}" if is_byte else f"half of a pair (U+{code:04X})"
        advice = "give it in UTF-8" if is_byte else "take it out, or give the other half"
        raise DataError(
            f"{where} is not UTF-8 text: {what} after {error.start} characters; {advice}"
        ) from None


def parsed(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError for what is no JSON, has a key twice in one object, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    except ValueError as error:
        if not str(error).startswith("Exceeds the limit"):  # Python's own, for whole numbers
            raise
        raise ValueError("a number in it has thousands of digits") from None


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of these pairs. Raises ValueError for a key that is there twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:40]!r} is there twice in one object; leave one out")
        found[key] = value
    return found
