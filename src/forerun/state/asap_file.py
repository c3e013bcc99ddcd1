"""Files of what ASAp learned: the bounds of visited prefixes, of one model and tenant."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol

from forerun.core.records import Snapshot
from forerun.errors import DataError
from forerun.state import array_file
from forerun.state.array_file import Origin
from forerun.state.file_lock import FileLock
from forerun.utils.signals import delayed_interrupt

KIND = "asap"


class Restorable(Protocol):
    """A memory with one snapshot per tenant."""

    def snapshot(self, tenant: str = "") -> Snapshot: ...

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None: ...


class AsapFile(AbstractContextManager["AsapFile"]):
    """A `with` block that loads the file if it exists, and saves it at the end, also on errors.

    Bounds hold for one model only, so a file of another one is refused. on_use: called with True
    when the block begins, with False when it ends. Raises DataError for a damaged file or one of
    another model or tenant, ConfigError if another process uses it.
    """

    def __init__(
        self,
        path: Path | str,
        memory: Restorable,
        origin: Origin,
        on_use: Callable[[bool], None],
    ) -> None:
        self.path, self.memory, self.origin, self._on_use = Path(path), memory, origin, on_use
        self._lock = FileLock(self.path)
        self.counts: dict[str, int] = {}  # of the saved file: tokens, prompts

    def __enter__(self) -> AsapFile:
        array_file.check_place(self.path)
        self._lock.acquire()
        try:
            if self.path.exists():
                snapshot, origin = array_file.read(self.path, KIND)
                self._check(origin)
                self.memory.restore(snapshot, self.origin.tenant)
            self._on_use(True)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._on_use(False)
        try:
            with delayed_interrupt():
                snapshot = self.memory.snapshot(self.origin.tenant)
                array_file.write(self.path, snapshot, self.origin)
                self.counts = snapshot.counts
        finally:
            self._lock.release()

    def _check(self, found: Origin) -> None:
        for what, here, there in (
            ("model", self.origin.models, found.models),
            ("tenant", self.origin.tenant, found.tenant),
        ):
            if here != there:
                raise DataError(
                    f"{self.path} belongs to another {what}; bounds of ASAp hold for one only: use "
                    "another file"
                )
