"""Drafts the tokens that a constraint forces: keys of a JSON schema, the rest of a choice.

A chain of POINT nodes, as the tokenizer splits the forced text; the model may split it otherwise,
so the chain is verified like any draft. Exact. Needs a constraint that knows its forced text.
"""

from __future__ import annotations

from forerun.core.allowed import AllowedTokens
from forerun.core.dice import Dice
from forerun.core.records import Plan, Sequence
from forerun.core.tree import EMPTY, Tree, chain
from forerun.drafters.base import PerSequence


class Forced(PerSequence):
    """The forced tokens after the text, and after each of them, up to the plan's size."""

    labels = frozenset({"point"})

    def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        return forced_chain(seq, plan)


def forced_chain(seq: Sequence, plan: Plan) -> Tree:
    """The forced tokens after a sequence, within a plan."""
    allowed = None if plan.is_empty else AllowedTokens.of(seq)
    return EMPTY if allowed is None else chain(allowed.forced_run(min(plan.nodes, plan.depth)))
