"""REST: continuations of the text's end, retrieved from a datastore by a suffix array.

He et al., "REST: Retrieval-Based Speculative Decoding", 2023. Binary search finds the longest
suffix of the text, from 16 tokens down to 2, that occurs in the datastore. The continuations of all
occurrences are counted, and the most frequent paths form the tree.

Exact: POINT nodes, chosen by constant counts. Needs a datastore in the target's token ids.
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
from forerun.utils.numbers import whole

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer


class Rest(PerSequence):
    """Drafts the most frequent continuations in a datastore.

    index: folder of `forerun index build`, or an open Index. corpus: text or .jsonl files, indexed
    in memory. ids: token ids, indexed in memory. longest, shortest: length of the suffix. tokens:
    max continuation length. most: max nodes of a tree. reads: sample size per node; a continuation
    rarer than 1 in `reads` occurrences of its parent may be missed.
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
        sizes = {"shortest": shortest, "longest": longest, "tokens": tokens, "most": most}
        for name, size in (sizes | {"reads": reads}).items():
            whole(name, size)
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
        """The continuations of the longest match; `firsts` and `bypass` as in `continuations`."""
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
