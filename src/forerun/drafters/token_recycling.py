"""Token Recycling: drafts from the target's latest top-K successors of each token.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling", 2024. A matrix keeps, for every token of the vocabulary, the target's latest top-K
successors. A fixed tree is filled from it breadth first. Every verified row, also of rejected
nodes, overwrites the row of its token. No second model, no training, V x K ids of state.

Exact: POINT nodes, at any temperature (the paper is greedy only). Needs the target's logits at all
nodes of a step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable
from collections.abc import Sequence as Many
from pathlib import Path as FilePath

import numpy as np

from forerun.core.dice import Dice
from forerun.core.growing import Path, Source
from forerun.core.mixins import Persistent
from forerun.core.records import Plan, Sequence, Snapshot, Step
from forerun.core.roles import Target
from forerun.core.scopes import kept_key, key_of
from forerun.core.tree import EMPTY, Proposal, Tree
from forerun.core.tree_template import DEFAULT, RANK_VALUES, Template
from forerun.errors import ConfigError
from forerun.ngrams.tables.adjacency import pool
from forerun.ngrams.tables.adjacency.cpu import warm_up
from forerun.ngrams.tables.adjacency.pool import MAX_ENTRIES, Matrices, Matrix
from forerun.ngrams.tables.logits.pool import in_bytes
from forerun.registry import File

_CHOICES = {"scope": ("request", "group", "tenant", "global"), "update_from": ("tree", "path")}

# The published tree, version 2.2.2: 80 places as digits of ranks, 8/21/25/15/8/3 by level
PLACES = """
0 1 2 3 4 5 6 7
00 01 02 03 04 05 06 07 10 11 12 13 20 21 22 30 31 40 50 60 70
000 001 002 003 004 005 006 007 010 011 012 020 021 030 040 050 060 070 100 101 110 200 300 400 500
0000 0001 0002 0003 0004 0010 0011 0020 0030 0040 0100 0200 1000 2000 3000
00000 00001 00002 00010 00020 00100 01000 10000
000000 000001 000100
"""


def published() -> Template:
    """The paper's tree, ordered by RANK_VALUES so that a smaller plan takes the best places."""
    places = [tuple(map(int, word)) for word in PLACES.split()]

    def worth(place: tuple[int, ...]) -> float:
        return math.prod(RANK_VALUES[rank] for rank in place)

    return Template(tuple(sorted(places, key=lambda p: (-worth(p), len(p), p))))


PUBLISHED = published()
RANK_WEIGHTS = 1.0 / np.arange(1, MAX_ENTRIES + 1)  # weights by rank
# probabilities of n successors, by n
RANK_PROBS = [RANK_WEIGHTS[:n] / RANK_WEIGHTS[:n].sum() for n in range(MAX_ENTRIES + 1)]


class TokenRecycling(Persistent):
    """An adjacency matrix with a fixed tree template.

    entries: successors kept per token, k in the paper. template: "published" (80 places),
    "best_first" (625 ranked places), a Template or its file.
    scope: which sequences share a matrix, "request", "group", "tenant" or "global"; the last two
    outlive requests, as in the paper. budget_mb: memory of all matrices; the least recently used
    are dropped first. update_from: "tree" learns from every verified row, "path" from those of
    emitted tokens. tensors: keep the matrix in torch; None: if the logits are not on the CPU.
    """

    labels = frozenset({"point"})

    def __init__(
        self,
        *,
        entries: int = 8,
        template: Template | FilePath | File = "published",
        scope: str = "tenant",
        budget_mb: float = 64,
        update_from: str = "tree",
        tensors: bool | None = None,
    ) -> None:
        for name, value in (("scope", scope), ("update_from", update_from)):
            if value not in _CHOICES[name]:
                raise ConfigError(f"{name} must be one of {_CHOICES[name]}, got {value!r}")
        self.scope, self.update_from, self.template = scope, update_from, _as_template(template)
        self._matrices = Matrices(entries=entries, budget=in_bytes(budget_mb), tensors=tensors)
        self._target: weakref.ref[Target] | None = None

    def bind(self, target: Target) -> None:
        self._matrices.check(target.vocab_size)
        if self._target is not None and self._target() is not target:
            self._matrices.clear()  # they hold another model's candidates
        self._target = weakref.ref(target)
        warm_up()

    def finish(self, seq: Sequence) -> None:
        if self._key(seq) is seq:
            self._matrices.drop(seq)

    def forget(self, group: Hashable) -> None:
        self._matrices.drop(group)

    def matrix(self, seq: Sequence) -> Matrix | None:
        """The matrix that a sequence drafts from; None while it is empty."""
        return self._matrices.get(self._key(seq))

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        trees = [EMPTY] * len(seqs)
        alike: dict[tuple[Hashable, int, int], list[int]] = {}
        for i, (seq, plan) in enumerate(zip(seqs, plans, strict=True)):
            if not plan.is_empty:
                alike.setdefault((self._key(seq), plan.nodes, plan.depth), []).append(i)
        for (_, nodes, depth), those in alike.items():
            if (matrix := self.matrix(seqs[those[0]])) is not None:
                roots = [seqs[i].tokens[-1] for i in those]
                drafted = matrix.draft(roots, self.template.first(nodes), depth)
                for i, tree in zip(those, drafted, strict=True):
                    trees[i] = tree
        return trees

    def observe(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            tree, nodes = step.trees[i], step.visited(i)
            if not nodes:
                continue
            if self.update_from == "tree":  # by depth and index, the accepted path last
                by_depth = np.argsort(tree.depths, kind="stable").tolist()
                nodes = [*by_depth, -1, *step.verdicts[i].nodes]
            tokens = [*tree.tokens.tolist(), seq.tokens[-len(step.emitted[i]) - 1]]  # last: root
            latest = {tokens[node]: node for node in nodes}  # a token's last node wins
            rows = np.fromiter(latest.values(), np.int64, len(latest)) + 1
            tokens_of_rows = np.fromiter(latest, np.int64, len(latest))
            self._matrices.learn(self._key(seq), tokens_of_rows, rows, step.laws[i].rows.logits)

    def memory_report(self) -> dict[str, int]:
        return {"adjacency matrix": self._matrices.nbytes}

    def keep(self, tenant: str = "") -> None:
        if self.scope in ("request", "group") or (self.scope == "global" and tenant):
            raise ConfigError(
                f"a matrix of scope {self.scope!r} cannot be saved for one tenant; use "
                "token_recycling:scope=tenant"
            )

    def snapshot(self, tenant: str = "") -> Snapshot:
        self.keep(tenant)
        matrix = self._matrices.get(self._kept_key(tenant))
        if matrix is None:
            raise ConfigError("the matrix is empty, so there is nothing to save; generate first")
        return pool.snapshot("token_recycling", matrix.to_numpy())

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        self.keep(tenant)
        target = None if self._target is None else self._target()
        vocab = {} if target is None else {"vocab": target.vocab_size}
        snapshot.expect("token_recycling")
        snapshot.check({"entries": self._matrices.entries} | vocab)
        self._matrices.restore(self._kept_key(tenant), snapshot)

    @classmethod
    def merge(cls, snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
        whole = pool.merge(snapshots)
        if max_bytes is not None and whole.nbytes > max_bytes:
            raise ConfigError(
                f"expected at least {whole.nbytes} bytes, the size of a matrix with these "
                f"settings, got {max_bytes}; allow more, or keep fewer entries"
            )
        return pool.snapshot(snapshots[0].kind, whole)

    def _key(self, seq: Sequence) -> Hashable:
        return key_of(self.scope, seq)

    def _kept_key(self, tenant: str) -> Hashable:
        return kept_key(self.scope, tenant)


class MatrixSource(Source):
    """Proposals from the matrix, one path at a time; with a grower the plain form of `propose`.

    Probabilities only encode the rank.
    """

    def __init__(self, drafter: TokenRecycling) -> None:
        self.drafter = drafter

    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        return [self._one(seq, path) for seq, path in requests]

    def _one(self, seq: Sequence, path: Path) -> Proposal | None:
        matrix = self.drafter.matrix(seq)
        if matrix is None:
            return None
        ids = matrix.successors(path[-1] if path else seq.tokens[-1])
        return Proposal(ids, RANK_PROBS[len(ids)]) if len(ids) else None


def _as_template(template: Template | FilePath | File) -> Template:
    named = {"published": PUBLISHED, "best_first": DEFAULT}
    if isinstance(template, Template):
        return template
    return named.get(str(template)) or Template.load(FilePath(template))
