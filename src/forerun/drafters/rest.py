"""REST: continuations of the text's end, retrieved from a datastore of text by a suffix array.

He et al., "REST: Retrieval-Based Speculative Decoding", 2023. The longest suffix of the text, from
16 tokens down to 2, that occurs in the datastore is found by binary search; what followed its
places is counted, and the most frequent paths form the tree.

Law: POINT nodes, chosen by counts that never change, so exact under every rule for deterministic
drafts, at any temperature. Needs: a datastore in the target's own token ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.core.dice import Dice
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Target
from forerun.core.tree import Tree, points
from forerun.drafters.base import PerSequence
from forerun.errors import ConfigError
from forerun.ngrams.index.query import continuations
from forerun.ngrams.index.query.continuation_kernels import READS, FirstTokens, TreeLimits
from forerun.ngrams.index.query.continuations import Continuations
from forerun.ngrams.index.query.datastore import check_ids, open_datastore
from forerun.ngrams.index.query.engine import Index
from forerun.registry import Corpus, TokenId

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer


class Rest(PerSequence):
    """A datastore x the most frequent continuations.

    index: folder that `forerun index build` made, or an open Index. corpus: text or .jsonl files,
    indexed in memory. ids: token ids, indexed in memory. longest, shortest: of the suffix that is
    looked for. tokens: longest continuation. most: nodes of a tree, whatever the plan allows.
    reads: a continuation rarer than 1 in so many of its parent's places may be missed.
    """

    labels = frozenset({"point"})
    can_observe_late = True

    def __init__(
        self,
        *,
        index: Corpus | Index | None = None,
        corpus: tuple[Corpus, ...] = (),
        ids: tuple[TokenId, ...] = (),
        longest: int = 16,
        shortest: int = 2,
        tokens: int = 10,
        most: int = 64,
        reads: int = READS,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if min(shortest, tokens, most, reads) < 1 or longest < shortest:
            raise ConfigError(
                "shortest, tokens, most and reads must be at least 1, and longest at least "
                f"shortest; got {shortest}, {tokens}, {most}, {reads} and {longest}"
            )
        self.lengths, self.tokens, self.most, self.reads = (shortest, longest), tokens, most, reads
        self.datastore = open_datastore(
            "rest",
            index=index,
            corpus=corpus,
            ids=ids,
            tokenizer=tokenizer,
            least=shortest + 1,
        )

    def bind(self, target: Target) -> None:
        check_ids(self.datastore, target)
        continuations.warm_up(self.datastore)

    def retrieve(
        self, seq: Sequence, plan: Plan, firsts: FirstTokens | None = None, bypass: int = 0
    ) -> Continuations:
        """What followed the longest match, best first; `firsts`, `bypass` as in `retrieval`."""
        return continuations.retrieve(
            self.datastore,
            seq.tokens,
            TreeLimits(min(plan.nodes, self.most), min(plan.depth, self.tokens), self.reads),
            lengths=self.lengths,
            firsts=firsts,
            bypass=bypass,
        )

    def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        found = self.retrieve(seq, plan)
        return points(found.tokens, found.parents)

    def memory_report(self) -> dict[str, int]:
        held = self.datastore.held_bytes
        return {"rest datastore in memory": held} if held else {}
