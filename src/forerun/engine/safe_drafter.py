"""A wrapper that catches errors of a drafter, so generation continues without its drafts.

The output stays exact if failures do not depend on the drawn tokens. A drafter that fails for
certain draws would change the distribution of the others.

A sequence starts in the drafter with its first plan that drafts or learns, so its text may have
grown before.
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
from forerun.core.tree import EMPTY, Tree, with_source
from forerun.errors import CapacityError, ConfigError, ForerunError

if TYPE_CHECKING:
    from forerun.core.dice import Dice

RENAMED = {  # methods and attributes of drafters in earlier releases
    "propose_one": "draft, in a subclass of forerun.drafters.base.PerSequence",
    "warm_up": "bind, which compiles too",
    "hear": "observe",
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
    """A drafter wrapper: runtime errors cost drafts and one warning, nothing else.

    Errors of `bind` are raised: the parts do not fit. Drafters without `Priced` get its defaults.
    `observe` is deferred into the next forward pass of an asynchronous target.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name = drafter, name_of(drafter)
        check_interface(drafter)
        self.labels, self.needs, self.parts = drafter.labels, drafter.needs, drafter.parts
        self.num_top_logits, self.learns = drafter.num_top_logits, priced(drafter).learns
        # drafts of user code are checked, since an id out of range would end the run
        is_ours = all(type(part).__module__.startswith("forerun.") for part in parts_of(drafter))
        self._vocab = None if is_ours else 0
        self._defers = False  # whether steps are observed during the next forward pass
        self._seen: Counter[str] = Counter()  # errors by type, shared by the parts: one warning
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
        """`Persistent.kept` of the drafter."""
        return getattr(self.drafter, "kept", frozenset())

    def failures(self, seq: Sequence) -> int:
        """Number of errors of the drafter for a sequence."""
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
        for seq, plan in zip(seqs, plans, strict=True):
            if observes(self, seq, plan):
                self._begin(seq)
        asked = [i for i, plan in enumerate(plans) if not plan.is_empty]
        if not asked:
            return trees
        pick = [seqs[i] for i in asked], [plans[i] for i in asked], [dice[i] for i in asked]
        for i, tree in zip(asked, self._propose(*pick), strict=True):
            trees[i] = tree
        return trees

    def read(self, seqs: Many[Sequence]) -> None:
        self._try(lambda: self.drafter.read(seqs), [])

    def observe(self, step: Step) -> None:
        pairs = zip(step.seqs, step.plans, strict=True)
        rows = [i for i, (seq, plan) in enumerate(pairs) if observes(self, seq, plan)]
        if not rows:
            return
        mine = step if len(rows) == len(step.seqs) else step.select(rows)
        for seq in mine.seqs:  # drafts may come from elsewhere, see `integrations`
            self._begin(seq)
        if self._defers:
            observe_pending(self)
            _pending[self.drafter] = self, mine
        else:
            self._show(mine)

    def finish(self, seq: Sequence) -> None:
        observe_pending(self)
        if seq.scratch.pop((self, "begun"), False):
            self._try(lambda: self.drafter.finish(seq), [seq])

    def forget(self, group: Hashable) -> None:
        observe_pending(self)
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
            return [with_source(tree, self.name) for tree in found]
        except Exception as error:
            if len(seqs) == 1:
                self._note(error, seqs)
                return [EMPTY]
        each = zip(seqs, plans, dice, strict=True)  # one by one, to keep the other drafts
        return [self._propose([seq], [plan], [own])[0] for seq, plan, own in each]

    def _try(self, work: Callable[[], object], seqs: Many[Sequence]) -> None:
        try:
            work()
        except Exception as error:
            self._note(error, seqs)

    def _ask(self, work: Callable[[], T], otherwise: T, *passed: type[Exception]) -> T:
        """The result of `work`, or `otherwise` if it fails. Errors in `passed` are raised."""
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
                "drafter %s failed (%s: %s); generation continues without the failed drafts",
                self.name,
                type(error).__name__,
                error,
            )
            log.debug("traceback of the drafter", exc_info=error)
        self._seen[type(error).__name__] += 1


# by drafter: the wrapper, and the step that the drafter has not observed yet
_pending: WeakKeyDictionary[Drafter, tuple[SafeDrafter, Step]] = WeakKeyDictionary()


def observe_pending(drafter: Drafter) -> None:
    """Runs the deferred `observe` of a drafter and its parts."""
    if not _pending:
        return
    for part in parts_of(drafter):
        inner = part.drafter if isinstance(part, SafeDrafter) else part
        safe, step = _pending.pop(inner, (None, None))
        if safe is not None and step is not None:
            safe._show(step)


def check_interface(drafter: Drafter) -> None:
    """Raises ConfigError for a drafter that cannot draft, or that uses names of older releases."""
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
                f"drafter {name} has no `propose`, so it never drafts; define it, subclass "
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
    """Raises TypeError unless there is one tree per plan.

    vocab: if given, raises ValueError for ids outside 0..vocab - 1 and for trees larger than their
    plan.
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
