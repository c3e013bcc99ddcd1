"""A lock between processes on a file that is replaced when it is saved.

The lock is a file in the same folder, `.NAME.lock`, removed at the end. The system frees it when a
process dies. Blocks of one process share the lock.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forerun.errors import ConfigError

log = logging.getLogger("forerun")
BUSY = (errno.EACCES, errno.EAGAIN)
_guard = threading.Lock()
_held: dict[Path, tuple[int, int]] = {}  # lock file -> descriptor, number of users


class FileLock:
    """The lock of one file. Raises ConfigError if another process has it."""

    def __init__(self, path: Path) -> None:
        real = Path(os.path.realpath(path))
        self.path, self._place = path, real.with_name(f".{real.name}.lock")

    def acquire(self) -> None:
        with _guard:
            handle, users = _held.get(self._place, (-1, 0))
            if not users:
                handle = _open(self.path, self._place)
            _held[self._place] = handle, users + 1

    def release(self) -> None:
        with _guard:
            handle, users = _held.pop(self._place)
            if users > 1:
                _held[self._place] = handle, users - 1
            elif handle >= 0:
                with suppress(OSError):  # while the lock is held: later the file may be another's
                    self._place.unlink()
                os.close(handle)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file. Raises ConfigError if another process has it."""
    lock = FileLock(path)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _open(path: Path, place: Path) -> int:
    """The descriptor of a locked file; -1 where files cannot be locked."""
    try:
        import fcntl
    except ImportError:  # Windows
        return -1
    while True:
        try:
            handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as cause:
            log.warning("%s is used without a lock: %s", path, cause.strerror)
            return -1
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            owner = os.pread(handle, 20, 0).decode("ascii", "replace").strip()
            os.close(handle)
            if cause.errno in BUSY:
                raise _busy(path, owner) from None
            log.warning("%s is used without a lock: %s", path, cause.strerror)
            return -1
        if _is_current(handle, place):
            os.truncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            return handle
        os.close(handle)  # its owner has just removed it


def _is_current(handle: int, place: Path) -> bool:
    """Whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(handle), place.stat())
    except FileNotFoundError:
        return False


def _busy(path: Path, owner: str) -> ConfigError:
    who = f"process {owner}" if owner.isdecimal() else "another process"
    return ConfigError(
        f"{path} is in use by {who}, and the one that saves last would overwrite what the other "
        "learned; wait until it ends, or use another file and `forerun memory merge`"
    )
