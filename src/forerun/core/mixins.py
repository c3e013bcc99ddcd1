"""What only some drafters have: shared state, files, costs. Helpers answer for the others."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Many

from forerun.core.records import Plan, Sequence, Snapshot
from forerun.core.roles import Drafter, name_of
from forerun.errors import ConfigError


class Shared(Drafter):
    """A drafter with state that outlives a sequence: learned from a group or a tenant."""

    def forget(self, group: Hashable) -> None:
        """The group, or the tenant of ("tenant", name), is finished; drop its state."""


class Persistent(Shared):
    """A drafter that can be saved: what it learns of a tenant becomes a `Snapshot`.

    keep, snapshot and restore raise ConfigError if it learns nothing for that tenant alone.
    """

    kept: frozenset[str] = frozenset()  # tenants to be saved; it is shown all of their steps

    def keep(self, tenant: str = "") -> None:
        """What it learns of a tenant outlives the sequences until `release`."""
        raise ConfigError(_cannot_save(self))

    def release(self, tenant: str = "") -> None:
        """Ends `keep`: the tenant's state lives as long as it does by default."""

    def snapshot(self, tenant: str = "") -> Snapshot:
        """What it has learned of a tenant."""
        raise ConfigError(_cannot_save(self))

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        """Replaces what it knows of a tenant by a snapshot, and keeps it.

        Raises ConfigError also for a snapshot made with other settings.
        """
        raise ConfigError(_cannot_save(self))

    @classmethod
    def merge(cls, snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
        """One snapshot of several; beyond `max_bytes` the least recently used entries go."""
        raise ConfigError(f"drafters of class {cls.__name__} cannot be saved, so nothing to merge")


class Priced(Drafter):
    """A drafter with costs that matter. The defaults hold for drafters without it."""

    learns: bool = True  # whether it takes time to observe a step

    def active_drafter(self, seq: Sequence) -> Drafter:
        """The drafter that would draft for a sequence now: itself, or one of its parts."""
        return self

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        """Seconds of a draft of so many nodes beyond what every draft takes (`Cost.aside`).

        num: sequences that draft at once; the result is the share of one.
        """
        return 0.0

    def catch_up_seconds(self, seq: Sequence) -> float:
        """Seconds that the next draft takes in addition, to read text that it has not read yet."""
        return 0.0

    def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
        """Acceptance assumed at first: of a draft's first node, and of a child of a sure node.

        num: sequences that draft at once.
        """
        return 0.5, 0.8

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        """Bytes that it takes to draft for so many sequences of so many tokens.

        taken: bytes that others take. Raises CapacityError if there is no room for both.
        """
        return 0


DEFAULTS = Priced()


def priced(drafter: Drafter) -> Priced:
    """What to ask for a drafter's costs: itself, or the defaults."""
    return drafter if isinstance(drafter, Priced) else DEFAULTS


def active_drafter(drafter: Drafter, seq: Sequence) -> Drafter:
    """The drafter that would draft for a sequence now: this one, or one of its parts."""
    return drafter.active_drafter(seq) if isinstance(drafter, Priced) else drafter


def forget(drafter: Drafter, group: Hashable) -> None:
    """As `Shared.forget`; nothing for a drafter without shared state."""
    if isinstance(drafter, Shared):
        drafter.forget(group)


def persistent(drafter: Drafter) -> Persistent:
    """The drafter itself. Raises ConfigError if it cannot be saved."""
    if not isinstance(drafter, Persistent):
        raise ConfigError(_cannot_save(drafter))
    return drafter


def _cannot_save(drafter: Drafter) -> str:
    name = name_of(drafter)
    return f"drafter {name!r} has nothing that could be saved; use it without a memory file"


def parts_of(drafter: Drafter) -> Iterator[Drafter]:
    """A drafter, and all that it is made of."""
    yield drafter
    for part in drafter.parts:
        yield from parts_of(part)


def observes(drafter: Drafter, seq: Sequence, plan: Plan) -> bool:
    """Whether a drafter is shown the step of a sequence with this plan."""
    is_asked = plan.nodes > 0 or plan.learns or bool(drafter.needs)
    return is_asked or seq.tenant in getattr(drafter, "kept", ())
