"""What drafters have learned, as files that go with one tokenizer: saved, loaded, merged, capped.

Works for every drafter that has snapshots (`core.mixins.Persistent`). Drafts
never change what a model says, so a memory of another model with the same tokenizer is welcome; one
of another tokenizer is refused, because its ids mean other texts.
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
from forerun.utils.locks import Turns
from forerun.utils.signals import delayed_interrupt

if TYPE_CHECKING:
    from forerun.api import Model

log = logging.getLogger("forerun")
STAYS = (
    "what was learned stays in the drafter until a file is loaded: save it first with "
    "`model.memory(...).save()`"
)
# by tenant: whose `with` has begun; held weakly, since a Ctrl-C may leave a block without its end
_begun: WeakKeyDictionary[Drafter, WeakValueDictionary[str, Kept]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Memory:
    """The contents of a memory file."""

    path: Path
    snapshot: Snapshot
    origin: Origin

    def to_dict(self) -> dict[str, Any]:
        """For machines: everything but the arrays."""
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
    """The memory in a file, checked. Raises DataError."""
    return Memory(Path(path), *array_file.read(path))


def origin_of(model: Model, tenant: str = "") -> Origin:
    """What is written beside a memory that is learned from a model now."""
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
    """Writes one memory made of several: means weighted by counts; the least recently used go.

    tenant: whose it will be, where the files belong to several. Raises DataError for a file that is
    not intact, ConfigError for files that do not fit together, or a cap below what is always kept.
    """
    held = [read(path) for path in paths]
    kinds = sorted({memory.snapshot.kind for memory in held})
    if len(kinds) > 1:
        raise ConfigError(
            f"expected memories of one kind, got {' and '.join(kinds)}; merge each kind alone"
        )
    origin = Origin.joined([memory.origin for memory in held])
    owners = sorted({memory.origin.tenant for memory in held} - {""})
    if tenant is None and len(owners) > 1:
        raise ConfigError(
            f"expected memories of one tenant, got those of {' and '.join(owners)}; say with "
            "--tenant whose the result is to be"
        )
    owner = (owners[0] if owners else "") if tenant is None else tenant
    drafter: type[Drafter] = registry.get("drafter", kinds[0])
    if not issubclass(drafter, Persistent):
        raise ConfigError(
            f"memories of {kinds[0]} cannot be merged: it is no drafter that is saved"
        )
    snapshot = drafter.merge([memory.snapshot for memory in held], max_bytes)
    if max_bytes is not None and snapshot.nbytes > max_bytes:  # all that may go has gone
        raise ConfigError(
            f"expected a cap of at least {snapshot.nbytes} bytes ({snapshot.nbytes / 2**20:.4f} "
            f"MiB), below which this memory of {kinds[0]} cannot be cut, got {max_bytes}; allow "
            "more, or delete the file"
        )
    return Memory(
        Path(out), snapshot, array_file.write(out, snapshot, replace(origin, tenant=owner))
    )


def draft(memory: Memory, tokens: list[int], nodes: int) -> Tree:
    """The best tokens that a memory would draft after a text."""
    made = registry.get("drafter", memory.snapshot.kind)(**memory.snapshot.settings)
    drafter = persistent(made)
    drafter.restore(memory.snapshot)
    greedy = Sampling(temperature=0.0)
    seq = Sequence(tokens, len(tokens), greedy, SeededDice(0), limit=nodes + 1)
    return drafter.propose([seq], [Plan(nodes=nodes)], [seq.dice])[0]


class Kept:
    """What a drafter learns of a tenant, kept in a file.

    In a `with` it is loaded where there is a file, and saved at the end, also when an error or
    Ctrl-C ends the block: what was learned until then is true. A file that could not be loaded is
    left alone, and so is the drafter. Until the end the drafter is shown every step, also where
    nothing is drafted, and no second `with` may begin for the same drafter and tenant. What could
    not be saved stays in the drafter, for `save()` to take; a file that is loaded, also by another
    `with`, takes its place. turns: those of who else uses it; files are read and written without.
    """

    def __init__(
        self, path: Path | str, drafter: Drafter, origin: Origin, turns: Turns | None = None
    ) -> None:
        self.path, self.drafter, self.origin = Path(path), persistent(drafter), origin
        self._turns = turns or Turns()
        self.before: Memory | None = None
        self.after: Memory | None = None

    def load(self) -> Memory:
        """Makes the file what the drafter knows; it is checked before anything is touched.

        Raises DataError for a file that is not intact, ConfigError for one of another tokenizer, of
        another tenant, or made with other settings.
        """
        memory = read(self.path)
        check_fits(memory, self.origin)
        with self._turns:
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
        """Writes what the drafter knows, whole or not at all.

        Raises ConfigError if it keeps nothing or if what is there belongs to others, DataError if
        what is there is no memory, as a file that was damaged meanwhile, CapacityError if the file
        cannot be written. What was there then stays.
        """
        self._check_owner()
        tenant = self.origin.tenant
        with self._turns:
            observe_pending(self.drafter)
            snapshot = self.drafter.snapshot(tenant)
            if not self._is_kept and not snapshot.counts["tokens"]:
                self._release()
                raise ConfigError(
                    "nothing was learned that could be saved; run what is to be learned within "
                    "`with model.memory(...)`, or after `load()`"
                )
        self.origin = array_file.write(self.path, snapshot, self.origin)
        return Memory(self.path, snapshot, self.origin)

    def __enter__(self) -> Kept:
        tenant = self.origin.tenant
        was_kept: bool | None = None  # before it began, if it has
        array_file.check_place(self.path)
        self._check_owner()
        try:
            with self._turns:
                begun = _begun.setdefault(self.drafter, WeakValueDictionary())
                if other := begun.get(tenant):
                    raise ConfigError(
                        f"what {name_of(self.drafter)} learns of this tenant is kept in "
                        f"{other.path} now; end that `with` first, or name another tenant or "
                        "another drafter"
                    )
                was_kept = self._is_kept
                begun[tenant] = self
            if self.path.exists():
                self.before = self.load()
            else:
                with self._turns:
                    self.drafter.keep(tenant)
                    self.drafter.kept |= {tenant}
            return self  # here: behind the `try` a Ctrl-C could leave it begun for ever
        except BaseException:
            if was_kept is not None:
                self._end(was_kept)
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._finish(error)
        finally:  # a Ctrl-C may come before it waits
            if _begun[self.drafter].get(self.origin.tenant) is self:
                self._finish(error)

    @delayed_interrupt()
    def _finish(self, error: BaseException | None) -> None:
        """Saves and ends it. What ended the block goes on; both are told."""
        is_saved = False
        try:
            self.after = self.save()
            is_saved = True
        except Exception as failure:
            if error is None:
                failure.add_note(STAYS)
                raise
            log.error("%s was not saved: %s", self.path, failure)
            error.add_note(f"{self.path} was not saved: {failure}; {STAYS}")
        finally:
            self._end(was_kept=not is_saved)

    @property
    def _is_kept(self) -> bool:
        return self.origin.tenant in self.drafter.kept

    def _release(self, was_kept: bool = False) -> None:
        """The drafter keeps the tenant as it did before."""
        if not was_kept:
            self.drafter.release(self.origin.tenant)
            self.drafter.kept -= {self.origin.tenant}

    def _end(self, was_kept: bool = False) -> None:
        """Another `with` may begin."""
        with self._turns:
            self._release(was_kept)
            _begun[self.drafter].pop(self.origin.tenant, None)

    def _check_owner(self) -> None:
        """Raises ConfigError where saving took a file from those whose it is."""
        if not self.path.exists():
            return
        held = array_file.read_origin(self.path)
        check_tenant(self.path, held, self.origin)
        if self.origin.tenant and not held.tenant:
            raise ConfigError(
                f"{self.path} is common, and saved for tenant {self.origin.tenant!r} it would be "
                "lost to everybody else; ask for no tenant, or give that tenant a copy with "
                f"`{_handed(self.path, self.origin.tenant)}`"
            )


def _handed(path: Path, tenant: str) -> str:
    """The command that makes a copy of a file for a tenant."""
    out = path.with_name(f"{path.stem}-{tenant or 'common'}{path.suffix}")
    words = ["forerun", "memory", "merge", str(path), "--tenant", tenant, "--out", str(out)]
    return shlex.join(words)


def check_fits(memory: Memory, origin: Origin) -> None:
    """Raises ConfigError unless a memory may be used for this tokenizer and tenant."""
    held, path = memory.origin, memory.path
    if held.tokenizer != origin.tokenizer:
        raise ConfigError(
            f"{path} was learned with another tokenizer ({held.tokenizer[:12] or 'unknown'}, this "
            f"model has {origin.tokenizer[:12]}): its token ids mean other texts; use the model it "
            "came from, or another file"
        )
    check_tenant(path, held, origin)
    if not {code for _, code in origin.models} & {code for _, code in held.models}:
        names = ", ".join(name for name, _ in held.models) or "an unknown model"
        log.warning("%s was learned from %s: as exact, perhaps less useful here", path, names)


def check_tenant(path: Path, held: Origin, origin: Origin) -> None:
    """Raises ConfigError unless a file is everybody's or that tenant's."""
    if held.tenant not in ("", origin.tenant):
        other = f"tenant {origin.tenant!r}" if origin.tenant else "everybody"
        raise ConfigError(
            f"{path} belongs to tenant {held.tenant!r}, not to {other}; ask for tenant "
            f"{held.tenant!r}, or make a common copy with `{_handed(path, '')}`"
        )
