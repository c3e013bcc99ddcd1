"""Tries drafters in order until one gives a large enough tree.

Exact: a tree of POINT nodes may be dropped because of its size. A drawn tree may not, since its
size can depend on the drawn tokens, which would make their labels wrong. So only the last part may
draw. Enumerated in tests/laws. Needs what its parts need.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from forerun.core.dice import Dice
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Drafter, name_of
from forerun.core.tree import EMPTY, Tree, with_source
from forerun.drafters.base import Composite
from forerun.errors import ConfigError
from forerun.registry import DrafterName


class Cascade(Composite):
    """Tries `parts` in order; a tree with fewer than `least` nodes does not count.

    Only the last part may draw.
    """

    def __init__(
        self,
        *,
        parts: tuple[DrafterName | Drafter, ...] = ("suffix", "stand"),
        least: int = 2,
        tokenizer: Any = None,
    ) -> None:
        if least < 1:
            raise ConfigError(f"least must be at least 1 node, got {least}")
        super().__init__(parts, tokenizer)
        self.least = least
        early = [name for name, p in zip(self.names, self.parts[:-1], strict=False) if draws(p)]
        if early:
            raise ConfigError(
                f"part {early[0]!r} of a cascade draws tokens, so no part may follow it; list it "
                "last"
            )

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        trees = [EMPTY] * len(seqs)
        asked = [i for i, plan in enumerate(plans) if not plan.is_empty]
        for part in self.parts:
            if not asked:
                break
            found = part.propose(
                [seqs[i] for i in asked], [plans[i] for i in asked], [dice[i] for i in asked]
            )
            for i, tree in zip(asked, found, strict=True):
                trees[i] = self._better(trees[i], tree, part)
            asked = [i for i in asked if not self._is_enough(trees[i], plans[i])]
        return trees

    def _is_enough(self, tree: Tree, plan: Plan) -> bool:
        return len(tree) >= min(self.least, plan.nodes, plan.depth)

    def _better(self, before: Tree, tree: Tree, part: Drafter) -> Tree:
        """A drawn tree always; else the larger of the two."""
        if len(tree) <= len(before) and not draws(part):
            return before
        return with_source(tree, name_of(part))


def draws(part: Drafter) -> bool:
    """Whether a drafter may draw tokens."""
    return not part.labels <= {"point"}
