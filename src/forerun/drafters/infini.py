"""Drafts from an Infini-gram index: next-token counts after unbounded n-grams of a corpus.

Liu et al., "Infini-gram: Scaling Unbounded n-gram Language Models to a Trillion Tokens", 2024; the
paper itself does not draft. q is the next-token counts after the longest suffix of the text that
occurs in the corpus. Any grower makes a chain or a tree of it.

Exact with any verifier that supports the grower's labels. Needs an index built with the target's
tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from forerun import registry
from forerun.core.dice import Dice, SeededDice
from forerun.core.growing import Grower, Path, Source
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Drafter, Target
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, Proposal, Tree
from forerun.drafters.base import grow
from forerun.errors import ConfigError
from forerun.growers.gumbel import Gumbel
from forerun.growers.template import TopTemplate
from forerun.ngrams.index.query.draft import IndexOptions, draft
from forerun.ngrams.index.query.engine import Index, Next
from forerun.ngrams.index.query.tokenizer_check import check_tokenizer
from forerun.ngrams.tables.logits.kernels import TINY
from forerun.registry import Corpus, GrowerName, TokenId
from forerun.utils.numbers import whole

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

AUTO = "auto"
MAX_ENTRIES, MAX_SUPPORT = 1 << 12, 1 << 20  # bounds of buffers allocated per draft


class Infini(Drafter):
    """`index` is a folder of `forerun index build`, or an open Index.

    corpus: token ids to index in memory instead. grower: "auto" draws without replacement, and
    takes the most probable tokens for greedy requests. context: max suffix length. min_length,
    min_count: a shorter or rarer suffix proposes nothing. entries: max next tokens. max_support:
    max occurrences read; of more a sample is read.
    """

    can_observe_late = True

    def __init__(
        self,
        *,
        index: Corpus | Index | None = None,
        corpus: tuple[TokenId, ...] = (),
        grower: GrowerName = AUTO,
        context: int = 32,
        min_length: int = 1,
        min_count: int = 1,
        entries: int = 64,
        max_support: int = 256,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if (index is None) == (not corpus):
            raise ConfigError(
                "infini needs an index or a corpus, and not both; build an index with `forerun "
                "index build FOLDER TEXTS --tokenizer MODEL` and use infini:index=FOLDER"
            )
        sizes = {"context": context, "min_length": min_length, "min_count": min_count}
        for name, size in (sizes | {"entries": entries, "max_support": max_support}).items():
            whole(name, size)
        if entries > MAX_ENTRIES or max_support > MAX_SUPPORT:
            raise ConfigError(
                f"entries must be at most {MAX_ENTRIES} and max_support at most {MAX_SUPPORT}, "
                f"got {entries} and {max_support}"
            )
        if index is None and len(corpus) < 2:
            raise ConfigError(f"a corpus needs at least 2 token ids, got {corpus}")
        if index is None:
            index = Index.of([corpus], width=4)
        self.index = Index.open(index) if isinstance(index, str) else index
        if tokenizer is not None:
            check_tokenizer(self.index, tokenizer)
        self.source = IndexSource(self.index, context, min_length, min_count, entries, max_support)
        names = ("gumbel", "template") if grower == AUTO else (grower, grower)
        self.growers: tuple[Grower, ...] = tuple(registry.make("grower", name) for name in names)
        self.labels = frozenset().union(*(each.labels for each in self.growers))

    def bind(self, target: Target) -> None:
        top = self.index.largest_id
        if top >= target.vocab_size:
            raise ConfigError(
                f"the index holds token id {top}, but the target has {target.vocab_size} ids; "
                "rebuild it with --tokenizer and the target's folder"
            )
        self.source.vocab_size = target.vocab_size
        self.index.infgram_ntd([0])
        self.index.infgram_many([[0], [0, 1]])
        seq = Sequence([0], 1, Sampling(temperature=0), SeededDice(0), limit=1)
        self.propose([seq], [Plan()], [seq.dice])

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        trees = [EMPTY] * len(seqs)
        slow = []
        for i, (seq, plan) in enumerate(zip(seqs, plans, strict=True)):
            if plan.is_empty:
                continue
            own = dice[i]
            if isinstance(own, SeededDice) and self._has_kernel(seq):
                trees[i] = self._drafted(seq, plan, own)
            else:
                slow.append(i)
        for grower in dict.fromkeys(self.growers) if slow else ():
            mine = [i for i in slow if self._grower(seqs[i]) is grower]
            grown = grow(
                [seqs[i] for i in mine],
                [plans[i] for i in mine],
                [dice[i] for i in mine],
                self.source,
                grower,
            )
            for i, tree in zip(mine, grown, strict=True):
                trees[i] = tree
        return trees

    def memory_report(self) -> dict[str, int]:
        held = {"infini index in memory": self.index.held_bytes}
        return {part: size for part, size in held.items() if size}

    def _grower(self, seq: Sequence) -> Grower:
        return self.growers[seq.sampling.is_greedy]

    def _has_kernel(self, seq: Sequence) -> bool:
        """Whether `_drafted` grows the same tree: a template grower and a single shard."""
        has_template = type(self._grower(seq)) in (Gumbel, TopTemplate)
        return has_template and len(self.index.shards) == 1

    def _drafted(self, seq: Sequence, plan: Plan, dice: SeededDice) -> Tree:
        """The tree of a template grower, by one kernel call."""
        grower, source = self._grower(seq), self.source
        assert isinstance(grower, Gumbel | TopTemplate)
        options, query = source.options(seq.sampling), self.index.ids(seq.tokens[-source.context :])
        shape = grower.template.first(plan.nodes)
        max_draws = plan.nodes * options.entries
        uniforms = dice.peek(max_draws) if isinstance(grower, Gumbel) else None
        tree, used = draft(self.index, query, options, shape, plan.depth, uniforms)
        dice.skip(used)
        return tree


class IndexSource(Source):
    """q = count^(1/T) of the next tokens, normalised; T is the request's temperature.

    A greedy request uses temperature 1, else every node would have one child.
    """

    def __init__(
        self,
        index: Index,
        context: int,
        min_length: int,
        min_count: int,
        entries: int,
        max_support: int,
    ) -> None:
        self.index, self.context, self.max_support = index, context, max_support
        self.min_length, self.min_count, self.entries = min_length, min_count, entries
        self.vocab_size = index.eos + 1  # replaced by the target's

    def options(self, sampling: Sampling) -> IndexOptions:
        """The options and the request's temperature, for the kernel."""
        index, power = self.index, 1.0 if sampling.is_greedy else 1 / sampling.temperature
        kept = self.context, self.min_length, self.min_count, self.entries, self.max_support
        return IndexOptions(*kept, self.vocab_size, index.eos, index.separator, power)

    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        n = self.context
        contexts = [[*seq.tokens[-n:], *path][-n:] for seq, path in requests]
        if len(contexts) == 1:
            found = [self.index.infgram_ntd(contexts[0], self.max_support)]
        else:
            found = self.index.infgram_many(contexts, self.max_support)
        return [self._law(n, seq.sampling) for n, (seq, _) in zip(found, requests, strict=True)]

    def _law(self, found: Next, sampling: Sampling) -> Proposal | None:
        if found.suffix_length < self.min_length or found.context_count < self.min_count:
            return None
        ids, counts = found.ids, found.counts
        if len(ids) and ids.max() >= self.vocab_size:  # end-of-document marker
            ids, counts = ids[ids < self.vocab_size], counts[ids < self.vocab_size]
        if len(ids) > self.entries:
            best = np.sort(np.argsort(-counts, kind="stable")[: self.entries])
            ids, counts = ids[best], counts[best]
        if not len(ids):
            return None
        weights = counts / counts.max()
        if not sampling.is_greedy:
            weights = weights ** (1 / sampling.temperature)
            ids, weights = ids[weights > TINY], weights[weights > TINY]
        return Proposal(ids.astype(np.int32), weights / weights.sum())
