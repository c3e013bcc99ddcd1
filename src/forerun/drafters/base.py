"""Base classes of drafters: one tree at a time, a source with a grower, a composite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import numpy as np

from forerun import registry
from forerun.core.allowed import AllowedTokens
from forerun.core.dice import Dice
from forerun.core.growing import Grower, Path, Source
from forerun.core.mixins import Persistent, Priced, forget, parts_of, persistent, priced
from forerun.core.records import Plan, Sequence, Snapshot, Step
from forerun.core.roles import Drafter, Target, name_of
from forerun.core.tree import EMPTY, Proposal, Tree
from forerun.errors import ConfigError


class PerSequence(Drafter):
    """A drafter that makes one tree at a time: subclasses define `draft`."""

    def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        """The tree of one sequence; its plan is not empty."""
        raise NotImplementedError(f"{type(self).__name__} must define draft(seq, plan, dice)")

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        each = zip(seqs, plans, dice, strict=True)
        return [EMPTY if plan.is_empty else self.draft(seq, plan, own) for seq, plan, own in each]


class Grown(Drafter):
    """A source with a grower. All trees grow in lockstep, with one source call per level."""

    def __init__(self, source: Source, grower: Grower) -> None:
        self.source, self.grower = source, grower
        self.labels = grower.labels

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        return grow(seqs, plans, dice, self.source, self.grower)


class Composite(Persistent, Priced):
    """Several drafters that observe the same steps. `parts` are drafters or names ("suffix+stand").

    Only the first part with state that can be saved is saved, in its own format, so its files also
    serve that drafter alone.
    """

    def __init__(self, parts: tuple[Any, ...], tokenizer: Any = None) -> None:
        name = type(self).__name__.lower()
        if isinstance(parts, str):  # only from Python: option strings are split before
            several = tuple(parts.split("+"))
            raise ConfigError(f"{name} takes a tuple of parts, got {parts!r}; write {several!r}")
        if len(parts) < 2:
            raise ConfigError(f"{name} needs two parts or more, got {parts!r}; write parts=a+b")
        if twice := [part for part, count in Counter(parts).items() if count > 1]:
            raise ConfigError(f"{name} has the duplicate part {twice[0]!r}; list it once")
        self.parts: tuple[Drafter, ...] = tuple(
            part
            if isinstance(part, Drafter)
            else registry.make("drafter", part, tokenizer=tokenizer)
            for part in parts
        )
        if idle := [name_of(part) for part in self.parts if not part.labels]:
            raise ConfigError(
                f"{name} has the part {idle[0]!r}, which drafts nothing; remove it: the controller "
                "decides how much is drafted"
            )
        _number(self)
        self.labels = frozenset().union(*(part.labels for part in self.parts))
        self.needs = frozenset().union(*(part.needs for part in self.parts))
        self.can_observe_late = all(part.can_observe_late for part in self.parts)

    @property
    def names(self) -> list[str]:
        """Unique names of the parts in statistics."""
        return [name_of(part) for part in self.parts]

    def bind(self, target: Target) -> None:
        for part in self.parts:
            part.bind(target)

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        own = 0
        for part in self.parts:
            own += priced(part).check_room(seqs, tokens, taken + own)
        return own

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        return max(priced(part).draft_seconds(nodes, num) for part in self.parts)

    def catch_up_seconds(self, seq: Sequence) -> float:
        return sum(priced(part).catch_up_seconds(seq) for part in self.parts)

    def start(self, seq: Sequence) -> None:
        for part in self.parts:
            part.start(seq)

    def read(self, seqs: Many[Sequence]) -> None:
        for part in self.parts:
            part.read(seqs)

    def observe(self, step: Step) -> None:
        for part in self.parts:
            part.observe(step)

    def finish(self, seq: Sequence) -> None:
        for part in self.parts:
            part.finish(seq)

    def forget(self, group: Hashable) -> None:
        for part in self.parts:
            forget(part, group)

    def memory_report(self) -> dict[str, int]:
        return {
            f"part {i}: {name}": size
            for i, part in enumerate(self.parts)
            for name, size in part.memory_report().items()
        }

    def keep(self, tenant: str = "") -> None:
        self._keeper(tenant)

    def release(self, tenant: str = "") -> None:
        for part in self.parts:
            if isinstance(part, Persistent):
                part.release(tenant)

    def snapshot(self, tenant: str = "") -> Snapshot:
        return self._keeper(tenant).snapshot(tenant)

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        self._keeper(tenant).restore(snapshot, tenant)

    @classmethod
    def merge(cls, snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
        part: type[Persistent] = registry.get("drafter", snapshots[0].kind)
        return part.merge(snapshots, max_bytes)

    def _keeper(self, tenant: str) -> Persistent:
        """The first part that can save a tenant's state. Raises ConfigError if none can."""
        reasons = []
        for part, name in zip(self.parts, self.names, strict=True):
            try:
                kept = persistent(part)
                kept.keep(tenant)
            except ConfigError as error:
                reasons.append(f"{name}: {error}")
            else:
                return kept
        raise ConfigError(f"no part of {name_of(self)} can be saved ({'; '.join(reasons)})")


def _number(whole: Drafter) -> None:
    """Numbers the second and later drafters of one name, since statistics are keyed by name."""
    seen: Counter[str] = Counter()
    for part in dict.fromkeys(parts_of(whole)):
        vars(part).pop("name", None)
        name = name_of(part)
        seen[name] += 1
        if seen[name] > 1:
            part.name = f"{name} {seen[name]}"


def grow(
    seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice], source: Source, grower: Grower
) -> list[Tree]:
    """Grows one tree per sequence; the source gets the requests of all sequences together."""
    trees = [EMPTY] * len(seqs)
    growths = {
        i: grower.grow(plan, own)
        for i, (plan, own) in enumerate(zip(plans, dice, strict=True))
        if not plan.is_empty
    }
    allowed = {i: AllowedTokens.of(seqs[i]) for i in growths}
    wants: dict[int, list[Path]] = {}
    answers: dict[int, list[Proposal | None]] = {}
    while growths:
        for i, growth in list(growths.items()):
            try:
                wants[i] = growth.send(answers[i]) if answers else next(growth)
            except StopIteration as end:
                trees[i] = end.value
                del growths[i]
        asked = [_Request(seqs[i], path, allowed[i]) for i in growths for path in wants[i]]
        known = iter(_proposals(source, asked))
        answers = {i: [next(known) for _ in wants[i]] for i in growths}
    return trees


class _Request(NamedTuple):
    """A path of which the proposal is wanted."""

    seq: Sequence
    path: Path
    allowed: AllowedTokens | None

    @property
    def is_ended(self) -> bool:
        return bool(self.path) and self.path[-1] in self.seq.end_ids

    def forced(self) -> Proposal | None:
        """A unit mass on the token that constraints force, if they do."""
        run = self.allowed.forced(self.path) if self.allowed else ()
        return Proposal(np.array(run[:1], np.int32), np.ones(1)) if run else None

    def restrict(self, q: Proposal | None) -> Proposal | None:
        return self.allowed.restrict(self.path, q) if self.allowed else q


def _proposals(source: Source, asked: list[_Request]) -> Many[Proposal | None]:
    """The source's answers without forbidden tokens; None below a token that ends the sequence."""
    found: list[Proposal | None] = [None if one.is_ended else one.forced() for one in asked]
    rows = [i for i, one in enumerate(asked) if found[i] is None and not one.is_ended]
    known = source.next([(asked[i].seq, asked[i].path) for i in rows]) if rows else []
    for i, q in zip(rows, known, strict=True):
        found[i] = asked[i].restrict(q)
    return found
