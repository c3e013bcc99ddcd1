"""Optional interfaces of drafters: shared state, saved state, costs; and defaults for the rest."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Many

from forerun.core.records import Plan, Sequence, Snapshot
from forerun.core.roles import Drafter, name_of
from forerun.errors import ConfigError


class Shared(Drafter):
    """A drafter with state shared by the sequences of a group or tenant."""

    def forget(self, group: Hashable) -> None:
        """The group, or the tenant of ("tenant", name), is finished; drop its state."""


class Persistent(Shared):
    """A drafter with state that can be saved, one `Snapshot` per tenant.

    keep, snapshot and restore raise ConfigError if it has no state of that tenant alone.
    """

    kept: frozenset[str] = frozenset()  # tenants to save; the drafter observes all their steps

    def keep(self, tenant: str = "") -> None:
        """Keeps the state of a tenant until `release`."""
        raise ConfigError(_cannot_save(self))

    def release(self, tenant: str = "") -> None:
        """Ends `keep`: the default lifetime applies again."""

    def snapshot(self, tenant: str = "") -> Snapshot:
        """The state of a tenant."""
        raise ConfigError(_cannot_save(self))

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        """Replaces the state of a tenant by a snapshot, and keeps it.

        Raises ConfigError for a snapshot made with other settings.
        """
        raise ConfigError(_cannot_save(self))

    @classmethod
    def merge(cls, snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
        """One snapshot of several; drops the least recently used entries beyond `max_bytes`."""
        raise ConfigError(f"drafters of class {cls.__name__} have no saved state to merge")


class Priced(Drafter):
    """A drafter with costs above the overhead that `Cost` includes for every draft."""

    learns: bool = True  # whether observing a step costs time

    def active_drafter(self, seq: Sequence) -> Drafter:
        """The drafter that would draft for a sequence now: itself, or one of its parts."""
        return self

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        """Seconds of a draft of `nodes` nodes, without `Cost.overhead`.

        num: sequences that draft at once; the result is the share of one.
        """
        return 0.0

    def catch_up_seconds(self, seq: Sequence) -> float:
        """Extra seconds of the next draft, to process tokens that the drafter has not read yet."""
        return 0.0

    def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
        """Prior acceptance: of a draft's first node, and of the child of an accepted node.

        num: sequences that draft at once.
        """
        return 0.5, 0.8

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        """Bytes needed to draft for `seqs` sequences of `tokens` tokens.

        taken: bytes used by other parts. Raises CapacityError if memory cannot hold both.
        """
        return 0


DEFAULT_COSTS = Priced()


def priced(drafter: Drafter) -> Priced:
    """The cost interface of a drafter: itself, or the defaults."""
    return drafter if isinstance(drafter, Priced) else DEFAULT_COSTS


def active_drafter(drafter: Drafter, seq: Sequence) -> Drafter:
    """The drafter that would draft for a sequence now: this one, or one of its parts."""
    return drafter.active_drafter(seq) if isinstance(drafter, Priced) else drafter


def forget(drafter: Drafter, group: Hashable) -> None:
    """`Shared.forget`; no effect on a drafter without shared state."""
    if isinstance(drafter, Shared):
        drafter.forget(group)


def persistent(drafter: Drafter) -> Persistent:
    """The drafter itself. Raises ConfigError if it cannot be saved."""
    if not isinstance(drafter, Persistent):
        raise ConfigError(_cannot_save(drafter))
    return drafter


def _cannot_save(drafter: Drafter) -> str:
    name = name_of(drafter)
    return f"drafter {name!r} has no state to save; use it without a memory file"


def parts_of(drafter: Drafter) -> Iterator[Drafter]:
    """A drafter and, recursively, its parts."""
    yield drafter
    for part in drafter.parts:
        yield from parts_of(part)


def observes(drafter: Drafter, seq: Sequence, plan: Plan) -> bool:
    """Whether a drafter observes the step of a sequence with this plan."""
    needs_step = plan.nodes > 0 or plan.learns or bool(drafter.needs)
    return needs_step or is_kept(drafter, seq.tenant)


def is_kept(drafter: Drafter, tenant: str) -> bool:
    """Whether a drafter keeps the state of a tenant, see `Persistent.kept`."""
    return tenant in getattr(drafter, "kept", ())
