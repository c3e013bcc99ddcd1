"""A drafter may fail; generation goes on: drafts only save time, and the law holds without them.

This needs failures that do not depend on the drawn tokens: a drafter that fails at some tokens only
leaves the others more often than their q says.

A plan that neither drafts nor learns costs the drafter nothing: a sequence begins at its first use,
so a drafter may find that a text has grown without it.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Set
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from forerun.core.mixins import (
    Priced,
    Shared,
    active_drafter,
    forget,
    observes,
    parts_of,
    priced,
)
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Drafter, Target, name_of
from forerun.core.tree import EMPTY, Tree, signed
from forerun.errors import CapacityError, ConfigError, ForerunError

if TYPE_CHECKING:
    from forerun.core.dice import Dice

RENAMED = {  # methods and attributes of drafters before this release
    "propose_one": "draft, in a subclass of forerun.drafters.base.PerSequence",
    "warm_up": "bind, which compiles too",
    "hear": "observe",
    "whose": "active_drafter, of forerun.core.mixins.Priced",
    "seconds": "draft_seconds, of forerun.core.mixins.Priced",
    "reading": "catch_up_seconds, of forerun.core.mixins.Priced",
    "hope": "acceptance_prior, of forerun.core.mixins.Priced",
    "let_go": "release, of forerun.core.mixins.Persistent",
    "merged": "merge, of forerun.core.mixins.Persistent",
    "within": "the attribute parts",
    "alias": "name",
    "can_learn_during_forward": "can_observe_late",
}
log = logging.getLogger("forerun")
T = TypeVar("T")


class SafeDrafter(Shared, Priced):
    """A drafter whose runtime errors cost drafts and one warning, nothing else.

    Errors of `bind` still end the run: the parts do not fit. It prices drafters without `Priced` by
    the defaults, and defers `observe` into the next forward pass of an asynchronous target.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name = drafter, name_of(drafter)
        check_interface(drafter)
        self.labels, self.needs, self.parts = drafter.labels, drafter.needs, drafter.parts
        self.num_top_logits, self.learns = drafter.num_top_logits, priced(drafter).learns
        # drafts of code from elsewhere are checked: an id out of range would end the run
        is_ours = all(type(part).__module__.startswith("forerun.") for part in parts_of(drafter))
        self._vocab = None if is_ours else 0
        self._defers = False  # whether steps are observed during the next forward pass
        self._seen: Counter[str] = Counter()  # errors by type; parts share it: one warning
        self._safe_parts: dict[Drafter, SafeDrafter] = {drafter: self}
        for part in list(parts_of(drafter))[1:] if isinstance(drafter, Priced) else []:
            self._safe_parts[part] = safe = SafeDrafter(part)
            safe._seen = self._seen

    def bind(self, target: Target) -> None:
        if self._vocab is not None:
            self._vocab = target.vocab_size
        self._defers = target.is_async and self.drafter.can_observe_late
        try:
            self.drafter.bind(target)
        except ForerunError:
            raise
        except Exception as error:
            raise ConfigError(
                f"drafter {self.name} failed to bind ({type(error).__name__}: {error})"
            ) from error

    @property
    def kept(self) -> frozenset[str]:
        """Tenants of which it is shown every step."""
        return getattr(self.drafter, "kept", frozenset())

    def failures(self, seq: Sequence) -> int:
        """Errors of the drafter that cost a sequence a draft or a step to learn from."""
        return seq.scratch.get((self, "failures"), 0)

    def active_drafter(self, seq: Sequence) -> Drafter:
        part = self._ask(lambda: active_drafter(self.drafter, seq), self.drafter)
        return self._safe_parts.get(part, self)

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        return self._ask(lambda: priced(self.drafter).draft_seconds(nodes, num), 0.0)

    def catch_up_seconds(self, seq: Sequence) -> float:
        return self._ask(lambda: priced(self.drafter).catch_up_seconds(seq), 0.0)

    def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
        otherwise = super().acceptance_prior(num)
        return self._ask(lambda: priced(self.drafter).acceptance_prior(num), otherwise)

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        return self._ask(
            lambda: priced(self.drafter).check_room(seqs, tokens, taken), 0, CapacityError
        )

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        trees = [EMPTY] * len(seqs)
        asked = [i for i, plan in enumerate(plans) if not plan.is_empty]
        if not asked:
            return trees
        for i in asked:
            self._begin(seqs[i])
        pick = [seqs[i] for i in asked], [plans[i] for i in asked], [dice[i] for i in asked]
        for i, tree in zip(asked, self._propose(*pick), strict=True):
            trees[i] = tree
        return trees

    def observe(self, step: Step) -> None:
        pairs = zip(step.seqs, step.plans, strict=True)
        rows = [i for i, (seq, plan) in enumerate(pairs) if observes(self, seq, plan)]
        if not rows:
            return
        mine = step if len(rows) == len(step.seqs) else step.of(rows)
        for seq in mine.seqs:  # now: beginning may take a forward pass of its own
            self._begin(seq)
        if self._defers:
            settle(self)
            _pending[self.drafter] = self, mine
        else:
            self._show(mine)

    def finish(self, seq: Sequence) -> None:
        settle(self)
        if seq.scratch.pop((self, "begun"), False):
            self._try(lambda: self.drafter.finish(seq), [seq])

    def forget(self, group: Hashable) -> None:
        settle(self)
        self._try(lambda: forget(self.drafter, group), [])

    def memory_report(self) -> dict[str, int]:
        return self.drafter.memory_report()

    def _begin(self, seq: Sequence) -> None:
        if (self, "begun") not in seq.scratch:
            seq.scratch[self, "begun"] = True
            self._try(lambda: self.drafter.start(seq), [seq])

    def _show(self, step: Step) -> None:
        self._try(lambda: self.drafter.observe(step), step.seqs)

    def _propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        try:
            found = self.drafter.propose(seqs, plans, dice)
            _check(found, plans, self._vocab)
            return [signed(tree, self.name) for tree in found]
        except Exception as error:
            if len(seqs) == 1:
                self._note(error, seqs)
                return [EMPTY]
        each = zip(seqs, plans, dice, strict=True)  # the others of the batch keep their drafts
        return [self._propose([seq], [plan], [own])[0] for seq, plan, own in each]

    def _try(self, work: Callable[[], object], seqs: Many[Sequence]) -> None:
        try:
            work()
        except Exception as error:
            self._note(error, seqs)

    def _ask(self, work: Callable[[], T], otherwise: T, *passed: type[Exception]) -> T:
        """The drafter's answer, or `otherwise` if it fails. Errors in `passed` are raised."""
        try:
            return work()
        except passed:
            raise
        except Exception as error:
            self._note(error, [])
            return otherwise

    def _note(self, error: Exception, seqs: Many[Sequence]) -> None:
        for seq in seqs:
            seq.scratch[self, "failures"] = self.failures(seq) + 1
        if not self._seen:
            log.warning(
                "drafter %s failed (%s: %s); going on without its drafts where it fails",
                self.name,
                type(error).__name__,
                error,
            )
            log.debug("where it failed", exc_info=error)
        self._seen[type(error).__name__] += 1


# by drafter: the one step that it has not been shown yet, and the wrapper that will show it
_pending: WeakKeyDictionary[Drafter, tuple[SafeDrafter, Step]] = WeakKeyDictionary()


def settle(drafter: Drafter) -> None:
    """Shows a drafter, or those that it is made of, the step that is pending."""
    if not _pending:
        return
    for part in parts_of(drafter):
        inner = part.drafter if isinstance(part, SafeDrafter) else part
        safe, step = _pending.pop(inner, (None, None))
        if safe is not None and step is not None:
            safe._show(step)


def check_interface(drafter: Drafter) -> None:
    """Raises ConfigError for a drafter that cannot draft, or is written for an older release."""
    for part in parts_of(drafter):
        kind, name = type(part), name_of(part)
        if not isinstance(part.labels, Set):
            raise ConfigError(
                f"drafter {name}: labels must be a set, such as frozenset({{'point'}}), got "
                f"{part.labels!r}"
            )
        if old := next((old for old in RENAMED if hasattr(kind, old)), None):
            raise ConfigError(f"drafter {name}: {old} was renamed; write {RENAMED[old]}")
        if part.labels and kind.propose is Drafter.propose:
            raise ConfigError(
                f"drafter {name} has no `propose`, so it never drafts; write one, subclass "
                "forerun.drafters.base.PerSequence, or set labels = frozenset()"
            )
        try:
            inspect.signature(part.propose).bind([], [], [])
        except TypeError:
            raise ConfigError(
                f"drafter {name}: propose must take (seqs, plans, dice), has "
                f"{inspect.signature(part.propose)}; dice holds one Dice per sequence"
            ) from None


def _check(found: object, plans: Many[Plan], vocab: int | None) -> None:
    """Raises TypeError for anything but one tree per plan.

    vocab: if given, ValueError for ids outside 0..vocab - 1 and for trees larger than their plan.
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
