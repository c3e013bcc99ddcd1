"""RASD: merges a draft model's tree with retrieved continuations.

"RASD: Retrieval-Augmented Speculative Decoding", 2025. Continuations of the text's end are
retrieved from a datastore (as in REST) and from the text. A continuation is pruned unless its first
token is among the model's `top` next tokens. The others are merged into the model's tree by longest
common prefix, so no path is verified twice. Any drafter can replace the model.

Exact: nodes of the model's tree keep their labels; retrieved nodes are POINT and come after all of
their siblings. They may depend on the drawn siblings: after a rejection, the residual distribution
is the same. Needs a verifier that supports both labels.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.growing import Source
from forerun.core.mixins import priced
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Drafter, Target, name_of
from forerun.core.tree import POINT, Proposal, Tree
from forerun.drafters.base import Composite, refuse_lazy
from forerun.errors import ConfigError
from forerun.growers._merge import overlay, warm_up
from forerun.ngrams.index.query.continuation_kernels import FirstTokens, likeliest
from forerun.ngrams.index.query.continuations import Continuations
from forerun.ngrams.index.query.engine import Index
from forerun.registry import Corpus, DrafterName, GrowerName, ModelName, TokenId

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer
    from forerun.runner.model_runner import ModelRunner


class Rasd(Composite):
    """A drafter with retrievers: REST if a datastore is given, and those in `retrievers`.

    model: folder or hub id of a draft model, with `grower`; or drafter: any other drafter.
    index, corpus, ids: the datastore, as in REST. retrievers: further drafters with POINT nodes,
    most accurate first. top: number of the model's next tokens that a continuation may begin with;
    0 retrieves nothing. share: max share of the nodes for retrieval. bypass: matches of at least so
    many tokens are not pruned; 0 prunes all. weigh: multiplies counts by the model's probability of
    the first token.
    """

    def __init__(
        self,
        *,
        model: ModelName | ModelRunner | None = None,
        grower: GrowerName = "template",
        drafter: DrafterName | Drafter | None = None,
        index: Corpus | Index | None = None,
        corpus: tuple[Corpus, ...] = (),
        ids: tuple[TokenId, ...] = (),
        retrievers: tuple[DrafterName | Drafter, ...] = ("prompt_lookup",),
        top: int = 10,
        share: float = 0.25,
        bypass: int = 5,
        weigh: bool = False,
        longest: int = 16,
        shortest: int = 2,
        tokens: int = 10,
        device: str = "auto",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if top < 0 or bypass < 0 or not 0 <= share <= 1:
            raise ConfigError(
                "top and bypass must be at least 0 and share in 0..1, got "
                f"{top}, {bypass} and {share}"
            )
        if min(shortest, tokens) < 1 or longest < shortest:
            raise ConfigError(
                "shortest and tokens must be at least 1, and longest at least shortest; got "
                f"{shortest}, {tokens} and {longest}"
            )
        if (model is None) == (drafter is None):
            raise ConfigError(
                "rasd needs either a model or a drafter; use rasd:model=FOLDER or rasd:drafter=NAME"
            )
        extra = {"device": device, "tokenizer": tokenizer}
        if drafter is None:
            drafter = registry.make("drafter", "draft_model", model=model, grower=grower, **extra)
        found = [retrievers] if isinstance(retrievers, str) else [*retrievers]
        if index is not None or corpus or ids:
            store = {"index": index, "corpus": corpus, "ids": ids, "tokenizer": tokenizer}
            span = {"longest": longest, "shortest": shortest, "tokens": tokens}
            found.insert(0, registry.make("drafter", "rest", **store, **span))
        if not found:
            raise ConfigError(
                "rasd has nothing to retrieve from; give index=FOLDER, corpus=FILE or "
                "retrievers=prompt_lookup"
            )
        super().__init__((drafter, *found), tokenizer)
        refuse_lazy("rasd", self.parts)
        self.generator, self.retrievers = self.parts[0], self.parts[1:]
        _check_chosen(self.retrievers)
        self.top, self.share, self.bypass, self.weigh = top, share, bypass, weigh
        self.vocab_size = 0  # set by `bind`

    def bind(self, target: Target) -> None:
        super().bind(target)
        self.vocab_size = target.vocab_size
        warm_up()
        likeliest(np.zeros(1, np.int32), np.ones(1), 1)

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        room = self._room(Plan(nodes))
        own = priced(self.generator).draft_seconds(nodes - room, num)
        return own + sum(priced(part).draft_seconds(room, num) for part in self.retrievers)

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        laws = self._laws(seqs, plans)
        begun = [self._begun(*each) for each in zip(seqs, plans, laws, strict=True)]
        trees = self.generator.propose(seqs, [own for _, own in begun], dice)
        return [
            self._fused(seq, plan, tree, found)
            for seq, plan, tree, (found, _) in zip(seqs, plans, trees, begun, strict=True)
        ]

    def retrieved(self, seq: Sequence, plan: Plan, law: Proposal | None) -> list[Continuations]:
        """The continuations of each retriever, pruned by the next-token distribution `law`."""
        firsts = None if law is None or 0 < self.vocab_size <= self.top else self._firsts(law)
        return [self._from(part, seq, plan, firsts) for part in self.retrievers]

    def _laws(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Proposal | None]:
        """Next-token distributions by the generator's source, which caches them; None without."""
        laws: list[Proposal | None] = [None] * len(seqs)
        source: Source | None = getattr(self.generator, "source", None)
        asked = [i for i, plan in enumerate(plans) if self._room(plan)]
        if source is not None and asked:
            for i, law in zip(asked, source.next([(seqs[i], ()) for i in asked]), strict=True):
                laws[i] = law
        return laws

    def _begun(
        self, seq: Sequence, plan: Plan, law: Proposal | None
    ) -> tuple[list[Continuations] | None, Plan]:
        """The retrieved continuations, and the generator's plan with the remaining nodes.

        Without a distribution nothing is retrieved yet, and the whole share is reserved.
        """
        room = self._room(plan)
        if law is None or not room:
            return None, plan.sized(plan.nodes - room)
        found = self.retrieved(seq, plan, law)
        used = min(room, sum(len(each.tokens) for each in found))
        return found, plan.sized(plan.nodes - used)

    def _fused(
        self, seq: Sequence, plan: Plan, tree: Tree, found: list[Continuations] | None
    ) -> Tree:
        if not self._room(plan):
            return tree
        if found is None:
            found = self.retrieved(seq, plan, first_law(tree))
        return graft(tree, found, plan.nodes - len(tree), self.names)

    def _room(self, plan: Plan) -> int:
        """Number of nodes reserved for retrieval."""
        return 0 if plan.is_empty or not self.top else int(self.share * plan.nodes)

    def _firsts(self, law: Proposal) -> FirstTokens:
        """The `top` most probable next tokens with their weights; of equal ones the first."""
        ids, probs = law.ids, law.probs
        if len(ids) > self.top or min(probs.tolist(), default=0.0) <= 0:
            ids, probs = likeliest(ids, probs, self.top)
        return FirstTokens(ids.astype(np.int64), probs if self.weigh else np.ones(len(ids)))

    def _from(
        self, part: Drafter, seq: Sequence, plan: Plan, firsts: FirstTokens | None
    ) -> Continuations:
        retrieve = getattr(part, "retrieve", None)  # prunes before it selects by count
        if retrieve is not None:
            return retrieve(seq, plan, firsts, self.bypass)
        (tree,) = part.propose([seq], [plan], [seq.dice])  # POINT nodes use no dice
        return pruned(
            Continuations(tree.tokens, tree.parents, np.ones(len(tree), np.int64), 0, 0), firsts
        )


def _check_chosen(parts: Many[Drafter]) -> None:
    """Raises ConfigError if a retriever draws."""
    for part in parts:
        if part.labels != {"point"}:
            raise ConfigError(
                f"rasd retrieves POINT nodes only, but {name_of(part)!r} draws tokens; use "
                f"drafter={name_of(part)}, or fuse"
            )


def first_law(tree: Tree) -> Proposal | None:
    """The q of the first token of a tree; None for a POINT node."""
    roots = np.flatnonzero(tree.parents == -1)
    return tree.q(int(roots[0])) if len(roots) else None


def pruned(found: Continuations, firsts: FirstTokens | None) -> Continuations:
    """The paths that begin with an allowed token."""
    if firsts is None:
        return found
    allowed, place, kept = set(firsts.ids.tolist()), list[int](), 0
    for token, parent in zip(found.tokens.tolist(), found.parents.tolist(), strict=True):
        stays = token in allowed if parent < 0 else place[parent] >= 0
        place.append(kept if stays else -1)
        kept += stays
    left = np.flatnonzero(np.array(place, dtype=np.int32) >= 0)
    parents = [place[parent] if parent >= 0 else -1 for parent in found.parents[left].tolist()]
    return found._replace(
        tokens=found.tokens[left],
        parents=np.array(parents, dtype=np.int32),
        counts=found.counts[left],
    )


def graft(tree: Tree, found: Many[Continuations], room: int, names: Many[str]) -> Tree:
    """The tree with retrieved paths merged in, as at most `room` appended nodes.

    Each retriever gets an equal share of the remaining room. names: of the drafter and the
    retrievers.
    """
    start = size = len(tree)
    tokens, parents, origins = np.empty((3, size + room), np.int32)
    tokens[:size], parents[:size] = tree.tokens, tree.parents
    sources: tuple[str, ...] = ()
    for i, each in enumerate(found):
        share = -(-(start + room - size) // (len(found) - i))
        before, size = (
            size,
            overlay(tokens, parents, size, size + share, each.tokens, each.parents, origins),
        )
        sources += (names[i + 1],) * (size - before)
    if size == start:
        return tree
    laws, cells = np.empty((2, size), np.int8)
    rows, cells[start:] = np.empty(size, np.int32), -1
    laws[:start], laws[start:] = tree.laws, POINT
    rows[:start], rows[start:] = tree.rows, -1
    if tree.cells is not None:
        cells[:start] = tree.cells
    return Tree(
        tokens=tokens[:size],
        parents=parents[:size],
        laws=laws,
        rows=rows,
        starts=tree.starts,
        q_ids=tree.q_ids,
        q_probs=tree.q_probs,
        cells=None if tree.cells is None else cells,
        sources=(tree.sources or (names[0],) * start) + sources,
    )
