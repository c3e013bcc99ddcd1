"""SuffixDecoding: continuations of the same tokens in this request or in earlier responses.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2024.
Two suffix trees count all short strings: one of this request, prompt and output, one of responses.
For each suffix of the text that occurs elsewhere, the most frequent continuations form a tree with
as many tokens as the suffix. The tree with the most expected accepted tokens is drafted.

Exact: POINT nodes, chosen by counts of finished steps. Needs nothing. Texts are read when a draft
is requested.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many

from forerun.core.dice import Dice
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Target
from forerun.core.tree import EMPTY, Tree, points
from forerun.drafters._saved_responses import SavedResponses
from forerun.drafters.base import PerSequence
from forerun.errors import ConfigError
from forerun.ngrams.tables.logits.pool import in_bytes
from forerun.ngrams.tables.suffix import tree
from forerun.ngrams.tables.suffix.draft import DraftLimits
from forerun.ngrams.tables.suffix.response_store import Responses
from forerun.ngrams.tables.suffix.tree import NO_LIMIT, Draft, SuffixTree


class Suffix(PerSequence, SavedResponses):
    """Drafts the most frequent continuations in counted suffix trees.

    scope: which responses are shared, "request" (none), "group", "tenant" or "global".
    depth: max length of counted strings; a match is at most half of it. factor, offset: at most
    factor * match + offset tokens are drafted. min_prob: min share of the match's occurrences that
    a drafted token continues. branches: False drafts one path, True a tree. min_score: drafts with
    fewer expected accepted tokens are dropped. budget_mb: memory of all shared trees. texts: max
    responses per tree; the oldest are dropped first.
    """

    labels = frozenset({"point"})
    can_observe_late = True

    def __init__(
        self,
        *,
        scope: str = "tenant",
        depth: int = 64,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        branches: bool = True,
        min_score: float = 0.0,
        budget_mb: float = 64,
        texts: int = 100_000,
    ) -> None:
        if not 0 < min_prob <= 1:
            raise ConfigError(f"min_prob must be more than 0 and at most 1, got {min_prob}")
        if not (factor >= 0 and factor + offset > 0 and min_score >= 0):
            raise ConfigError(
                "factor and min_score must be at least 0, and factor + offset above 0; got "
                f"{factor=}, {min_score=} and {offset=}"
            )
        self.factor, self.offset, self.min_prob = factor, offset, min_prob
        self.branches, self.min_score = branches, min_score
        self._responses: Responses[SuffixTree, SuffixTree] = Responses(
            "suffix",
            lambda: SuffixTree(depth=depth, budget=NO_LIMIT),
            lambda budget: SuffixTree(depth=depth, budget=budget, most=texts),
            scope=scope,
            budget=in_bytes(budget_mb),
        )

    def bind(self, target: Target) -> None:
        self._responses.bind(target)
        tree.warm_up()

    def start(self, seq: Sequence) -> None:
        self._responses.join(seq)

    def read(self, seqs: Many[Sequence]) -> None:
        self._responses.gather(seqs)
        for seq in seqs:
            self._responses.follow(seq)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        self._responses.gather(seqs)
        return super().propose(seqs, plans, dice)

    def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        draft = self.best(seq, plan)
        return EMPTY if draft is None else points(draft.tokens, draft.parents)

    def best(self, seq: Sequence, plan: Plan) -> Draft | None:
        """The draft with the higher score; in a tie that of the request; None without one."""
        reader = self._responses.follow(seq)
        width = plan.nodes if self.branches else 1
        limits = DraftLimits(plan.nodes, plan.depth, self.factor, self.offset, self.min_prob, width)
        draft = reader.own.draft(reader.text, limits)
        if reader.shared is not None:
            at_least = 0.0 if draft is None else draft.score
            draft = reader.shared.draft(reader.entry, limits, at_least) or draft
        return None if draft is None or draft.score < self.min_score else draft

    def finish(self, seq: Sequence) -> None:
        self._responses.finish(seq)

    def forget(self, group: Hashable) -> None:
        self._responses.forget(group)

    def memory_report(self) -> dict[str, int]:
        return {f"suffix trees, {name}": size for name, size in self._responses.report().items()}
