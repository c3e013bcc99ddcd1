"""Atomic file writes, UTF-8 checks, and strict JSON parsing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import Any

from forerun.errors import CapacityError, DataError, ForerunError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # of a full disk, a quota, a limit of size
NATIVE_ERROR = re.compile(r"\(os error (\d+)\)")  # in messages of libraries written in Rust
SHOWN = 40  # characters of a rejected text that an error quotes


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` on a temporary file in the same folder, then renames it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def cannot_write(path: Path, error: OSError) -> CapacityError:
    """The default error for a file that could not be written."""
    is_taken = isinstance(error, IsADirectoryError | FileExistsError)
    advice = (
        "move what has that name" if is_taken else f"{write_advice(error)}, or use another folder"
    )
    return CapacityError(
        f"cannot write {path.name} into the folder {path.parent}: {error.strerror or error}; "
        f"{advice}"
    )


def write_advice(error: OSError) -> str:
    """What to do about a failed write, by its cause."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space"
    if error.errno == errno.EFBIG:
        return "raise the limit of file sizes (ulimit -f unlimited)"
    return "make the folder, or make it writable"


def failed_write(error: BaseException) -> OSError | None:
    """The OSError behind an exception if the disk has no room; None for other exceptions.

    Libraries in Rust give its number in their message only. torch raises another exception while
    it handles the OSError.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in NO_ROOM:
            return seen
        found = NATIVE_ERROR.search(str(seen))
        if found and int(found[1]) in NO_ROOM:
            return OSError(int(found[1]), os.strerror(int(found[1])))
        seen = seen.__cause__ or seen.__context__
    return None


@contextmanager
def reports_no_room(path: Path) -> Iterator[None]:
    """A block that writes `path`. Raises CapacityError if the disk has no room for it."""
    try:
        yield
    except ForerunError:
        raise
    except Exception as error:
        cause = failed_write(error)
        if cause is None:
            raise
        raise cannot_write(path, cause) from error


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with a temporary folder, then moves its files into place.

    A new folder appears atomically. In an existing folder each file is replaced atomically, other
    files stay, and nothing changes if `write` fails. Raises CapacityError if the disk has no room.
    """
    with reports_no_room(folder):
        _write_folder(folder, write)


def _write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(part)
        made = [path for path in sorted(part.rglob("*")) if path.is_file()]
        for path in made:
            path.chmod(0o644)
        if not folder.exists():
            part.chmod(0o755)
            os.replace(part, folder)
            return
        for path in made:
            goal = folder / path.relative_to(part)
            goal.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, goal)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_whole(
    path: Path, text: str, make_error: Callable[[Path, OSError], CapacityError] = cannot_write
) -> None:
    """Atomically replaces a file by a text, and syncs it to disk.

    Raises the CapacityError that `make_error` returns.
    """
    try:
        write_atomically(path, lambda temporary: _write_and_sync(temporary, text))
    except OSError as error:
        raise make_error(path, error) from error


def _write_and_sync(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, which end with a line feed; JSON may hold other separators.

    Raises OSError, UnicodeDecodeError.
    """
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def check_text(where: str, text: str) -> None:
    """Raises DataError for lone surrogates: bytes that were not UTF-8, or half of a pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        is_byte = 0xDC80 <= code <= 0xDCFF  # Python's surrogateescape
        what = (
            f"byte 0x{code - 0xDC00:02x}" if is_byte else f"half of a surrogate pair (U+{code:04X})"
        )
        advice = "encode it in UTF-8" if is_byte else "remove it, or add the other half"
        raise DataError(
            f"{where} is not UTF-8 text: {what} after {error.start} characters; {advice}"
        ) from None


def parsed(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError for invalid JSON, duplicate keys in an object, and too deep nesting.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    except ValueError as error:
        if not str(error).startswith("Exceeds the limit"):  # of digits of an int, Python's own
            raise
        raise ValueError("a number in it has thousands of digits") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The JSON object of these pairs. Raises ValueError for a duplicate key."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key[:40]!r} in one object; remove one")
        found[key] = value
    return found
