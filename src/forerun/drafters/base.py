"""What drafters share: a source times a grower is a drafter, and so are several of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.records import Plan, Sequence, Snapshot, Step
from forerun.core.roles import Drafter, Grower, Path, Source, Target, name_of
from forerun.core.tree import EMPTY, Proposal, Tree
from forerun.errors import ConfigError


class Grown(Drafter):
    """Grows every tree of the batch in lockstep, so that the source is asked once per level."""

    def __init__(self, source: Source, grower: Grower) -> None:
        self.source, self.grower = source, grower
        self.labels = grower.labels

    def propose_one(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        return grow([seq], [plan], [dice], self.source, self.grower)[0]

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        return grow(seqs, plans, [seq.dice for seq in seqs], self.source, self.grower)


class Composite(Drafter):
    """Drafters that hear the same steps. `parts` are drafters or their names ("suffix+stand").

    Of what they learn, that of the first part that can be saved is: in that part's own form, so its
    files serve it alone and in company.
    """

    def __init__(self, parts: tuple[Any, ...], tokenizer: Any = None) -> None:
        name = type(self).__name__.lower()
        if isinstance(parts, str):  # only in Python: texts are split before
            several = tuple(parts.split("+"))
            raise ConfigError(f"{name} takes a tuple of parts, got {parts!r}; write {several!r}")
        if len(parts) < 2:
            raise ConfigError(f"{name} needs two parts or more, got {parts!r}; write parts=a+b")
        if twice := [part for part, count in Counter(parts).items() if count > 1]:
            raise ConfigError(
                f"{name} has the part {twice[0]!r} twice, which learns and drafts alike; name it "
                "once"
            )
        self.parts: list[Drafter] = [
            part
            if isinstance(part, Drafter)
            else registry.make("drafter", part, tokenizer=tokenizer)
            for part in parts
        ]
        if idle := [name_of(part) for part in self.parts if not part.labels]:
            raise ConfigError(
                f"{name} has the part {idle[0]!r}, which drafts nothing; leave it out: the "
                "controller decides how much is drafted"
            )
        _tell_apart(self)
        self.labels = frozenset().union(*(part.labels for part in self.parts))
        self.needs = frozenset().union(*(part.needs for part in self.parts))
        self.is_patient = all(part.is_patient for part in self.parts)

    @property
    def names(self) -> list[str]:
        """What statistics call the parts; no two are the same."""
        return [name_of(part) for part in self.parts]

    def within(self) -> Iterator[Drafter]:
        yield self
        for part in self.parts:
            yield from part.within()

    def bind(self, target: Target) -> None:
        for part in self.parts:
            part.bind(target)

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        own = 0
        for part in self.parts:
            own += part.check_room(seqs, tokens, taken + own)
        return own

    def seconds(self, nodes: int, num: int = 1) -> float:
        return max(part.seconds(nodes, num) for part in self.parts)

    def reading(self, seq: Sequence) -> float:
        return sum(part.reading(seq) for part in self.parts)

    def warm_up(self) -> None:
        for part in self.parts:
            part.warm_up()

    def start(self, seq: Sequence) -> None:
        for part in self.parts:
            part.start(seq)

    def observe(self, step: Step) -> None:
        for part in self.parts:
            part.observe(step)

    def hear(self, steps: Many[Step]) -> None:
        for part in self.parts:
            part.hear(steps)

    def finish(self, seq: Sequence) -> None:
        for part in self.parts:
            part.finish(seq)

    def forget(self, group: Hashable) -> None:
        for part in self.parts:
            part.forget(group)

    def memory_report(self) -> dict[str, int]:
        return {
            f"part {i}: {name}": size
            for i, part in enumerate(self.parts)
            for name, size in part.memory_report().items()
        }

    def keep(self, tenant: str = "") -> None:
        self._keeper(tenant)

    def let_go(self, tenant: str = "") -> None:
        for part in self.parts:
            part.let_go(tenant)

    def snapshot(self, tenant: str = "") -> Snapshot:
        return self._keeper(tenant).snapshot(tenant)

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        self._keeper(tenant).restore(snapshot, tenant)

    @classmethod
    def merged(cls, snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
        part: type[Drafter] = registry.get("drafter", snapshots[0].kind)
        return part.merged(snapshots, max_bytes)

    def _keeper(self, tenant: str) -> Drafter:
        """The first part that keeps what it learns of a tenant. Raises ConfigError if none does."""
        reasons = []
        for part, name in zip(self.parts, self.names, strict=True):
            try:
                part.keep(tenant)
            except ConfigError as error:
                reasons.append(f"{name}: {error}")
            else:
                return part
        raise ConfigError(f"no part of {name_of(self)} can be saved ({'; '.join(reasons)})")


def _tell_apart(whole: Drafter) -> None:
    """Numbers the second and later drafters of one name: who drafted what is told by names."""
    seen: Counter[str] = Counter()
    for part in dict.fromkeys(whole.within()):
        part.alias = ""
        name = name_of(part)
        seen[name] += 1
        if seen[name] > 1:
            part.alias = f"{name} {seen[name]}"


def followed(tree: Tree, tokens: list[int]) -> tuple[int, bool]:
    """How many of the first of `tokens` a path of the tree holds, and whether that is final.

    It is not where the tokens end before the path does.
    """
    node, count = -1, 0
    while True:
        children = np.flatnonzero(tree.parents == node)
        if not len(children) or count == len(tokens):
            return count, not len(children)
        hits = children[tree.tokens[children] == tokens[count]]
        if not len(hits):
            return count, True
        node, count = int(hits[0]), count + 1


def grow(
    seqs: Many[Sequence], plans: Many[Plan], dices: Many[Dice], source: Source, grower: Grower
) -> list[Tree]:
    """Runs one growth per sequence; the requests of all go to the source together."""
    trees = [EMPTY] * len(seqs)
    growths = {
        i: grower.grow(plan, dice)
        for i, (plan, dice) in enumerate(zip(plans, dices, strict=True))
        if not plan.is_empty
    }
    wants: dict[int, list[Path]] = {}
    answers: dict[int, list[Proposal | None]] = {}
    while growths:
        for i, growth in list(growths.items()):
            try:
                wants[i] = growth.send(answers[i]) if answers else next(growth)
            except StopIteration as end:
                trees[i] = end.value
                del growths[i]
        asked = [(i, path) for i in growths for path in wants[i]]
        known = iter(source.next([(seqs[i], path) for i, path in asked]) if asked else [])
        answers = {i: [next(known) for _ in wants[i]] for i in growths}
    return trees
