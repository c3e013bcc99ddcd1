"""SuffixDecoding: what followed the same words before, here or in earlier responses.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2024.
Two suffix trees count every short string: one of this request, prompt and output, one of responses.
For each suffix of the text that occurs elsewhere, the most frequent continuations form a tree, of
as many tokens as the suffix is long; that with the most expected accepted tokens is drafted.

Law: POINT nodes, chosen by counts of finished steps, so exact under every rule for deterministic
drafts, at any temperature. Needs: nothing. Texts are read when a draft is asked for: many tokens at
once cost little, and a part of a router that is never asked costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many

from forerun.core.dice import Dice
from forerun.core.mixins import Persistent
from forerun.core.records import Plan, Sequence, Snapshot
from forerun.core.roles import Target
from forerun.core.tree import EMPTY, Tree, points
from forerun.drafters.base import PerSequence
from forerun.errors import ConfigError
from forerun.ngrams.tables.logits.pool import in_bytes
from forerun.ngrams.tables.suffix import response_store, tree
from forerun.ngrams.tables.suffix.draft import DraftLimits
from forerun.ngrams.tables.suffix.response_store import Responses
from forerun.ngrams.tables.suffix.tree import NO_LIMIT, Draft, SuffixTree


class Suffix(PerSequence, Persistent):
    """Counted suffix trees x the most frequent continuations.

    scope: which responses are shared, "request" (none), "group", "tenant" or "global".
    depth: longest string counted; a match is at most half of it. factor, offset: at most
    factor * match + offset tokens are drafted. min_prob: least share of the match's places that a
    drafted token needs. branches: False drafts one path, True a tree. min_score: drafts that are
    expected to have fewer accepted tokens are left out. budget_mb: of all shared trees. texts: most
    responses kept per tree; the oldest go first.
    """

    labels = frozenset({"point"})
    can_observe_late = True  # it reads texts, not steps

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
                "factor and min_score must be at least 0, and factor + offset more than 0, or "
                f"nothing is drafted after a match of one; got {factor}, {min_score} and {offset=}"
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

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        self._responses.gather(seqs)
        return super().propose(seqs, plans, dice)

    def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        draft = self.best(seq, plan)
        return EMPTY if draft is None else points(draft.tokens, draft.parents)

    def best(self, seq: Sequence, plan: Plan) -> Draft | None:
        """The better draft of the two trees, that of the request in a tie; None without one."""
        reader = self._responses.follow(seq)
        width = plan.nodes if self.branches else 1
        wish = DraftLimits(plan.nodes, plan.depth, self.factor, self.offset, self.min_prob, width)
        draft = reader.own.draft(reader.text, wish)
        if reader.shared is not None:
            at_least = 0.0 if draft is None else draft.score
            draft = reader.shared.draft(reader.entry, wish, at_least) or draft
        return None if draft is None or draft.score < self.min_score else draft

    def finish(self, seq: Sequence) -> None:
        self._responses.finish(seq)

    def forget(self, group: Hashable) -> None:
        self._responses.forget(group)

    def memory_report(self) -> dict[str, int]:
        return {f"suffix trees, {name}": size for name, size in self._responses.report().items()}

    def keep(self, tenant: str = "") -> None:
        self._responses.check_can_keep(tenant)

    def snapshot(self, tenant: str = "") -> Snapshot:
        return self._responses.snapshot(tenant)

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        self._responses.restore(snapshot, tenant)

    @classmethod
    def merge(cls, snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
        return response_store.merge(snapshots, max_bytes)
