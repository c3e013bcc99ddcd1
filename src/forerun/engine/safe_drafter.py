"""A drafter may fail; generation goes on: drafts only save time, the law holds without them.

That is so where failing does not depend on the tokens that were drawn: a drafter that fails at some
tokens only leaves the others more often than their q says.

A sequence whose plan neither drafts nor learns costs the drafter nothing: it begins at the first
plan that does. So a drafter may find that a text has grown without it, unless what it learns of a
tenant is to be saved: then it hears of all of that. A patient drafter hears of steps in which it
drafted nothing some at a time: code that a pass has made cold is dear to enter.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Set
from collections.abc import Sequence as Many
from typing import TypeVar
from weakref import WeakKeyDictionary

from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Drafter, Target, name_of
from forerun.core.tree import EMPTY, Tree, signed
from forerun.errors import CapacityError, ConfigError, ForerunError

LATE = 16, 1 << 22  # steps that may wait to be learned from, and bytes of their logits
log = logging.getLogger("forerun")
T = TypeVar("T")


class Guarded(Drafter):
    """A drafter whose errors while it runs cost drafts and one warning, nothing else.

    Errors of `bind` still end the run: they tell that the parts do not fit.
    """

    def __init__(self, drafter: Drafter, *, can_defer: bool = True) -> None:
        """can_defer: whether steps may be learned later than they end."""
        self.drafter, self.name = drafter, name_of(drafter)
        self._can_defer = can_defer
        self.labels, self.needs = drafter.labels, drafter.needs
        if not isinstance(self.labels, Set):
            raise ConfigError(
                f"drafter {self.name}: labels must be a set, such as frozenset({{'point'}}), got "
                f"{self.labels!r}"
            )
        kind, parts = type(drafter), [*drafter.within()]
        if mute := [part for part in parts if part.labels and not _can_draft(type(part))]:
            raise ConfigError(
                f"drafter {name_of(mute[0])} has neither `propose_one` nor `propose`, so it never "
                "drafts; write one of them, or say labels = frozenset()"
            )
        # what drafters from elsewhere say is looked at: an id that is none would end the run
        is_ours = all(type(part).__module__.startswith("forerun.") for part in (drafter, *parts))
        self._vocab = None if is_ours else 0
        self._is_one = kind.whose is Drafter.whose  # whoever is asked, it drafts itself
        self._reads = kind.reading is not Drafter.reading
        self.failures: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._late: list[tuple[Step, list[int]]] = []  # unheard steps, and who is to be learned
        self._is_due = False  # whether somebody was asked in one of them
        self._defers = False  # whether steps are learned while the next pass is computed
        self._room = 0  # laws more that may wait: of an empty tree all are of one size
        self._seen: Counter[str] = Counter()
        self._parts: dict[Drafter, Guarded] = {}  # those that were told of

    def within(self) -> Iterator[Drafter]:
        return self.drafter.within()

    def bind(self, target: Target) -> None:
        if self._vocab is not None:
            self._vocab = target.vocab_size
        self._defers = self._can_defer and target.is_async and self.drafter.can_learn_during_forward
        try:
            self.drafter.bind(target)
        except ForerunError:
            raise
        except Exception as error:
            raise ConfigError(
                f"drafter {self.name} failed to bind ({type(error).__name__}: {error})"
            ) from error

    def whose(self, seq: Sequence) -> Drafter:
        """The part that will draft, guarded too: what is known of drafts is known by then."""
        if self._is_one:
            return self
        if self._is_due:
            self._catch_up()
        part = self._ask(lambda: self.drafter.whose(seq), self.drafter)
        if part is self.drafter:
            return self
        if part not in self._parts:
            self._parts[part] = Guarded(part)
            self._parts[part]._seen = self._seen  # one warning for all of them
        return self._parts[part]

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        return self._ask(lambda: self.drafter.check_room(seqs, tokens, taken), 0, CapacityError)

    def seconds(self, nodes: int, num: int = 1) -> float:
        return self._ask(lambda: self.drafter.seconds(nodes, num), super().seconds(nodes, num))

    def reading(self, seq: Sequence) -> float:
        return self._ask(lambda: self.drafter.reading(seq), 0.0) if self._reads else 0.0

    def hope(self, num: int = 1) -> tuple[float, float]:
        return self._ask(lambda: self.drafter.hope(num), super().hope(num))

    def warm_up(self) -> None:
        self.drafter.warm_up()

    def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        asked: list[int] = []
        for i, plan in enumerate(plans):
            if not plan.is_empty:
                asked.append(i)
        if asked and self._late and not self._defers:
            self._catch_up()
        for i in asked:
            if self not in seqs[i].begun_by:
                self._begin(seqs[i])
        if len(asked) == len(seqs):
            return self._propose(seqs, plans)
        trees = [EMPTY] * len(seqs)
        if not asked:
            return trees
        found = self._propose([seqs[i] for i in asked], [plans[i] for i in asked])
        for i, tree in zip(asked, found, strict=True):
            trees[i] = tree
        return trees

    def observe(self, step: Step) -> None:
        rows: list[int] = []
        num_asked = num_nodes = 0
        for i, plan in enumerate(step.plans):
            if self.learns_from(step.seqs[i], plan):
                rows.append(i)
                num_asked += plan.nodes > 0
                num_nodes += len(step.trees[i].tokens)
        if not rows:
            return
        self._late.append((step, rows))
        if self._defers:
            for i in rows:  # beginning may take a pass, which must not fall into the next one
                if self not in step.seqs[i].begun_by:
                    self._begin(step.seqs[i])
            return
        may_wait = self._can_defer and self.drafter.is_patient and step.starts
        if num_nodes or not may_wait:
            self._catch_up()
            return
        self._is_due = self._is_due or num_asked > 0
        steps, size = LATE
        if len(self._late) == 1:
            self._room = size // step.laws[0].rows.nbytes
        self._room -= len(step.laws)
        if len(self._late) >= steps or self._room <= 0:
            self._catch_up()

    def learns_from(self, seq: Sequence, plan: Plan) -> bool:
        return self.drafter.learns_from(seq, plan)

    def _catch_up(self) -> None:
        """The drafter hears of all steps that wait, in their order."""
        late, self._late, self._is_due = self._late, [], False
        steps: list[Step] = []
        for step, rows in late:
            steps.append(step if len(rows) == len(step.seqs) else step.of(rows))
            for seq in steps[-1].seqs:
                if self not in seq.begun_by:
                    self._begin(seq)
        try:
            self.drafter.hear(steps)
        except Exception as error:
            self._note(error, list(dict.fromkeys(seq for step in steps for seq in step.seqs)))

    def overlap(self) -> None:
        if self._defers and self._late:
            self._catch_up()

    def finish(self, seq: Sequence) -> None:
        if self._late:
            self._catch_up()
        if self in seq.begun_by:
            seq.begun_by.discard(self)
            try:
                self.drafter.finish(seq)
            except Exception as error:
                self._note(error, [seq])

    def forget(self, group: Hashable) -> None:
        if self._late:
            self._catch_up()
        try:
            self.drafter.forget(group)
        except Exception as error:
            self._note(error, [])

    def memory_report(self) -> dict[str, int]:
        return self.drafter.memory_report()

    def _begin(self, seq: Sequence) -> None:
        seq.begun_by.add(self)
        try:
            self.drafter.start(seq)
        except Exception as error:
            self._note(error, [seq])

    def _propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
        try:
            found = self.drafter.propose(seqs, plans)
            _check(found, plans, self._vocab)
            for tree in found:
                signed(tree, self.name)
            return list(found)
        except Exception as error:
            if len(seqs) == 1:
                self._note(error, seqs)
                return [EMPTY]
        pairs = zip(seqs, plans, strict=True)  # the others of the batch keep their drafts
        return [self._propose([seq], [plan])[0] for seq, plan in pairs]

    def _ask(self, work: Callable[[], T], otherwise: T, *told: type[Exception]) -> T:
        """What it says, if it can. Raises errors that are `told`."""
        try:
            return work()
        except told:
            raise
        except Exception as error:
            self._note(error, [])
            return otherwise

    def _note(self, error: Exception, seqs: Many[Sequence]) -> None:
        for seq in seqs:
            self.failures[seq] = self.failures.get(seq, 0) + 1
        if not self._seen:
            log.warning(
                "drafter %s failed (%s: %s); going on without its drafts where it fails",
                self.name,
                type(error).__name__,
                error,
            )
            log.debug("where it failed", exc_info=error)
        self._seen[type(error).__name__] += 1


def _can_draft(kind: type[Drafter]) -> bool:
    return kind.propose is not Drafter.propose or kind.propose_one is not Drafter.propose_one


def _check(found: object, plans: Many[Plan], vocab: int | None) -> None:
    """Raises TypeError for what is not a tree for each plan.

    vocab: ValueError for ids that are not in 0..vocab - 1 and for more than was planned, if told.
    """
    if not isinstance(found, list | tuple) or len(found) != len(plans):
        raise TypeError(f"propose must return a list of {len(plans)} trees, got {found!r:.80}")
    for tree, plan in zip(found, plans, strict=True):
        if not isinstance(tree, Tree):
            raise TypeError(f"expected a Tree for each sequence, got {tree!r:.80}")
        if not vocab or not len(tree):
            continue
        if not 0 <= tree.tokens.min() <= tree.tokens.max() < vocab:
            raise ValueError(f"it drafts ids {tree.tokens.tolist()}; they end at {vocab - 1}")
        if len(tree) > plan.nodes or tree.depths.max() > plan.depth:
            depth = int(tree.depths.max())
            raise ValueError(
                f"it drafts {len(tree)} nodes on {depth} levels; its plan has nodes={plan.nodes}, "
                f"depth={plan.depth}"
            )
