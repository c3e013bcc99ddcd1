"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from forerun.errors import CapacityError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` on a file beside `path`, then renames it: all of the file or none."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
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
    return CapacityError(
        f"cannot write {path.name} into the folder {path.parent}: {error.strerror or error}; free "
        "some space, make the folder writable, or use a copy of it elsewhere"
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
