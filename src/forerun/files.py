"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from forerun.errors import CapacityError


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
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            beside.unlink()
        raise told(path, error) from error
