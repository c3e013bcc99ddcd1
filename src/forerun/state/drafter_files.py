"""Memory files: what drafters have learned, saved, loaded, merged and capped in size.

Works for every drafter with snapshots (`core.mixins.Persistent`). A memory file belongs to one
tokenizer. It may come from another model with the same tokenizer, because drafts never change the
output. A file of another tokenizer is an error, because its token ids mean other texts.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.mixins import Persistent, persistent
from forerun.core.records import Plan, Sequence, Snapshot
from forerun.core.roles import Drafter, name_of
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.engine.safe_drafter import observe_pending
from forerun.errors import ConfigError
from forerun.state import array_file
from forerun.state.array_file import Origin
from forerun.state.file_lock import FileLock, locked
from forerun.utils.locks import FairLock
from forerun.utils.signals import delayed_interrupt

if TYPE_CHECKING:
    from forerun.api import Model

log = logging.getLogger("forerun")
SAVE_AGAIN = (
    "the drafter keeps what it learned until a file is loaded: save it first with "
    "`model.memory(...).save()`"
)
# open `with` blocks by drafter and tenant; weak, since a Ctrl-C may skip __exit__
_open: WeakKeyDictionary[Drafter, WeakValueDictionary[str, MemoryFile]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Memory:
    """The contents of a memory file."""

    path: Path
    snapshot: Snapshot
    origin: Origin

    def to_dict(self) -> dict[str, Any]:
        """For JSON: everything but the contents of the arrays."""
        held = self.snapshot
        arrays = {
            name: {"type": str(array.dtype), "shape": list(array.shape)}
            for name, array in held.arrays.items()
        }
        return {
            "file": str(self.path),
            "kind": held.kind,
            "bytes": held.nbytes,
            "counts": held.counts,
            "settings": held.settings,
            "origin": asdict(self.origin),
            "arrays": arrays,
        }


def read(path: Path | str) -> Memory:
    """The verified memory in a file. Raises DataError."""
    return Memory(Path(path), *array_file.read(path))


def origin_of(model: Model, tenant: str = "") -> Origin:
    """The origin of a memory that is learned from this model now."""
    from forerun.models import identity

    name, code = identity.model_name(model.name), identity.model_hash(model.name, model.target)
    return Origin(identity.tokenizer_hash(model.tokenizer), ((name, code),), tenant)


def merge(
    paths: Many[Path | str],
    out: Path | str,
    *,
    max_bytes: int | None = None,
    tenant: str | None = None,
) -> Memory:
    """Merges memory files into one: means weighted by counts, least recently used entries evicted.

    tenant: owner of the result, required if the files belong to several. Raises DataError for a
    damaged file, ConfigError for files that cannot be merged or a cap below the minimum size.
    """
    held = [read(path) for path in paths]
    kinds = sorted({memory.snapshot.kind for memory in held})
    if len(kinds) > 1:
        raise ConfigError(
            f"expected memories of one kind, got {' and '.join(kinds)}; merge each kind separately"
        )
    origin = Origin.joined([memory.origin for memory in held])
    owners = sorted({memory.origin.tenant for memory in held} - {""})
    if tenant is None and len(owners) > 1:
        raise ConfigError(
            f"expected memories of one tenant, got those of {' and '.join(owners)}; name the owner "
            "of the result with --tenant"
        )
    owner = (owners[0] if owners else "") if tenant is None else tenant
    drafter: type[Drafter] = registry.get("drafter", kinds[0])
    if not issubclass(drafter, Persistent):
        raise ConfigError(f"memories of {kinds[0]} cannot be merged: this drafter has no snapshots")
    snapshot = drafter.merge([memory.snapshot for memory in held], max_bytes)
    if max_bytes is not None and snapshot.nbytes > max_bytes:
        raise ConfigError(
            f"expected a cap of at least {snapshot.nbytes} bytes ({snapshot.nbytes / 2**20:.4f} "
            f"MiB), the minimum of this memory of {kinds[0]}, got {max_bytes}; allow more, or "
            "delete the file"
        )
    with locked(Path(out)):
        origin = array_file.write(out, snapshot, replace(origin, tenant=owner))
    return Memory(Path(out), snapshot, origin)


def draft(memory: Memory, tokens: list[int], nodes: int) -> Tree:
    """The draft tree of a memory after some tokens."""
    made = registry.get("drafter", memory.snapshot.kind)(**memory.snapshot.settings)
    drafter = persistent(made)
    drafter.restore(memory.snapshot)
    greedy = Sampling(temperature=0.0)
    seq = Sequence(tokens, len(tokens), greedy, SeededDice(0), limit=nodes + 1)
    return drafter.propose([seq], [Plan(nodes=nodes)], [seq.dice])[0]


class MemoryFile:
    """The memory of one drafter and tenant in a file.

    A `with` block loads the file if it exists and saves it at the end, also after an error or
    Ctrl-C. If loading fails, neither the file nor the drafter changes. Inside the block the drafter
    observes every step, also those without drafts. A second block for the same drafter and tenant
    is an error, and so is a block of another process for the same file. If saving fails, the
    drafter keeps what it learned for `save()`, until a file is loaded. lock: guards the drafter;
    not held while files are read and written.
    """

    def __init__(
        self, path: Path | str, drafter: Drafter, origin: Origin, lock: FairLock | None = None
    ) -> None:
        self.path, self.drafter, self.origin = Path(path), persistent(drafter), origin
        self._lock = lock or FairLock()
        self._file_lock, self._has_file_lock = FileLock(self.path), False
        self.before: Memory | None = None
        self.after: Memory | None = None

    def load(self) -> Memory:
        """Replaces the drafter's memory by the file, which is verified first.

        Raises DataError for a damaged file, ConfigError for another tokenizer, another tenant or
        other settings.
        """
        memory = read(self.path)
        check_fits(memory, self.origin)
        with self._lock:
            was_kept = self._is_kept
            observe_pending(self.drafter)
            try:
                self.drafter.restore(memory.snapshot, self.origin.tenant)
            except BaseException:
                self._release(was_kept)
                raise
            self.drafter.kept |= {self.origin.tenant}
        joined = Origin.joined([memory.origin, self.origin])
        self.origin = replace(joined, tenant=self.origin.tenant)
        return memory

    def save(self) -> Memory:
        """Writes the drafter's memory atomically; on an error the old file stays.

        Raises ConfigError if nothing was learned, the file belongs to another tenant or another
        process uses it, DataError if the path holds anything but a memory, CapacityError if the
        file cannot be written.
        """
        with locked(self.path):
            return self._save()

    def _save(self) -> Memory:
        self._check_owner()
        tenant = self.origin.tenant
        with self._lock:
            observe_pending(self.drafter)
            snapshot = self.drafter.snapshot(tenant)
            if not self._is_kept and not snapshot.counts["tokens"]:
                self._release()
                raise ConfigError(
                    "there is nothing to save; generate inside `with model.memory(...)`, or after "
                    "`load()`"
                )
        self.origin = array_file.write(self.path, snapshot, self.origin)
        return Memory(self.path, snapshot, self.origin)

    def __enter__(self) -> MemoryFile:
        tenant = self.origin.tenant
        was_kept: bool | None = None  # None until this block is registered
        array_file.check_place(self.path)
        self._file_lock.acquire()
        self._has_file_lock = True
        try:
            self._check_owner()
            with self._lock:
                blocks = _open.setdefault(self.drafter, WeakValueDictionary())
                if other := blocks.get(tenant):
                    raise ConfigError(
                        f"the memory of {name_of(self.drafter)} for this tenant is open with file "
                        f"{other.path}; end that `with` first, or use another tenant or drafter"
                    )
                was_kept = self._is_kept
                blocks[tenant] = self
            if self.path.exists():
                self.before = self.load()
            else:
                with self._lock:
                    self.drafter.keep(tenant)
                    self.drafter.kept |= {tenant}
            return self  # inside the try, so that a Ctrl-C here still closes the block
        except BaseException:
            if was_kept is not None:
                self._close(was_kept)
            self._unlock_file()
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._finish(error)
        finally:  # a Ctrl-C may come before signals are delayed
            if _open[self.drafter].get(self.origin.tenant) is self:
                self._finish(error)

    @delayed_interrupt()
    def _finish(self, error: BaseException | None) -> None:
        """Saves and closes. If saving fails too, the error of the block gets a note."""
        is_saved = False
        try:
            self.after = self.save()
            is_saved = True
        except Exception as failure:
            if error is None:
                failure.add_note(SAVE_AGAIN)
                raise
            log.error("%s was not saved: %s", self.path, failure)
            error.add_note(f"{self.path} was not saved: {failure}; {SAVE_AGAIN}")
        finally:
            self._close(was_kept=not is_saved)
            self._unlock_file()

    def _unlock_file(self) -> None:
        if self._has_file_lock:
            self._has_file_lock = False
            self._file_lock.release()

    @property
    def _is_kept(self) -> bool:
        return self.origin.tenant in self.drafter.kept

    def _release(self, was_kept: bool = False) -> None:
        """Drops the tenant's memory unless the drafter kept it before."""
        if not was_kept:
            self.drafter.release(self.origin.tenant)
            self.drafter.kept -= {self.origin.tenant}

    def _close(self, was_kept: bool = False) -> None:
        """Ends the block; another one may begin."""
        with self._lock:
            self._release(was_kept)
            _open[self.drafter].pop(self.origin.tenant, None)

    def _check_owner(self) -> None:
        """Raises ConfigError if saving would overwrite a file of another tenant."""
        if not self.path.exists():
            return
        held = array_file.read_origin(self.path)
        check_tenant(self.path, held, self.origin)
        if self.origin.tenant and not held.tenant:
            raise ConfigError(
                f"{self.path} is shared by all tenants; saving it for tenant "
                f"{self.origin.tenant!r} would take it from the others; use no tenant, or make a "
                f"copy for that tenant with `{_copy_command(self.path, self.origin.tenant)}`"
            )


def _copy_command(path: Path, tenant: str) -> str:
    """The command that copies a file for a tenant."""
    out = path.with_name(f"{path.stem}-{tenant or 'common'}{path.suffix}")
    words = ["forerun", "memory", "merge", str(path), "--tenant", tenant, "--out", str(out)]
    return shlex.join(words)


def check_fits(memory: Memory, origin: Origin) -> None:
    """Raises ConfigError unless a memory may be used for this tokenizer and tenant."""
    held, path = memory.origin, memory.path
    if held.tokenizer != origin.tokenizer:
        raise ConfigError(
            f"{path} was learned with another tokenizer ({held.tokenizer[:12] or 'unknown'}, this "
            f"model has {origin.tokenizer[:12]}): its token ids mean other texts; use a model with "
            "that tokenizer, or another file"
        )
    check_tenant(path, held, origin)
    if not {code for _, code in origin.models} & {code for _, code in held.models}:
        names = ", ".join(name for name, _ in held.models) or "an unknown model"
        log.warning(
            "%s was learned from %s: output stays exact, but fewer drafts may be accepted",
            path,
            names,
        )


def check_tenant(path: Path, held: Origin, origin: Origin) -> None:
    """Raises ConfigError unless a file is shared or belongs to the tenant."""
    if held.tenant not in ("", origin.tenant):
        other = f"to tenant {origin.tenant!r}" if origin.tenant else "to all tenants"
        raise ConfigError(
            f"{path} belongs to tenant {held.tenant!r}, not {other}; use tenant "
            f"{held.tenant!r}, or make a shared copy with `{_copy_command(path, '')}`"
        )
